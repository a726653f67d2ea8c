"""Runs a process to its end and measures its time and memory."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# ru_maxrss is in KiB on Linux, in bytes on macOS.
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True)
class Usage:
    """Wall-clock and CPU seconds and peak resident memory of one process.

    CPU time counts the processes that it started and waited for; the peak is that of the largest.
    """

    wall_s: float
    user_s: float
    sys_s: float
    max_rss_bytes: int


@dataclass(frozen=True)
class Finished:
    """The usage and the output of a process."""

    usage: Usage
    out: str
    err: str


def run(command: Sequence[str | Path], folder: Path, env: Mapping[str, str]) -> Finished:
    """Run `command` in `folder` to its end.

    The kernel counts the caller's memory in the peak of the started process, until its `exec`. So
    the caller must stay small.

    Raises:
        RuntimeError: it failed; with the end of its output.
    """
    out, err = folder / ".stdout", folder / ".stderr"
    with out.open("wb") as out_file, err.open("wb") as err_file:
        start = time.perf_counter()
        child = subprocess.Popen(command, cwd=folder, env=env, stdout=out_file, stderr=err_file)
        try:
            _, status, used = os.wait4(child.pid, 0)
        except BaseException:  # Ctrl-C, SIGTERM
            child.terminate()
            child.wait()
            raise
        wall_s = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)  # Popen would wait for it once more
    finished = Finished(
        Usage(wall_s, used.ru_utime, used.ru_stime, used.ru_maxrss * _RSS_UNIT),
        out.read_text(errors="replace"),
        err.read_text(errors="replace"),
    )
    if child.returncode != 0:
        words = " ".join(map(str, command))
        raise RuntimeError(f"{words}: exit code {child.returncode}\n{finished.err[-2000:]}")
    return finished
