"""Ctrl-C and SIGTERM: where they may not come in between."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM take effect after the block; the second of them at once.

    For transactions: an exception inside SQLAlchemy can leave its connection open, which keeps an
    SQLite database locked as long as the process lives. Threads but the main one get no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        handler = before[signal.Signals(number)]
        if len(came) > 1 and callable(handler):
            handler(number, frame)

    # None is a handler that is not Python's, which cannot be put back.
    handled = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in handled}
    before = {number: handler for number, handler in before.items() if handler is not None}
    for number in before:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
