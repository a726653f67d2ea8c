"""The time at which the command of this process began, for limits that include its imports."""

import time

_begun_s: float | None = None


def begin() -> None:
    """Record that a command begins now."""
    global _begun_s
    _begun_s = time.monotonic()


def begun_s() -> float:
    """Return when the command began, by `time.monotonic`; if that is unknown, the present time."""
    return time.monotonic() if _begun_s is None else _begun_s
