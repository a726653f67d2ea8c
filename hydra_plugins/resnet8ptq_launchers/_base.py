"""What the launchers share. A job whose process dies has failed; the other jobs continue."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.utils import JobReturn, JobStatus, filter_overrides, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from resnet8ptq.core.errors import JobError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One job of the sweep, by its number and what is overridden in it."""

    number: int
    overrides: list[str]

    def __str__(self) -> str:
        return f"#{self.number} {' '.join(filter_overrides(self.overrides))}"

    def died(self, reason: str) -> JobReturn:
        """Return a failed result for a job whose process returned no result."""
        error = JobError(f"job {self}: {reason}")
        log.error("%s", error)
        return JobReturn(self.overrides, status=JobStatus.FAILED, _return_value=error)


class JobsLauncher(Launcher):
    """The part of a launcher that is the same everywhere."""

    config: DictConfig
    hydra_context: HydraContext
    task_function: TaskFunction

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take from Hydra what to run."""
        self.hydra_context = hydra_context
        self.task_function = task_function
        self.config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run the jobs; return their results in the order given."""
        setup_globals()
        jobs = [
            Job(number, list(overrides))
            for number, overrides in enumerate(job_overrides, initial_job_idx)
        ]
        ended = self.run(jobs)
        return [ended[job.number] for job in jobs]

    def run(self, jobs: Sequence[Job]) -> dict[int, JobReturn]:
        """Run the jobs to their ends; return the results by the jobs' numbers."""
        raise NotImplementedError
