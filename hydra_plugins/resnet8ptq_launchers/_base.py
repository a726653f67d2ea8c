"""Base class of the launchers. If the process of a job dies, `Job.died` gives its result."""

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
    """One job of the sweep; calling it runs it in this process.

    It holds everything that another process needs to run it. The launcher composes its config in
    the sweep's process, because relative paths refer to the user's current folder.
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
        """Run the job like Hydra's own launcher."""
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
        """Log and return a failed result, for a job whose process has returned none."""
        error = JobError(f"job {self}: {reason}")
        log.error("%s", error)
        return JobReturn(self.overrides, status=JobStatus.FAILED, _return_value=error)


class JobsLauncher(Launcher):
    """A launcher that composes the jobs; subclasses run them in `run`."""

    config: DictConfig
    hydra_context: HydraContext
    task_function: TaskFunction

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Store the arguments of Hydra."""
        self.hydra_context = hydra_context
        self.task_function = task_function
        self.config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Compose and run the jobs; return their results in the order of `job_overrides`."""
        setup_globals()
        make_context: Any = HydraContext  # without a loader: the jobs compose nothing
        context = make_context(None, self.hydra_context.callbacks)
        shared = (context, self.task_function, Singleton.get_state())

        # Compose all jobs before the first one runs
        jobs = []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            config = self._compose(number, list(overrides))
            jobs.append(Job(number, list(overrides), config, *shared))
        results = self.run(jobs)
        return [results[job.number] for job in jobs]

    def _compose(self, number: int, overrides: list[str]) -> DictConfig:
        """Return a job's config, with its number and the absolute path of the sweep's folder."""
        config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = f"{config.hydra.job.name}_{number}"
            config.hydra.job.num = number
            config.hydra.sweep.dir = str(Path(self.config.hydra.sweep.dir).absolute())
        return config

    def run(self, jobs: Sequence[Job]) -> dict[int, JobReturn]:
        """Run the jobs until all have ended; return their results by number."""
        raise NotImplementedError
