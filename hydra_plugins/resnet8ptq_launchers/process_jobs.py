"""Runs jobs in parallel on this machine, each in its own process.

On Linux, one process imports the modules that every job needs, and the jobs are forked from it.
They share the memory of these modules. The process only imports, so that it has no session and no
thread pool when it forks. On other systems, each job does its own imports: the libraries of macOS
do not survive a fork.

Jobs and results are sent by cloudpickle, because both hold functions of `__main__`, which pickle
refuses.
"""

import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from hydra.core.utils import JobReturn
from omegaconf import DictConfig

from hydra_plugins.resnet8ptq_launchers._base import Job, JobsLauncher
from resnet8ptq.core import machine
from resnet8ptq.sweeps.jobs import fit
from resnet8ptq.tracking.sweep_file import ParallelJobs

GRACE_S = 10.0  # time for an interrupted job to close its run
IMPORTED = [  # for jobs with ONNX Runtime; a job imports another backend itself
    "resnet8ptq.job",
    "resnet8ptq.sweeps.resume",
    "resnet8ptq.sweeps.identity",
    "resnet8ptq.tracking.run",
    "mlflow.onnx",
    "mlflow.pyfunc",
    "git",
    "mlflow.store.tracking.sqlalchemy_store",
    "sqlalchemy.dialects.sqlite",
    "resnet8ptq.experiment.pipeline",
    "resnet8ptq.experiment.layers.sensitivity",
    "resnet8ptq.backends.onnx.quantizer",
    "resnet8ptq.backends.onnx.predictor",
]


class ProcessJobs(JobsLauncher):
    """Runs jobs in parallel, limited by the number of CPUs."""

    def __init__(self, cpus_per_task: int) -> None:
        self.cpus = cpus_per_task

    @classmethod
    def plan(cls, settings: DictConfig) -> ParallelJobs:
        """Return the settings of the jobs; see `jobs.plan`."""
        cpus = settings.cpus_per_task
        cores = machine.threads(None)
        return ParallelJobs(fit("hydra.launcher.cpus_per_task", cpus, cores), cpus)

    def run(self, jobs: Sequence[Job]) -> dict[int, JobReturn]:
        """Start jobs as CPUs become free, and collect their results.

        Ctrl-C, SIGTERM and errors interrupt the jobs.
        """
        # The jobs inherit it; BLAS has no other setting
        os.environ.setdefault("OMP_NUM_THREADS", str(self.cpus))
        at_once = max(1, machine.threads(None) // self.cpus)
        context = _make_context()

        # Fill the free CPUs, then wait for any result
        waiting = list(jobs)
        results = {}
        running: dict[Any, tuple[Job, BaseProcess]] = {}  # by the connection of their results
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    job = waiting.pop(0)
                    connection, process = _start(job, context)
                    running[connection] = job, process
                for ready in wait(list(running)):
                    job, process = running.pop(ready)
                    results[job.number] = _receive(job, ready, process)
        except BaseException:  # Ctrl-C, SIGTERM
            _interrupt([process for _, process in running.values()])
            raise
        return results


def _make_context() -> Any:
    """Return the jobs' multiprocessing context; on Linux, start the process that forks them."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    # The new process inherits blocked signals: Ctrl-C in a terminal must not end its imports.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return context


def _start(job: Job, context: Any) -> tuple[Connection, BaseProcess]:
    """Start a job; return the connection of its result, and its process."""
    import cloudpickle

    results, results_out = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(cloudpickle.dumps(job), results_out))
    process.start()
    results_out.close()  # so that the connection ends with the process
    return results, process


def _work(job: bytes, results: Connection) -> None:
    os.setsid()  # a terminal's Ctrl-C reaches the launcher only, which interrupts the jobs
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background job
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    import cloudpickle

    try:
        results.send_bytes(cloudpickle.dumps(pickle.loads(job)()))
    except KeyboardInterrupt:  # the job has closed its run
        sys.exit(130)


def _receive(job: Job, results: Any, process: BaseProcess) -> JobReturn:
    """Return the result of a job that has ended; a failed one if its process sent none."""
    try:
        result: JobReturn | None = pickle.loads(results.recv_bytes())
    except (EOFError, OSError):
        result = None
    process.join()
    return result or job.died(f"its process ended with {process.exitcode} and no result")


def _interrupt(processes: Sequence[BaseProcess]) -> None:
    """Interrupt the jobs, so that they close their runs; kill jobs that do not end in time."""
    for process in processes:
        if process.is_alive() and process.pid:
            os.kill(process.pid, signal.SIGINT)
    for process in processes:
        process.join(GRACE_S)
        process.kill()
        process.join()
