"""A process beside this one, for what nobody waits for: figures, and the tracking store.

`put` and `ask` hand it calls, which it makes one after the other. Without the process, in workers
of a sweep and in tests, the calls are made here and now. README's sweep takes 0.82 of the time
with it (median of five pairs on two cores).
"""

import gc
import logging
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import connection, get_context, parent_process
from typing import Any, ParamSpec, TypeVar

import cloudpickle  # takes lambdas too: what a task compares may hold some

from resnet8ptq.core.console import LogHandler
from resnet8ptq.core.errors import TrackingError
from resnet8ptq.core.text import one_line

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_allowed = _used = False
_pool: ProcessPoolExecutor | None = None
_pid: Future[int]  # of its process
_pending: deque[Future[Any]] = deque()


@contextmanager
def allowed() -> Iterator[None]:
    """Let calls of the block go to a process, which the first of them starts; wait for them."""
    global _allowed, _used, _pool
    _allowed, _used = True, False
    try:
        yield
    finally:
        _allowed = False
        try:
            wait()
        except TrackingError as error:
            log.error("%s", error)
        if _pool is not None:
            if not _used:  # what it has prepared for is not coming
                os.kill(_pid.result(), signal.SIGKILL)
            _pool.shutdown()
            _pool = None


def put(function: Callable[P, T], *args: P.args, **named: P.kwargs) -> "Future[T]":
    """Have a function of a module called, after what was put before; see `wait` for its errors.

    Raises:
        Exception: the function's own, where it is called here and now.
    """
    global _allowed, _used
    if _allowed:
        _used = True
        try:
            future = _start().submit(_call, cloudpickle.dumps(partial(function, *args, **named)))
        except BrokenProcessPool:
            log.warning("the process that draws and uploads has died; this one goes on with it")
            _allowed = False
        else:
            _pending.append(future)
            return future
    done: Future[T] = Future()
    done.set_result(function(*args, **named))
    return done


def prepare(function: Callable[[], object]) -> None:
    """Have a function called ahead of what needs it, where a process has the time for it."""
    if _allowed:
        _start().submit(_prepare, function)


def ask(function: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Have a function called, after what was put before, and return what it returns."""
    return result(put(function, *args, **named))


def result(future: "Future[T]") -> T:
    """Return what a call that was put returns; its error is then not one of those of `wait`."""
    if future in _pending:
        _pending.remove(future)
    return future.result()


def rest() -> None:
    """Wait until nothing runs beside, for what is timed; errors stay for `wait`."""
    futures.wait(_pending)


def wait() -> None:
    """Wait until everything is done.

    Raises:
        TrackingError: something has failed; names the first error, and how many there were.
    """
    errors = []
    while _pending:
        if error := _pending.popleft().exception():
            errors.append(error)
    if errors:
        several = f" ({len(errors)} errors, of which this is the first)" * (len(errors) > 1)
        raise TrackingError(
            f"not all was drawn and uploaded: {one_line(errors[0])}{several}; the runs are kept in "
            "their folders, and `python -m resnet8ptq sync` logs what the store lacks"
        ) from errors[0]


def _start() -> ProcessPoolExecutor:
    global _pool, _pid
    if _pool is None:
        sys.stdout.flush()  # or a forked process would print it again
        # A fork has what is imported so far; it is made before the frameworks start threads.
        context = get_context("fork" if sys.platform == "linux" else "spawn")
        _pool = ProcessPoolExecutor(1, context, _begin)
        _pid = _pool.submit(os.getpid)
    return _pool


def _prepare(function: Callable[[], object]) -> None:
    # What an import makes stays: looking for garbage among it takes a third of MLflow's time.
    gc.disable()
    try:
        function()
    finally:
        gc.freeze()
        gc.enable()


def _call(content: bytes) -> Any:
    try:
        return pickle.loads(content)()
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # some of MLflow's: the other process could not read them
            raise TrackingError(one_line(error)) from None
        raise


def _begin() -> None:
    """Go on after Ctrl-C and SIGTERM, which are the other process's to handle; end with it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.basicConfig(handlers=[LogHandler()], level=logging.WARNING, force=True)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
