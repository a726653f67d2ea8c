"""A pipe that a process holds open until it is killed."""

import signal
from pathlib import Path


def hold(path: str) -> None:
    """Tell the reader of a pipe who this is, and hold the pipe until killed."""
    with Path(path).open("wb", buffering=0) as pipe:
        pipe.write(b"here")
        signal.pause()
