"""Jobs queued by Slurm, by way of submitit.

submitit pickles them into `.submitit/` in the sweep's folder; what they print lands there too.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn
from omegaconf import DictConfig, OmegaConf

from hydra_plugins.resnet8ptq_launchers._base import Job, JobsLauncher
from resnet8ptq.core.errors import JobError
from resnet8ptq.core.text import one_line
from resnet8ptq.sweep.jobs import fit, variables
from resnet8ptq.tracking.sweep_file import Worker

POLL_S = 0.1

# submitit's names of what every executor takes; what is Slurm's alone is told by a prefix.
_SHARED = {"timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes"}
_SHARED |= {"name", "stderr_to_stdout"}


class _SlurmJob(Job):
    """Starts again, from the beginning, where Slurm preempts it."""

    def checkpoint(self) -> Any:
        """Return what submitit queues again."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


class SlurmJobs(JobsLauncher):
    """One array of jobs; Slurm runs `array_parallelism` of them at once."""

    def __init__(self, **settings: Any) -> None:
        self.settings: Any = OmegaConf.to_container(OmegaConf.create(settings), resolve=True)

    @classmethod
    def plan(cls, settings: DictConfig) -> Worker:
        """Return how the jobs run; see `jobs.plan`."""
        cpus = settings.cpus_per_task
        fit("hydra.launcher.cpus_per_task", cpus, sys.maxsize)
        return Worker(settings.array_parallelism, cpus, variables=variables())

    def run(self, jobs: Sequence[Job]) -> dict[int, JobReturn]:
        """Submit the jobs, and take their results as they end; cancel them when interrupted."""
        # Inherited by way of sbatch; no setting of ours reaches OpenMP and BLAS.
        os.environ.setdefault("OMP_NUM_THREADS", str(self.settings["cpus_per_task"]))
        submitted = self._make_executor().submit_array([_SlurmJob(**vars(job)) for job in jobs])
        running = {job.number: (job, one) for job, one in zip(jobs, submitted, strict=True)}
        ended = {}
        try:
            while running:
                for number in [n for n, (_, one) in running.items() if one.done()]:
                    ended[number] = _take(*running.pop(number))
                time.sleep(POLL_S)
        except BaseException:  # Ctrl-C, SIGTERM
            for array in {one.job_id.split("_")[0] for _, one in running.values()}:
                subprocess.run(["scancel", array], check=False)
            raise
        return ended

    def _make_executor(self) -> Any:
        """Make submitit's executor.

        Raises:
            JobError: this machine cannot submit to Slurm, or Slurm has no such setting.
        """
        import submitit

        settings = {
            key if key in _SHARED else f"slurm_{key}": value for key, value in self.settings.items()
        }
        folder, retries = (
            settings.pop(f"slurm_{k}") for k in ("submitit_folder", "max_num_timeout")
        )
        try:
            made = submitit.AutoExecutor(folder, cluster="slurm", slurm_max_num_timeout=retries)
            made.update_parameters(**settings)
        except (RuntimeError, NameError, ValueError, AssertionError) as error:
            raise JobError(f"hydra/launcher=slurm: {one_line(error)}") from error
        return made


def _take(job: Job, submitted: Any) -> JobReturn:
    """Return a job's result, and show what it logged."""
    sys.stderr.write(submitted.stderr() or "")
    try:
        return submitted.result()
    except Exception:  # submitit's own, or of reading the result
        return job.died(
            f"Slurm says {submitted.state}, and it left no result; its output: "
            f"{submitted.paths.stderr}"
        )
