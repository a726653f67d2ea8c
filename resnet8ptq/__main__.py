"""The commands; `resnet8ptq` in the place of `python -m resnet8ptq` is the same.

    python -m resnet8ptq init       a starting point for a project of your own
    python -m resnet8ptq run        quantize, evaluate, track: a run, or with -m a sweep
    python -m resnet8ptq ui         browse the runs: MLflow on 127.0.0.1
    python -m resnet8ptq advise     what is worth trying on this CPU, before any sweep
    python -m resnet8ptq deploy     a run's model as a folder that runs elsewhere, checked there
    python -m resnet8ptq report     the report of a sweep again, from MLflow alone
    python -m resnet8ptq sync       log the runs that MLflow lacks
    python -m resnet8ptq server     MLflow on PostgreSQL, for a team

Each takes key=value; `--help` lists the keys. In a checkout, `python run.py` is the same as `run`.
"""

import sys
from pathlib import Path
from pkgutil import resolve_name

from resnet8ptq.core import importing

RUN = "run"
COMMANDS = {
    "init": "resnet8ptq.starter.folder:main",
    "ui": "resnet8ptq.server.ui:main",
    "advise": "resnet8ptq.experiment.advising:main",
    "deploy": "resnet8ptq.deploy.deploying:main",
    "report": "resnet8ptq.report.page:main",
    "sync": "resnet8ptq.tracking.sync:main",
    "server": "resnet8ptq.server.server:main",
}


def call(words: list[str]) -> None:
    """Run the command that the first word names with the others.

    Raises:
        ConfigError: there is no such command.
    """
    from resnet8ptq.core.errors import ConfigError
    from resnet8ptq.core.text import or_nearest

    name, *others = words or ["--help"]
    if name in ("-h", "--help"):
        print(__doc__)
    elif name not in COMMANDS:
        raise ConfigError(f"{name}: no such command; takes {or_nearest(name, [RUN, *COMMANDS])}")
    else:
        resolve_name(COMMANDS[name])(others)


def main() -> int:
    """Answer the command line; return the exit code."""
    importing.allow(Path.cwd())  # before other imports: with `-m`, Python searches there first
    from resnet8ptq.core import command

    if sys.argv[1:2] == [RUN]:
        del sys.argv[1]  # Hydra reads the words from there
        return int(resolve_name("resnet8ptq.run:main")())
    return command.main(lambda: call(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
