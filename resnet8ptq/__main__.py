"""Commands of resnet8ptq:

    resnet8ptq init       write the first files of a project of your own
    resnet8ptq run        quantize, evaluate and track: a run, or a sweep with -m
    resnet8ptq ship       find a model whose loss passes the limit, in a given time
    resnet8ptq ui         browse the runs: MLflow on 127.0.0.1
    resnet8ptq advise     list configurations worth trying on this CPU, before any sweep
    resnet8ptq deploy     export a run's model as a folder for other machines, verified
    resnet8ptq measured   replace a run's figures by those of another machine
    resnet8ptq report     write the report of a sweep or a run again, from MLflow alone
    resnet8ptq verdict    report a verdict, as JSON or Markdown and an exit code, for CI
    resnet8ptq judge      report a verdict on quantized files of other programs
    resnet8ptq sync       log the runs that are missing in MLflow

Settings are written as key=value; `--help` after a command explains it. `resnet8ptq --version`
prints the version. In a checkout, `python run.py` calls `run`.
"""

import sys
from pathlib import Path
from pkgutil import resolve_name

from resnet8ptq.core import clock, importing

COMMANDS = {
    "init": "resnet8ptq.starter.folder:main",
    "run": "resnet8ptq.run:start",
    "ship": "resnet8ptq.shipping:main",
    "ui": "resnet8ptq.server.ui:main",
    "advise": "resnet8ptq.exploration.search.advising:main",
    "deploy": "resnet8ptq.deploy.deploying:main",
    "measured": "resnet8ptq.deploy.measured:main",
    "report": "resnet8ptq.report.pages.page:main",
    "verdict": "resnet8ptq.results.continuous_integration:main",
    "judge": "resnet8ptq.judging:main",
    "sync": "resnet8ptq.tracking.mlflow_store.sync:main",
}


def call(words: list[str]) -> int | None:
    """Run the command named by the first word; the other words are its arguments.

    The command's own errors pass unchanged.

    Returns:
        The exit code; None is 0.

    Raises:
        ConfigError: the command is unknown.
    """
    from resnet8ptq.core import invocation
    from resnet8ptq.core.console import waiting
    from resnet8ptq.core.errors import ConfigError

    name, *others = words or ["--help"]
    if name in ("-h", "--help"):
        print(invocation.adapt(__doc__))
        return None
    if name == "--version":
        print(invocation.version())
        return None
    if name not in COMMANDS:
        raise ConfigError(_explain_unknown(name, words))

    # Import only the libraries of this command
    with waiting("Loading libraries"):
        command = resolve_name(COMMANDS[name])
    code: int | None = command(others)
    return code


def _explain_unknown(name: str, words: list[str]) -> str:
    """Return the message for an unknown command, with the mend if one is known."""
    from resnet8ptq.core import invocation, other_names
    from resnet8ptq.core.text import or_nearest

    if name in other_names.ABSENT:
        return f"{name}: no such command; {other_names.ABSENT[name]}"
    if name in other_names.COMMANDS:
        meant = other_names.COMMANDS[name].split()
        return f"{name}: no such command; try {invocation.command(*meant, *words[1:])}"
    if "=" in name or Path(name).exists() or name == "-m":
        return f"{name}: no such command; try {invocation.command('run', *words)}"
    return f"{name}: no such command; expected {or_nearest(name, COMMANDS)}"


def main(words: list[str] | None = None) -> int:
    """Run a command line, by default this process's arguments; return the exit code."""
    clock.begin()
    # Called before other imports, because with `-m` Python searches there first
    importing.allow(Path.cwd())
    from resnet8ptq.core import console

    console.never_silent()
    from resnet8ptq.core import command  # imports Hydra

    typed = sys.argv[1:] if words is None else words
    code = command.main(lambda: call(typed))
    console.never_silent(between="")
    return code


if __name__ == "__main__":
    sys.exit(main())
