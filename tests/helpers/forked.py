"""`run.py` in a process of its own that begins with its imports done: most of what a start takes.

It is forked from one that has only imported. It does not wait for the disk, and its figures are
empty pictures, but for those of jobs in processes of their own. In all else it is a process as a
shell starts it.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import sqlite3
import sys
import threading
import time
from contextlib import closing
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from hydra_plugins.resnet8ptq_launchers import process_jobs
from resnet8ptq.core import figures
from tests.helpers.calling import EMPTY, QUICK, RUN, Called, clean_environment
from tests.helpers.stores import new_store, without_waiting_for_the_disk

IMPORTED = [*process_jobs.IMPORTED, "resnet8ptq.report.pages.page", "mlflow.cli", __name__]
PATIENCE_S = 240


def start_server() -> Any:
    """Start the process that is forked, unless it is there; return multiprocessing's context."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    forkserver.ensure_running()
    return context


def enter(folder: Path, env: dict[str, str]) -> None:
    """Make this process one that was started in `folder` with these variables."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    without_waiting_for_the_disk().start()


class Process:
    """A running `run.py`; killed at the end of the block, should it still run."""

    def __init__(
        self, folder: Path, *args: str, strike: tuple[int, int] | None = None, **env: str
    ) -> None:
        """Start in `folder`; `strike` is the job and the PID of `strike_before_results`."""
        context = start_server()
        self.folder = folder
        variables = clean_environment(**env)
        self._err, err = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(folder, args, variables, strike, err))
        self._process.start()
        err.close()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._err.close()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def wait_for_jobs(self, numbers: set[str]) -> None:
        """Return once these jobs of the sweep have open runs in MLflow's store, which is there."""
        end = time.monotonic() + PATIENCE_S
        while not numbers <= _find_running_jobs(self.folder / "mlruns" / "mlflow.db"):
            if wait([self._process.sentinel], 0.1) or time.monotonic() > end:
                pytest.fail(f"too few runs were started; {self._process.exitcode}")

    def wait(self) -> Called:
        """Wait until it and whatever it started have ended."""
        text = b""
        while wait([self._err], PATIENCE_S):
            part = os.read(self._err.fileno(), 2**16)
            if not part:  # nobody holds it any more
                self._process.join()
                out = (self.folder / f"{self._process.pid}.out").read_text()
                return Called(self.folder, self._process.exitcode, out, text.decode())
            text += part
        pytest.fail(f"does not end: {text.decode()}")


def call_process(
    folder: Path, *args: str, strike: tuple[int, int] | None = None, **env: str
) -> Called:
    """Do the same as `calling.call` in a process of its own."""
    with Process(folder, *args, strike=strike, **env) as process:
        return process.wait()


def interrupt(folder: Path, number: signal.Signals, running: set[str], *args: str) -> Called:
    """Call a sweep, signal it once the jobs `running` have begun, and wait until all has ended.

    It takes so many bins that calibration alone takes minutes.
    """
    new_store(folder / "mlruns")
    slow = ("calib=entropy", "calib.num_bins=32768", "calib.num_quantized_bins=128")
    with Process(folder, "-m", *args, *QUICK, "dtype=int8,uint8", *slow) as process:
        process.wait_for_jobs(running)
        process.signal(number)
        return process.wait()


def _find_running_jobs(database: Path) -> set[str]:
    """Return the numbers of the jobs with open runs; by MLflow's client it takes 60 ms.

    While jobs write, the database may be locked: then none are known yet.
    """
    query = (
        "SELECT tags.value FROM tags JOIN runs USING (run_uuid) "
        "WHERE tags.key = 'job_number' AND runs.status = 'RUNNING'"
    )
    with closing(sqlite3.connect(database)) as connection:
        try:
            return {number for (number,) in connection.execute(query)}
        except sqlite3.OperationalError:
            return set()


def _run(
    folder: Path,
    args: tuple[str, ...],
    env: dict[str, str],
    strike: tuple[int, int] | None,
    err: Any,
) -> None:
    enter(folder, env)
    with Path(f"{os.getpid()}.out").open("wb") as out:
        os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    err.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    figures.to_png = lambda _: EMPTY
    if strike is not None:
        strike_before_results(*strike)
    sys.argv = [RUN, *args]
    try:
        runpy.run_path(RUN, run_name="__main__")
    finally:  # as an interpreter ends; multiprocessing has its own way, which leaves them out
        threading._shutdown()
        atexit._run_exitfuncs()


def strike_before_results(job: int, victim: int) -> None:
    """Before job number `job` writes its results, kill `victim`.

    That is a PID; 0 is this process.
    """
    from resnet8ptq.experiment import outputs

    write = outputs.write

    def strike(folder: Path, *args: Any, **named: Any) -> None:
        if folder.name.startswith(f"{job}_"):
            os.kill(victim or os.getpid(), signal.SIGKILL)
        write(folder, *args, **named)

    outputs.write = strike
