"""The command line that this process executes, for code that Hydra creates.

Hydra makes callbacks, sweepers and launchers from their names in the config, so the program cannot
pass objects to them. `resnet8ptq.run` sets the ongoing command line before it calls Hydra, and
removes it afterwards. The commands `run`, `ship` and `judge` start there.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # Hydra imports this module for every job
    from resnet8ptq.report.single_run import SingleRun
    from resnet8ptq.sweeps.running import RunningSweep


@dataclass
class Ongoing:
    """A command line, and the sweep or the run that it has begun.

    Attributes:
        words: the command's name and its words.
        sweep: the sweep, once it has begun; None for a single run.
        run: a single run, once it has ended without an error.
    """

    words: tuple[str, ...]
    sweep: "RunningSweep | None" = None
    run: "SingleRun | None" = None


_ongoing: ContextVar[Ongoing | None] = ContextVar("ongoing", default=None)


@contextmanager
def begin(words: Sequence[str]) -> Iterator[Ongoing]:
    """Make a command line the ongoing one in this block; release its sweep's lock at the end."""
    ongoing = Ongoing(tuple(words))
    token = _ongoing.set(ongoing)
    try:
        yield ongoing
    finally:
        _ongoing.reset(token)
        if ongoing.sweep is not None:
            ongoing.sweep.lock.release()


def find_ongoing() -> Ongoing | None:
    """Return the ongoing command line; None outside of `begin`, as in a worker of a sweep."""
    return _ongoing.get()
