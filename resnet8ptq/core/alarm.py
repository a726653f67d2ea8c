"""A wall-clock time limit for code of this process."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_AGAIN_S = 5.0  # repeats the error, in case code has caught the first one


class AlarmError(Exception):
    """The time limit was reached; not a `PtqError`, because some code catches those and goes on."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `AlarmError` in the block after `seconds`, and every 5 seconds from then on.

    Only the main thread of a system with SIGALRM can be interrupted; elsewhere there is no limit.
    Compiled code is interrupted when it returns to Python.

    Args:
        seconds: the time limit; None for no limit.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if seconds is None or not is_main or not hasattr(signal, "SIGALRM"):
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise AlarmError(f"the time is up after {seconds:.0f} s; try a larger minutes=")

    # Keep the handler from before, to restore it after the block
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01), _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
