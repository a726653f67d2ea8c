"""Runs functions that read untrusted files, in separate processes with limits."""

import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import Connection
from typing import TypeVar

from resnet8ptq.core import confinement
from resnet8ptq.core.errors import PtqError, portable

log = logging.getLogger(__name__)

T = TypeVar("T")


def call(
    function: Callable[..., T],
    *args: object,
    crashed: PtqError,
    network: bool = False,
    seconds: float | None = None,
) -> T:
    """Call a function in a separate process; function, arguments and result are pickled.

    TensorFlow's memory and settings end with the separate process, and a file that crashes the
    reader does not end the sweep. The separate process ends when the calling process ends.

    Args:
        crashed: the error to raise if the process ends without an answer, or the time is up.
        network: whether the function may access the internet, where a user's code may download
            files. Otherwise it cannot, if the system can prevent access; see `confinement`.
        seconds: the time limit by the clock; None for no limit. The limit of `confinement` is on
            the CPU time of all cores, so an endless loop on one core reaches it late.

    Raises:
        PtqError: the error `crashed`.
        Exception: the function's own error; a `RuntimeError` with its text if it cannot be pickled.
    """
    with start(network) as process:
        try:
            process.send_bytes(pickle.dumps((function, args)))
            if not process.poll(seconds):
                raise crashed
            returned, result, connected = process.recv()
        except (EOFError, OSError) as error:
            raise crashed from error
    if connected:
        _warn(connected)
    if not returned:
        raise result
    return result


@cache
def _warn(reason: str) -> None:
    log.warning("the process that reads networks can reach the internet: %s", reason)


@contextmanager
def start(network: bool = False) -> Iterator[Connection]:
    """Start a process and yield the connection to it; the process ends with the block.

    Unlike a spawned process of `multiprocessing`, it does not import this program's main module,
    which may start threads: `confinement` needs a single thread. Its temporary folder is
    removed at its end.
    """
    ours, theirs = multiprocessing.Pipe()
    code = "from resnet8ptq.core import isolation; isolation.serve()"
    words = [str(theirs.fileno()), str(os.getpid()), str(int(network))]
    with ours, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # The process inherits its end of the pipe, which is then closed here
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", code, *words],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": folder},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        try:
            yield ours
        finally:
            process.kill()
            process.wait()


def serve() -> None:
    """Answer calls from the parent process until the connection closes."""
    # Set all limits before the first call is read
    number, parent, network = map(int, sys.argv[1:])
    confinement.die_with(parent)
    confinement.limit()
    connected = "" if network else confinement.cut_network()
    del sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets Ctrl-C too, and ends this one

    # Answer one call after the other
    calls = Connection(number)
    while True:
        try:
            content = calls.recv_bytes()
        except EOFError:
            return
        calls.send((*_answer(content), connected))


def _answer(content: bytes) -> tuple[bool, object]:
    """Return True and the result of a pickled call, or False and its error."""
    try:
        function, args = pickle.loads(content)
        return True, function(*args)
    except PtqError as error:
        return False, error
    except Exception as error:
        error = portable(error)
        error.add_note(traceback.format_exc())
        return False, error
    except BaseException as error:  # a Rust library panicked, and its state is unknown
        if isinstance(error, SystemExit | KeyboardInterrupt):
            raise
        os._exit(1)
