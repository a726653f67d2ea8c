"""Queues jobs in Slurm by submitit.

submitit pickles the jobs into `.submitit/` in the sweep's folder and writes their output there.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.utils import JobReturn
from omegaconf import DictConfig, OmegaConf

from hydra_plugins.resnet8ptq_launchers._base import Job, JobsLauncher
from resnet8ptq.core.errors import JobError
from resnet8ptq.core.text import one_line, printable
from resnet8ptq.sweeps.jobs import fit, variables
from resnet8ptq.tracking.sweep_file import ParallelJobs

log = logging.getLogger(__name__)

POLL_S = 0.1
CANCEL_S = 60  # twice the default KillWait

# The settings of submitit for every executor; those only for Slurm get a prefix.
_SHARED = {"timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes"}
_SHARED |= {"name", "stderr_to_stdout"}

_GONE = "nothing of it any more"  # cancelled while it waited, or ended longer ago than MinJobAge
_ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
    _GONE,
}


class _Queue:
    """The states of jobs in Slurm's queue; replaces submitit's own watcher.

    submitit's watcher calls sacct. Without accounting in Slurm, it never learns that a job died.
    """

    def __init__(self) -> None:
        self.states: dict[str, str] = {}  # by job id
        self.started_s = self.next_s = time.monotonic()

    def register_job(self, job_id: str) -> None:
        """Add a submitted job."""
        self.states[job_id] = "PENDING"

    def get_state(self, job_id: str, mode: str = "") -> str:
        """Return the last known state of a job in Slurm's terms."""
        return self.states[job_id]

    def is_done(self, job_id: str, mode: str = "") -> bool:
        """Return whether the job has ended; polls all jobs together, less often with time."""
        now_s = time.monotonic()
        if now_s >= self.next_s:
            self.next_s = now_s + min(60, max(2, (now_s - self.started_s) / 2))
            self._ask()
        return self.states[job_id] in _ENDED

    def _ask(self) -> None:
        which = ["--all", f"--user={os.getuid()}", "--states=all", "--array"]
        answer = _squeue(*which, "--format=%i|%T")
        if answer.returncode:  # the controller does not answer; the jobs go on
            log.warning("%s", printable(answer.stderr))
            return
        listed = dict(line.split("|") for line in answer.stdout.splitlines())
        for job_id, state in self.states.items():
            if state not in _ENDED:
                self.states[job_id] = listed.get(job_id, _GONE)


def _squeue(*options: str) -> "subprocess.CompletedProcess[str]":
    command = ["squeue", *options, "--noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


class _SlurmJob(Job):
    """A job that restarts from the beginning if Slurm preempts it."""

    def __call__(self) -> JobReturn:
        """Run the job; SIGTERM ends it unless Slurm preempts it.

        submitit would ignore SIGTERM even for a cancelled job.
        """
        signal.signal(signal.SIGTERM, _end_unless_preempted)
        return super().__call__()

    def checkpoint(self) -> Any:
        """Return the job in the form in which submitit queues it again."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


class SlurmJobs(JobsLauncher):
    """Submits one array of jobs; Slurm runs at most `array_parallelism` of them in parallel."""

    def __init__(self, **settings: Any) -> None:
        self.settings: Any = OmegaConf.to_container(OmegaConf.create(settings), resolve=True)

    @classmethod
    def plan(cls, settings: DictConfig) -> ParallelJobs:
        """Return the settings of the jobs; see `jobs.plan`."""
        cpus = settings.cpus_per_task
        fit("hydra.launcher.cpus_per_task", cpus, sys.maxsize)
        return ParallelJobs(settings.array_parallelism, cpus, variables=variables())

    def run(self, jobs: Sequence[Job]) -> dict[int, JobReturn]:
        """Submit the jobs, and collect their results as they end.

        Ctrl-C, SIGTERM and errors cancel the jobs.
        """
        # The jobs inherit it through sbatch; OpenMP and BLAS have no other setting.
        os.environ.setdefault("OMP_NUM_THREADS", str(self.settings["cpus_per_task"]))
        submitted = self._submit([_SlurmJob(**vars(job)) for job in jobs])
        running = {}
        for job, queued in zip(jobs, submitted, strict=True):
            running[job.number] = (job, queued)

        # Collect the results in the order in which the jobs end
        results = {}
        try:
            while running:
                for number, (job, queued) in list(running.items()):
                    if queued.done():
                        del running[number]
                        results[number] = _receive(job, queued)
                time.sleep(POLL_S)
        except BaseException:  # Ctrl-C, SIGTERM
            _cancel([queued.job_id for _, queued in running.values()])
            raise
        return results

    def _submit(self, jobs: Sequence[_SlurmJob]) -> list[Any]:
        """Queue the jobs.

        Raises:
            JobError: Slurm or submitit fails or refuses a setting, or a setting has a line break.
        """
        import submitit

        # Two settings are arguments of the executor
        settings = {}
        for key, value in self.settings.items():
            settings[key if key in _SHARED else f"slurm_{key}"] = value
        folder = settings.pop("slurm_submitit_folder")
        retries = settings.pop("slurm_max_num_timeout")
        _check_script({**settings, "hydra.sweep.dir": folder})

        # By default srun exports the variables that sbatch exported. These may lack submitit's.
        settings["slurm_srun_args"] = ["--export=ALL"]
        submitit.SlurmJob.watcher = _Queue()
        try:
            executor = submitit.AutoExecutor(folder, cluster="slurm", slurm_max_num_timeout=retries)
            executor.update_parameters(**settings)
            return list(executor.submit_array(jobs))
        except (RuntimeError, NameError, ValueError, AssertionError) as error:
            raise JobError(f"hydra/launcher=slurm: {one_line(error)}") from error


def _check_script(settings: Mapping[str, Any]) -> None:
    """Raise `JobError` for a setting with a line break.

    submitit writes the settings and the folder into comments of the script for sbatch. bash would
    run the rest of a broken line as a command.
    """
    for key, value in settings.items():
        if len(f"{key}={value}".splitlines()) > 1:
            raise JobError(
                f"hydra/launcher=slurm: {key}: got {printable(str(value))!r}, expected one line"
            )


def _cancel(job_ids: Sequence[str]) -> None:
    """Cancel jobs, and wait until Slurm has ended them, at most `CANCEL_S`.

    The sweep then closes their runs. A job that ended later would leave its run open, because
    Slurm kills a job that does not close its run within `KillWait`, by default 30 s.
    """
    for array in {job_id.split("_")[0] for job_id in job_ids}:
        subprocess.run(["scancel", array], check=False)
    queue = _Queue()
    for job_id in job_ids:
        queue.register_job(job_id)

    # Poll Slurm, but not forever
    last_s = time.monotonic() + CANCEL_S
    while not all(queue.is_done(job_id) for job_id in job_ids):
        if time.monotonic() > last_s:
            log.warning("Slurm has not ended all jobs %d s after scancel", CANCEL_S)
            return
        time.sleep(POLL_S)


def _end_unless_preempted(*_: object) -> None:
    """On SIGTERM, exit if Slurm ends the job, so that the run is closed as killed.

    A job that is preempted with a `GraceTime` goes on, because Slurm queues it again only if Slurm
    itself has to end it. Until then its state is RUNNING.
    """
    job_id = os.environ["SLURM_JOB_ID"]  # one job of the array has the id of the whole array
    if f"{job_id}|RUNNING" not in _squeue(f"--job={job_id}", "--format=%A|%T").stdout.splitlines():
        sys.exit(143)


def _receive(job: Job, submitted: Any) -> JobReturn:
    """Return the result of a job that has ended, a failed one if it left none; show its stderr."""
    sys.stderr.write(submitted.stderr() or "")
    state = submitted.state
    try:
        if submitted.paths.result_pickle.exists() or state == "COMPLETED":
            result: JobReturn = submitted.result()  # waits for a slow file system
            return result
    except Exception:  # of submitit, or of reading the result
        pass
    return job.died(
        f"Slurm reports {state}, and it left no result; its output: {submitted.paths.stderr}"
    )
