"""Background process for drawing and uploading, so that runs seldom wait for figures or MLflow.

`put` and `ask` queue calls, which the background process runs in order. Outside of `allowed`, for
example in workers of a sweep, each call runs immediately in this process.
"""

import gc
import logging
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from multiprocessing import connection, get_context, parent_process
from typing import Any, ParamSpec, TypeVar

import cloudpickle  # it also pickles lambdas, which a comparison may hold

from resnet8ptq.core import invocation
from resnet8ptq.core.console import LogHandler, waiting
from resnet8ptq.core.errors import TrackingError, portable
from resnet8ptq.core.text import one_line

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_allowed = _used = False
_pool: ProcessPoolExecutor | None = None
_pid: Future[int]  # the id of the background process
_pending: deque[Future[Any]] = deque()
_store: Sequence[str] = ()  # the settings that name the store


@contextmanager
def allowed() -> Iterator[None]:
    """Allow `put` to send calls to the background process while the block runs.

    After the block, this function calls `wait`, and logs the `TrackingError` that `wait` raises.
    The first `put` or `prepare` starts the process.
    """
    global _allowed, _used, _pool, _store
    _allowed = True
    _used = False
    _store = ()
    try:
        yield
    finally:
        _allowed = False
        try:
            wait()
        except TrackingError as error:
            log.error("%s", error)
        if _pool is not None:
            if not _used:  # no call was sent, so do not wait for its preparation
                os.kill(_pid.result(), signal.SIGKILL)
            _pool.shutdown()
            _pool = None


def put(function: Callable[P, T], *args: P.args, **named: P.kwargs) -> "Future[T]":
    """Call a function in the background, after earlier calls; return the call's future.

    `result` raises the error of the call. If nobody asks for the result, `wait` reports the error.
    For the background process, function and arguments are pickled.

    Raises:
        Exception: the function's own error, if the function runs in this process.
    """
    global _allowed, _used
    if _allowed:
        _used = True
        try:
            future = _start().submit(_call, cloudpickle.dumps(partial(function, *args, **named)))
        except BrokenProcessPool:
            log.warning("the background process has died; this process now draws and uploads")
            _allowed = False
        else:
            _pending.append(future)
            return future

    # Call the function here
    done: Future[T] = Future()
    done.set_result(function(*args, **named))
    return done


def prepare(function: Callable[[], object]) -> None:
    """Call a function such as a slow import in the background, before it is needed.

    Outside of `allowed`, nothing is called. The function's result and error are dropped.
    """
    if _allowed:
        _start().submit(_prepare, function)


def ask(function: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Call a function in the background, after earlier calls, and return its result."""
    return result(put(function, *args, **named))


def result(future: "Future[T]") -> T:
    """Return the result of a call, or raise its error; `wait` then does not report it again.

    An error that cannot be pickled becomes a `TrackingError` with its text.
    """
    with _waiting_for([future]):
        if future in _pending:
            _pending.remove(future)
        return future.result()


def wait_until_idle() -> None:
    """Wait for the calls of `put`, for example before a measurement.

    `wait` still reports their errors.
    """
    with _waiting_for(_pending):
        futures.wait(_pending)


def _waiting_for(calls: Iterable["Future[Any]"]) -> AbstractContextManager[None]:
    """Show that this process waits for calls, unless they are done."""
    if all(call.done() for call in calls):
        return nullcontext()
    return waiting("Waiting for MLflow and the figures")


def name_store(words: Sequence[str]) -> None:
    """Keep the settings that name the store, for the command in the error of `wait`."""
    global _store
    _store = words


def wait() -> None:
    """Wait for the calls of `put` whose results nobody has asked for.

    Raises:
        TrackingError: a call failed; the message has the first error and the mend.
    """
    errors = []
    while _pending:
        error = _pending.popleft().exception()
        if error:
            errors.append(error)
    if errors:
        first = one_line(errors[0])
        if len(errors) > 1:
            first += f" (the first of {len(errors)} errors)"
        raise TrackingError(
            f"drawing or uploading failed: {first}; all runs are in their folders; "
            f"`{invocation.command('sync', *_store)}` logs the runs that MLflow lacks"
        ) from errors[0]


def _start() -> ProcessPoolExecutor:
    global _pool, _pid
    if _pool is None:
        sys.stdout.flush()  # a forked process would print the buffer again
        # A fork keeps all imports so far. The process is forked before frameworks start threads.
        method = "fork" if sys.platform == "linux" else "spawn"
        _pool = ProcessPoolExecutor(1, get_context(method), _begin)
        _pid = _pool.submit(os.getpid)
    return _pool


def _prepare(function: Callable[[], object]) -> None:
    # Imported objects stay, so collecting garbage among them wastes a third of MLflow's import.
    gc.disable()
    try:
        function()
    finally:
        gc.freeze()
        gc.enable()


def _call(content: bytes) -> Any:
    try:
        return pickle.loads(content)()
    except Exception as error:  # the main process cannot unpickle some of MLflow's errors
        raise portable(error, TrackingError) from None


def _begin() -> None:
    """Ignore Ctrl-C and SIGTERM, which the parent handles; end when the parent ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    form = "%(message)s"  # the handler shows the level
    logging.basicConfig(handlers=[LogHandler()], level=logging.WARNING, format=form, force=True)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
