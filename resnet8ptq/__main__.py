"""The commands beside `python run.py`.

    python -m resnet8ptq advise     list configurations worth trying on this CPU, before any sweep
    python -m resnet8ptq deploy     export a run's model as a folder for other machines, verified
    python -m resnet8ptq report     write the report of a sweep again, from MLflow alone
    python -m resnet8ptq verdict    pass or fail, as JSON and an exit code: one line in CI
    python -m resnet8ptq sync       log the runs that MLflow lacks
    python -m resnet8ptq server     start MLflow on PostgreSQL, for a team

Each command takes key=value; `--help` lists its keys. To quantize, see `python run.py --help`.
"""

import sys
from pkgutil import resolve_name

from resnet8ptq.core import command
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.core.text import or_nearest

COMMANDS = {
    "advise": "resnet8ptq.experiment.advising:main",
    "deploy": "resnet8ptq.deploy.deploying:main",
    "report": "resnet8ptq.report.page:main",
    "verdict": "resnet8ptq.results.continuous_integration:main",
    "sync": "resnet8ptq.tracking.sync:main",
    "server": "resnet8ptq.server.server:main",
}


def call(words: list[str]) -> None:
    """Run the command that the first word names; the other words are its settings.

    Raises:
        ConfigError: an unknown command.
    """
    name, *others = words or ["--help"]
    if name in ("-h", "--help"):
        print(__doc__)
    elif name not in COMMANDS:
        raise ConfigError(f"{name}: no such command; takes {or_nearest(name, COMMANDS)}")
    else:
        resolve_name(COMMANDS[name])(others)


def main() -> int:
    """Run the command line; return the exit code."""
    return command.main(lambda: call(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
