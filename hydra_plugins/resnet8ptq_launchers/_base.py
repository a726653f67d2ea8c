"""What the launchers share. A job whose process dies has failed, and takes no other job along."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, filter_overrides, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from resnet8ptq.core.errors import JobError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One job of the sweep, by its number and what is overridden in it; called, it runs here.

    It holds what another process needs to run it, in any folder: the sweep has composed its config,
    where the current folder is the user's.
    """

    number: int
    overrides: list[str]
    config: DictConfig
    context: HydraContext
    task_function: TaskFunction
    singletons: dict[type, Singleton]

    def __str__(self) -> str:
        return f"#{self.number} {' '.join(filter_overrides(self.overrides))}"

    def __call__(self) -> JobReturn:
        """Run the job, as Hydra's own launcher does."""
        Singleton.set_state(self.singletons)
        setup_globals()
        return run_job(
            hydra_context=self.context,
            task_function=self.task_function,
            config=self.config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )

    def died(self, reason: str) -> JobReturn:
        """Return what stands for the result of a job whose process gave none."""
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
        context: Any = HydraContext  # nothing is composed with it any more
        shared = (
            context(None, self.hydra_context.callbacks),
            self.task_function,
            Singleton.get_state(),
        )
        jobs = [
            Job(number, list(overrides), self._compose(number, list(overrides)), *shared)
            for number, overrides in enumerate(job_overrides, initial_job_idx)
        ]
        ended = self.run(jobs)
        return [ended[job.number] for job in jobs]

    def _compose(self, number: int, overrides: list[str]) -> DictConfig:
        """Return the config of a job, with the sweep's own folder."""
        config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = f"{config.hydra.job.name}_{number}"
            config.hydra.job.num = number
            config.hydra.sweep.dir = str(Path(self.config.hydra.sweep.dir).absolute())
        return config

    def run(self, jobs: Sequence[Job]) -> dict[int, JobReturn]:
        """Run the jobs to their ends; return the results by the jobs' numbers."""
        raise NotImplementedError
