"""Runs a command of this package in a separate process, for a caller in Python.

For a function that reads an untrusted file, see `isolation`; for drawing and uploading,
`background`.

A command changes much of its process: logging, signals, threads of frameworks, environment. The
caller, such as a notebook, keeps its own state. The command's log appears where the caller's stderr
goes, or is dropped.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from resnet8ptq.core import errors
from resnet8ptq.core.errors import PtqError

_CODE = "from resnet8ptq.api import serving; serving.main()"


def run(name: str, words: Sequence[str], quiet: bool = False) -> dict[str, Any]:
    """Run `resnet8ptq NAME WORDS...`; return its answer, see `api.serving`.

    The answer of `run` has `record_folder` after a single run, and `sweep_folder` after a sweep.

    Args:
        name: the command, one of `api.serving.COMMANDS`.
        quiet: whether the command's log is dropped.

    Raises:
        PtqError: the command failed with this error, or its process ended without an answer.
        KeyboardInterrupt: the caller was interrupted; the command was interrupted too, and has
            ended.
    """
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch, "answer.json")
        with _start([str(answer), str(os.getpid()), name, *words], quiet) as process:
            try:
                _wait(process, quiet)
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)
                process.wait()
                raise

        # The command writes its answer last, also after an error
        if not answer.exists():
            raise PtqError(
                f"{name}: its process ended with code {process.returncode} and no answer; see its "
                "log"
            )
        result: dict[str, Any] = json.loads(answer.read_text("utf-8"))
    if result["error"] is not None:
        kind = getattr(errors, result["error_type"], PtqError)
        raise kind(result["error"])
    return result


def _start(words: Sequence[str], quiet: bool) -> "subprocess.Popen[str]":
    # On a terminal, the command draws its own progress bars.
    direct = not quiet and sys.stderr is sys.__stderr__ and os.isatty(2)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _CODE, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # tables are dropped, because the caller gets the values
        stderr=None if direct else subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches only the caller, which forwards it
    )


def _wait(process: "subprocess.Popen[str]", quiet: bool) -> None:
    """Wait for the end of a process; meanwhile read its log, if that comes through a pipe."""
    if process.stderr is not None:
        reader = threading.Thread(target=_relay, args=(process.stderr, quiet), daemon=True)
        reader.start()
        reader.join()
    process.wait()


def _relay(log: IO[str], quiet: bool) -> None:
    for line in log:
        if not quiet:
            print(line, end="", file=sys.stderr, flush=True)
