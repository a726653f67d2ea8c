"""The time limit of a run, `max_seconds`, at which searches and learning stop.

This limit ends no process; `isolation` has the time limit of processes that read files.
"""

import logging
import math
import time
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


class TimeUpError(Exception):
    """A part of a result was abandoned because the time is up; caught inside the run."""


@dataclass
class Deadline:
    """The time limit of a run, and the work that it cut short.

    Attributes:
        at: the end, by `time.monotonic`; infinite without a limit.
        cut_short: descriptions of the work that was cut short, each once.
    """

    at: float = math.inf
    cut_short: list[str] = field(default_factory=list)

    @classmethod
    def after(cls, seconds: float | None) -> "Deadline":
        """Return the deadline after this number of seconds; None means no limit."""
        if seconds is None:
            return cls(math.inf)
        return cls(time.monotonic() + seconds)

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self.at

    def check(self) -> None:
        """Raise `TimeUpError` once the time is up."""
        if self.is_over:
            raise TimeUpError

    def cut(self, work: str) -> None:
        """Record and warn that work was cut short, once for each description `work`."""
        if work not in self.cut_short:
            self.cut_short.append(work)
            log.warning("max_seconds: the time is up: %s", work)
