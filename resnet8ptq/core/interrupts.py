"""Delays Ctrl-C and SIGTERM during a transaction."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the block ends.

    A second signal reaches a handler of Python code at once. An exception inside a transaction of
    SQLAlchemy can leave its connection open. An open connection keeps an SQLite database locked
    until the process ends. In threads other than the main one, which alone gets signals, nothing
    changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        handler = before[signal.Signals(number)]
        if len(received) > 1 and callable(handler):
            handler(number, frame)

    before = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if handler is not None:  # None stands for a handler of C code, which cannot be restored
            before[number] = handler
    for number in before:
        signal.signal(number, note)

    # Send a delayed signal after the transaction, to the handler from before
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])
