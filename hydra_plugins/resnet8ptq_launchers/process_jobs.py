"""Jobs at once on this machine, a process for each.

On Linux one process imports what every job needs, and jobs are forked from it: they start with the
imports done, and share their memory. It only imports, so that no session and no thread pool is
there when it forks. On macOS, whose libraries do not survive a fork, each job imports for itself.

Jobs and results travel by cloudpickle: both hold functions of `__main__`, which pickle refuses.
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
from resnet8ptq.sweep.jobs import fit
from resnet8ptq.tracking.sweep_file import Worker

GRACE_S = 10.0  # for an interrupted job to close its run
IMPORTED = [  # by a job with ONNX Runtime; with another backend it imports that one itself
    *("resnet8ptq.job", "resnet8ptq.sweep.resume", "resnet8ptq.sweep.identity"),
    *("resnet8ptq.tracking.run", "mlflow.onnx", "mlflow.pyfunc", "git"),
    *("mlflow.store.tracking.sqlalchemy_store", "sqlalchemy.dialects.sqlite"),
    *("resnet8ptq.experiment.pipeline", "resnet8ptq.experiment.layers.sensitivity"),
    *("resnet8ptq.backends.onnx.quantizer", "resnet8ptq.backends.onnx.predictor"),
]


class ProcessJobs(JobsLauncher):
    """As many jobs at once as have the CPUs that they ask for."""

    def __init__(self, cpus_per_task: int) -> None:
        self.cpus = cpus_per_task

    @classmethod
    def plan(cls, settings: DictConfig) -> Worker:
        """Return how the jobs run; see `jobs.plan`."""
        cpus, cores = settings.cpus_per_task, machine.threads(None)
        return Worker(fit("hydra.launcher.cpus_per_task", cpus, cores), cpus)

    def run(self, jobs: Sequence[Job]) -> dict[int, JobReturn]:
        """Start jobs as places get free, and take their results; end them when interrupted."""
        os.environ.setdefault("OMP_NUM_THREADS", str(self.cpus))  # no setting of ours reaches BLAS
        places = max(1, machine.threads(None) // self.cpus)
        context = _make_context()
        waiting, ended = list(jobs), {}
        running: dict[Any, tuple[Job, BaseProcess]] = {}  # by where their results come from
        try:
            while waiting or running:
                while waiting and len(running) < places:
                    job = waiting.pop(0)
                    results_in, process = _start(job, context)
                    running[results_in] = job, process
                for results in wait(list(running)):
                    job, process = running.pop(results)
                    ended[job.number] = _take(job, results, process)
        except BaseException:  # Ctrl-C, SIGTERM
            _interrupt([process for _, process in running.values()])
            raise
        return ended


def _make_context() -> Any:
    """Return what starts jobs: on Linux by a process, started here, that they are forked from."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    # It starts with what is blocked here: a terminal's Ctrl-C is not to end it while it imports.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return context


def _start(job: Job, context: Any) -> tuple[Connection, BaseProcess]:
    """Start a job; return where its result will come from, and its process."""
    import cloudpickle

    results, results_out = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(cloudpickle.dumps(job), results_out))
    process.start()
    results_out.close()  # so that the end of the process is the end of its results
    return results, process


def _work(job: bytes, results: Connection) -> None:
    os.setsid()  # a terminal's Ctrl-C reaches the launcher, which tells us
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    import cloudpickle

    try:
        results.send_bytes(cloudpickle.dumps(pickle.loads(job)()))
    except KeyboardInterrupt:  # its run is closed
        sys.exit(130)


def _take(job: Job, results: Any, process: BaseProcess) -> JobReturn:
    try:
        found: JobReturn | None = pickle.loads(results.recv_bytes())
    except (EOFError, OSError):
        found = None
    process.join()
    return found or job.died(f"its process ended with {process.exitcode} and no result")


def _interrupt(processes: Sequence[BaseProcess]) -> None:
    """Interrupt jobs, so that they close their runs; kill those that do not end."""
    for process in processes:
        if process.is_alive() and process.pid:
            os.kill(process.pid, signal.SIGINT)
    for process in processes:
        process.join(GRACE_S)
        process.kill()
        process.join()
