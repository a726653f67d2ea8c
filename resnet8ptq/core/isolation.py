"""Calls that read an untrusted file with TensorFlow or torch: each in a process of its own."""

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

import cloudpickle  # takes lambdas too, which a task may hold

from resnet8ptq.core.confinement import confine
from resnet8ptq.core.errors import PtqError
from resnet8ptq.core.text import one_line

log = logging.getLogger(__name__)

T = TypeVar("T")


def call(function: Callable[..., T], *args: object, crashed: PtqError, network: bool = False) -> T:
    """Call a function in a process of its own; function, arguments and result are pickled.

    TensorFlow's memory and settings go when it ends, and a file that crashes the reader does not
    end the sweep. The process dies with this one, and reaches no network where the system can
    prevent it; see `confinement`.

    Args:
        network: what it calls is the user's own, and may download.

    Raises:
        PtqError: `crashed`, where the process ended before the function did.
    """
    with start(network) as process:
        try:
            process.send_bytes(cloudpickle.dumps((function, args)))
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
    """Start a process, and yield the connection to it; it ends with the block.

    It does not import this program's main module, as processes of `multiprocessing` do: that may
    start threads, which `confinement` must not have yet. Its temporary files are removed with it.
    """
    ours, theirs = multiprocessing.Pipe()
    code = "from resnet8ptq.core import isolation; isolation.serve()"
    words = [str(theirs.fileno()), str(os.getpid()), str(int(network))]
    with ours, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
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
    """Answer the calls that come from the process that started this one, until it ends."""
    number, parent, network = map(int, sys.argv[1:])
    connected = confine(parent, bool(network))
    del sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both; the parent ends this one
    calls = Connection(number)
    while True:
        try:
            content = calls.recv_bytes()
        except EOFError:
            return
        calls.send((*_answer(content), connected))


def _answer(content: bytes) -> tuple[bool, object]:
    try:
        function, args = pickle.loads(content)
        return True, function(*args)
    except PtqError as error:
        return False, error
    except Exception as error:
        error = _portable(error)
        error.add_note(traceback.format_exc())
        return False, error


def _portable(error: Exception) -> Exception:
    """Return an error that can be pickled: those of libraries may hold anything."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # pickle's own, and those of an error's constructor
        return RuntimeError(one_line(error))
    return error
