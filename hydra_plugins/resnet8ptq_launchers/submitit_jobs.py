"""Jobs by submitit, a fresh process for each: on this machine, or queued by Slurm.

submitit pickles them into `.submitit/` in the sweep's folder; what they print lands there too.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn
from omegaconf import DictConfig, OmegaConf

from hydra_plugins.resnet8ptq_launchers._base import Job, JobsLauncher
from resnet8ptq.core import machine
from resnet8ptq.core.errors import JobError
from resnet8ptq.core.text import one_line
from resnet8ptq.sweep.jobs import fit, variables
from resnet8ptq.tracking.sweep_file import Worker

POLL_S = 0.1
GRACE_S = 10.0  # for an interrupted job to close its run

# submitit's names of what every executor takes; what is Slurm's alone is told by a prefix.
_SHARED = {"timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes"}
_SHARED |= {"name", "stderr_to_stdout"}


class _SubmititJobs(JobsLauncher):
    """The settings are those of the plugin's own launchers, whose code the jobs run."""

    plugin = ""

    def __init__(self, **settings: Any) -> None:
        self.settings: dict[str, Any] = {
            key: OmegaConf.to_container(value, resolve=True)
            if OmegaConf.is_config(value)
            else value
            for key, value in settings.items()
        }

    def run(self, jobs: Sequence[Job]) -> dict[int, JobReturn]:
        """Submit the jobs, and take their results as they end; cancel them when interrupted."""
        # Inherited, also by way of sbatch; no setting of ours reaches OpenMP and BLAS.
        os.environ.setdefault("OMP_NUM_THREADS", str(self.settings["cpus_per_task"]))
        executor, limit = self.executor(), self.limit(len(jobs))
        waiting, ended = list(jobs), {}
        running: dict[int, tuple[Job, Any]] = {}
        try:
            while waiting or running:
                batch = waiting[: limit - len(running)]
                for job, submitted in zip(batch, self.submit(executor, batch), strict=True):
                    running[job.number] = job, submitted
                del waiting[: len(batch)]
                for number in [n for n, (_, submitted) in running.items() if submitted.done()]:
                    ended[number] = self.take(*running.pop(number))
                time.sleep(POLL_S)
        except BaseException:  # Ctrl-C, SIGTERM
            self.cancel([submitted for _, submitted in running.values()])
            raise
        return ended

    def submit(self, executor: Any, jobs: Sequence[Job]) -> list[Any]:
        """Start or queue jobs; several at once become one array in Slurm."""
        if not jobs:
            return []
        from hydra_plugins.hydra_submitit_launcher import submitit_launcher

        call = getattr(submitit_launcher, self.plugin)(**self.settings)
        call.setup(
            hydra_context=self.hydra_context, task_function=self.task_function, config=self.config
        )
        arguments = [
            (job.overrides, "hydra.sweep.dir", job.number, str(job.number), Singleton.get_state())
            for job in jobs
        ]
        return list(executor.map_array(call, *zip(*arguments, strict=True)))

    def take(self, job: Job, submitted: Any) -> JobReturn:
        """Return a job's result, and show what it logged."""
        sys.stderr.write(submitted.stderr() or "")
        try:
            return submitted.result()
        except Exception as error:  # submitit's own, or of reading the result
            return job.died(f"{self.why(submitted, error)}; its output: {submitted.paths.stderr}")

    def executor(self) -> Any:
        """Make submitit's executor."""
        raise NotImplementedError

    def limit(self, jobs: int) -> int:
        """Return how many of `jobs` are submitted at once."""
        raise NotImplementedError

    def cancel(self, submitted: Sequence[Any]) -> None:
        """End jobs that run, and take the others off the queue."""
        raise NotImplementedError

    def why(self, submitted: Any, error: Exception) -> str:
        """Return how a job ended that has left no result."""
        raise NotImplementedError


class ProcessJobs(_SubmititJobs):
    """Processes of this machine, as many at once as have the CPUs that they ask for."""

    plugin = "LocalLauncher"

    @classmethod
    def plan(cls, settings: DictConfig) -> Worker:
        """Return how the jobs run; see `jobs.plan`."""
        cpus, cores = settings.cpus_per_task, machine.threads(None)
        return Worker(fit("hydra.launcher.cpus_per_task", cpus, cores), cpus)

    def executor(self) -> Any:
        """Make submitit's executor."""
        from hydra_plugins.resnet8ptq_launchers._processes import ProcessExecutor

        return ProcessExecutor(self.settings["submitit_folder"])

    def limit(self, jobs: int) -> int:
        """Return how many jobs have a place."""
        return max(1, machine.threads(None) // self.settings["cpus_per_task"])

    def cancel(self, submitted: Sequence[Any]) -> None:
        """Interrupt the jobs, so that they close their runs; kill those that do not end."""
        for job in submitted:
            job.cancel()
        for job in submitted:
            try:
                job._process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                job._process.kill()
                job._process.wait()

    def take(self, job: Job, submitted: Any) -> JobReturn:
        """Return a job's result; submitit would wait for one on a slow file system."""
        submitted._results_timeout_s = 0
        return super().take(job, submitted)

    def why(self, submitted: Any, error: Exception) -> str:
        """Return how the process ended."""
        return f"its process ended with {submitted._process.returncode} and no result"


class SlurmJobs(_SubmititJobs):
    """One array of jobs; Slurm runs `array_parallelism` of them at once."""

    plugin = "SlurmLauncher"

    @classmethod
    def plan(cls, settings: DictConfig) -> Worker:
        """Return how the jobs run; see `jobs.plan`."""
        cpus = settings.cpus_per_task
        fit("hydra.launcher.cpus_per_task", cpus, sys.maxsize)
        return Worker(settings.array_parallelism, cpus, variables=variables())

    def executor(self) -> Any:
        """Make submitit's executor.

        Raises:
            JobError: this machine cannot submit to Slurm, or Slurm has no such setting.
        """
        import submitit

        own = {"submitit_folder", "max_num_timeout"}
        parameters = {
            key if key in _SHARED else f"slurm_{key}": value
            for key, value in self.settings.items()
            if key not in own
        }
        try:
            made = submitit.AutoExecutor(
                self.settings["submitit_folder"],
                cluster="slurm",
                slurm_max_num_timeout=self.settings["max_num_timeout"],
            )
            made.update_parameters(**parameters)
        except (RuntimeError, NameError, ValueError, AssertionError) as error:
            raise JobError(f"hydra/launcher=slurm: {one_line(error)}") from error
        return made

    def limit(self, jobs: int) -> int:
        """Return all of them: Slurm keeps the queue."""
        return jobs

    def cancel(self, submitted: Sequence[Any]) -> None:
        """Cancel the array."""
        for array in {job.job_id.split("_")[0] for job in submitted}:
            subprocess.run(["scancel", array], check=False)

    def why(self, submitted: Any, error: Exception) -> str:
        """Return how Slurm says that it ended."""
        return f"Slurm says {submitted.state}, and it left no result"
