"""Runs one command for `core.command_process`, and writes its answer as JSON to a file."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resnet8ptq.core import command, confinement, files
from resnet8ptq.core.errors import ConfigError

Words = list[str]


def main() -> None:
    """Run the command that this process's arguments name, and write its answer.

    The arguments are the file for the answer, the caller's process id, the command, and its words.
    """
    answer, caller, name, *words = sys.argv[1:]
    del sys.argv[1:]
    confinement.die_with(int(caller))
    command.let_hydra_raise()
    result = COMMANDS[name](words)
    files.write_text(Path(answer), json.dumps(result))


def _run(words: Words) -> dict[str, Any]:
    """Return the exit code, the error if any, and the folder of the run or of the sweep.

    The folder of a run is missing if its job failed or recorded nothing, and that of a sweep if the
    sweep did not begin. An error of a sweep is dropped if a run is recorded in the sweep's folder,
    because failed jobs are not an error of the command.
    """
    from resnet8ptq import run
    from resnet8ptq.core import background
    from resnet8ptq.tracking.mlflow_store import sync

    with background.allowed():
        outcome = run.execute(words, command.exit_code)  # the caller raises the error
    result = _describe(outcome.ending)
    if outcome.sweep_folder is not None:
        result["sweep_folder"] = str(outcome.sweep_folder)
        if sync.load_records(outcome.sweep_folder):
            result["error"] = None
    if outcome.record is not None:
        result["record_folder"] = outcome.record.folder
    return result


def _deploy(words: Words) -> dict[str, Any]:
    from resnet8ptq.deploy import deploying

    return _describe(command.finish(lambda: deploying.main(words), report=command.exit_code))


_SWEEP_WORDS = re.compile(r"to run each: -m .*")  # is advice for the command line only


def _describe(ending: command.Ending) -> dict[str, Any]:
    error = ending.error
    explained = None
    if error is not None:
        explained = _SWEEP_WORDS.sub("to run each: ptq.sweep", command.explain(error))
    kind = type(error).__name__
    if isinstance(error, command.COMPOSING):  # Hydra found the wrong setting
        kind = ConfigError.__name__
    return {"code": ending.code, "error": explained, "error_type": kind}


COMMANDS: dict[str, Callable[[Words], dict[str, Any]]] = {"run": _run, "deploy": _deploy}
