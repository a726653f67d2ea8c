"""A running sweep: the data that its jobs and its end need."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.core import background, clock, command
from resnet8ptq.sweeps import ongoing

if TYPE_CHECKING:  # Hydra imports this module for every job; most of them make no report
    from filelock import FileLock

    from resnet8ptq.sweeps.budget import Budget
    from resnet8ptq.sweeps.delivery import Delivery
    from resnet8ptq.tracking.sweep_file import ParallelJobs, SharedSweep


@dataclass(frozen=True)
class RunningSweep:
    """A running sweep, which this process closes."""

    open: "Callable[[], SharedSweep]"  # waits for the store, and returns the sweep with its run
    parallel: "ParallelJobs | None"  # known before the sweep is open
    limits: ReportConfig  # that a recommended model must meet
    lock: "FileLock"  # the lock of the sweep's folder, held while the sweep runs
    jobs: int | None = None  # the largest number of jobs, if known
    goal: str | None = None  # the goal of a search (`experiment=auto`)
    delivery: "Delivery | None" = None  # the best model so far of a search
    budget: "Budget | None" = None  # the budget of a search
    command_begun_s: float = field(default_factory=clock.begun_s)
    words: Sequence[str] = ("run",)  # the command's name and settings
    begun_s: float = field(default_factory=time.monotonic)
    failures: dict[str, str] = field(default_factory=dict)  # the first job with each error text

    @property
    def is_search(self) -> bool:
        """Whether the jobs are steps of a search."""
        return self.goal is not None

    def shorten(self, reason: str, job: str) -> str:
        """Return the reason of a job's failure, or name the earlier job with the same reason."""
        first = self.failures.setdefault(reason, job)
        if first == job:
            return reason
        return f"the same error as {first}"

    def seconds_left(self, job: int) -> float | None:
        """Return the expected seconds of the jobs from number `job` on; None if unknown.

        The estimate uses the mean time of the earlier jobs, which run in this process.
        """
        if not job or self.jobs is None or self.parallel is not None:
            return None
        return (time.monotonic() - self.begun_s) / job * max(0, self.jobs - job)

    @cached_property
    def shared(self) -> "SharedSweep":
        """The data of the sweep for its jobs.

        The first access waits for the store, and writes `sweep.json`; see `open_running_sweep`.
        """
        opened = self.open()
        opened.save()
        background.name_store(opened.store.words)
        return opened

    def close(self, status: str) -> int:
        """Close the sweep at its end; see `closing.close`."""
        from resnet8ptq.sweeps import closing

        return closing.close(self, status)


def find_running_sweep() -> RunningSweep | None:
    """Return the sweep that this process has begun; None in a worker, or for a single run."""
    begun = ongoing.find_ongoing()
    if begun is None:
        return None
    return begun.sweep


def open_running_sweep() -> "SharedSweep":
    """Return the sweep that the ongoing command line has begun, once it is open.

    Raises:
        Abort: the sweep cannot be opened. After an `Exception`, Hydra would run the next job
            without a record.
    """
    begun = ongoing.find_ongoing()
    assert begun is not None and begun.sweep is not None
    try:
        return begun.sweep.shared
    except command.EXPECTED as error:
        begun.sweep = None  # nothing to close
        raise command.Abort(error) from None


def is_search(sweeper: Any) -> bool:
    """Return whether the jobs are steps of a search, which needs the records of earlier steps."""
    return str(sweeper.get("_target_", "")).endswith(".SearchSweeper")
