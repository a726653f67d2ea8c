"""Jobs queued by Slurm, by way of submitit.

submitit pickles them into `.submitit/` in the sweep's folder; what they print lands there too.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn
from omegaconf import DictConfig, OmegaConf

from hydra_plugins.resnet8ptq_launchers._base import Job, JobsLauncher
from resnet8ptq.core.errors import JobError
from resnet8ptq.core.text import one_line, printable
from resnet8ptq.sweep.jobs import fit, variables
from resnet8ptq.tracking.sweep_file import Worker

log = logging.getLogger(__name__)

POLL_S = 0.1
CANCEL_S = 60  # twice the default KillWait

# submitit's names of what every executor takes; what is Slurm's alone is told by a prefix.
_SHARED = {"timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes"}
_SHARED |= {"name", "stderr_to_stdout"}


_GONE = "nothing of it any more"  # cancelled while it waited, or ended longer ago than MinJobAge
_ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "TIMEOUT", _GONE),
}


class _Queue:
    """What Slurm says of jobs, in the place of submitit's own watcher.

    That one asks sacct, and never learns of a job that died where Slurm keeps no accounting.
    """

    def __init__(self) -> None:
        self.states: dict[str, str] = {}  # by the jobs' ids
        self.started_s = self.next_s = time.monotonic()

    def register_job(self, job_id: str) -> None:
        """Take note of a job that was submitted."""
        self.states[job_id] = "PENDING"

    def get_state(self, job_id: str, mode: str = "") -> str:
        """Return a job's state, as Slurm calls it, when it was last asked for."""
        return self.states[job_id]

    def is_done(self, job_id: str, mode: str = "") -> bool:
        """Tell whether the job has ended; asks for all jobs at once, and less often with time."""
        now_s = time.monotonic()
        if now_s >= self.next_s:
            self.next_s = now_s + min(60, max(2, (now_s - self.started_s) / 2))
            self._ask()
        return self.states[job_id] in _ENDED

    def _ask(self) -> None:
        which = ["--all", f"--user={os.getuid()}", "--states=all", "--array"]
        command = ["squeue", *which, "--noheader", "--format=%i|%T"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode:  # the controller is away; the jobs go on
            log.warning("%s", printable(answer.stderr))
            return
        listed = dict(line.split("|") for line in answer.stdout.splitlines())
        for job_id, state in self.states.items():
            if state not in _ENDED:
                self.states[job_id] = listed.get(job_id, _GONE)


class _SlurmJob(Job):
    """Starts again, from the beginning, where Slurm preempts it."""

    def __call__(self) -> JobReturn:
        """Run the job. submitit would go on after SIGTERM, and could finish what is cancelled."""
        signal.signal(signal.SIGTERM, _end_unless_preempted)
        return super().__call__()

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
        submitted = self._submit([_SlurmJob(**vars(job)) for job in jobs])
        running = {job.number: (job, one) for job, one in zip(jobs, submitted, strict=True)}
        ended = {}
        try:
            while running:
                for number in [n for n, (_, one) in running.items() if one.done()]:
                    ended[number] = _take(*running.pop(number))
                time.sleep(POLL_S)
        except BaseException:  # Ctrl-C, SIGTERM
            _cancel([one.job_id for _, one in running.values()])
            raise
        return ended

    def _submit(self, jobs: Sequence[_SlurmJob]) -> list[Any]:
        """Queue the jobs.

        Raises:
            JobError: this machine cannot submit to Slurm, or Slurm refuses a setting.
        """
        import submitit

        settings = {
            key if key in _SHARED else f"slurm_{key}": value for key, value in self.settings.items()
        }
        folder, retries = (
            settings.pop(f"slurm_{k}") for k in ("submitit_folder", "max_num_timeout")
        )
        # By default srun exports what sbatch did: maybe nothing, not even that it is submitit's.
        settings["slurm_srun_args"] = ["--export=ALL"]
        submitit.SlurmJob.watcher = _Queue()
        try:
            made = submitit.AutoExecutor(folder, cluster="slurm", slurm_max_num_timeout=retries)
            made.update_parameters(**settings)
            return list(made.submit_array(jobs))
        except (RuntimeError, NameError, ValueError, AssertionError) as error:
            raise JobError(f"hydra/launcher=slurm: {one_line(error)}") from error


def _cancel(job_ids: Sequence[str]) -> None:
    """Cancel jobs, and wait until Slurm has ended them.

    The sweep then closes their runs. A job that ended later would leave its run open, because
    Slurm kills a job that does not close its run within `KillWait`, by default 30 s.
    """
    for array in {job_id.split("_")[0] for job_id in job_ids}:
        subprocess.run(["scancel", array], check=False)
    queue = _Queue()
    for job_id in job_ids:
        queue.register_job(job_id)
    last_s = time.monotonic() + CANCEL_S
    while not all(queue.is_done(job_id) for job_id in job_ids):
        if time.monotonic() > last_s:
            log.warning("Slurm has not ended all jobs %d s after scancel", CANCEL_S)
            return
        time.sleep(POLL_S)


def _end_unless_preempted(*_: object) -> None:
    """Let the run be closed as killed, and end, where Slurm ends the job.

    One that is preempted with a `GraceTime` goes on: Slurm queues it again only if it has to end
    it. Until then its state is RUNNING.
    """
    job_id = os.environ["SLURM_JOB_ID"]  # for one of its jobs also the whole array's
    command = ["squeue", f"--job={job_id}", "--noheader", "--format=%A|%T"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if f"{job_id}|RUNNING" not in answer.stdout.splitlines():
        sys.exit(143)


def _take(job: Job, submitted: Any) -> JobReturn:
    """Return a job's result, and show what it logged."""
    sys.stderr.write(submitted.stderr() or "")
    state = submitted.state
    try:
        if submitted.paths.result_pickle.exists() or state == "COMPLETED":
            found: JobReturn = submitted.result()  # waits for a slow file system
            return found
    except Exception:  # submitit's own, or of reading the result
        pass
    return job.died(
        f"Slurm says {state}, and it left no result; its output: {submitted.paths.stderr}"
    )
