"""Runs jobs by Ray, on this machine or on a running cluster.

Ray restarts a job whose worker or node dies, up to `max_retries` times. The restarted job replaces
its unfinished run, so that no second run remains.
"""

import os
import secrets
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import as_completed
from typing import Any

from hydra.core.utils import JobReturn
from omegaconf import DictConfig, OmegaConf

from hydra_plugins.resnet8ptq_launchers._base import Job, JobsLauncher
from resnet8ptq.core import machine
from resnet8ptq.core.errors import JobError
from resnet8ptq.core.text import one_line
from resnet8ptq.sweeps.jobs import fit, variables
from resnet8ptq.tracking.sweep_file import ParallelJobs

LOCAL = "local"  # address of a Ray that starts and ends with the sweep


class RayJobs(JobsLauncher):
    """Runs every job as a Ray task, in parallel as far as CPUs are free."""

    def __init__(self, ray: DictConfig) -> None:
        self.settings = ray

    @classmethod
    def plan(cls, settings: DictConfig) -> ParallelJobs:
        """Return the settings of the jobs, see `jobs.plan`; ask a running cluster for its CPUs."""
        # A Ray of this sweep has the cores of this machine
        cpus = settings.ray.remote.num_cpus
        init = settings.ray.init
        key = "hydra.launcher.ray.remote.num_cpus"
        if init.address == LOCAL:
            cores = init.num_cpus or machine.threads(None)
            return ParallelJobs(fit(key, cpus, cores), cpus)

        # A job does not span nodes of the cluster
        fit(key, cpus, sys.maxsize)
        start(init)
        import ray

        at_once = 0
        for node in ray.nodes():
            if node["Alive"]:
                at_once += int(node["Resources"].get("CPU", 0) // cpus)
        return ParallelJobs(max(1, at_once), cpus, variables=variables())

    def run(self, jobs: Sequence[Job]) -> dict[int, JobReturn]:
        """Submit all jobs, and collect their results as they end."""
        start(self.settings.init)
        import ray

        results = {}
        try:
            # Futures of Python, because Ray's own wait changes an interrupted sweep's exit code.
            options: Any = OmegaConf.to_container(self.settings.remote, resolve=True)
            work = ray.remote(**options)(lambda job: job())
            waiting = {work.remote(job).future(): job for job in jobs}

            # A dead worker is the end of its job only
            for future in as_completed(waiting):
                job = waiting[future]
                try:
                    results[job.number] = future.result()
                except ray.exceptions.RayError as error:
                    results[job.number] = job.died(one_line(getattr(error, "cause", None) or error))
        except BaseException:  # Ctrl-C, SIGTERM: this ends the workers too, also on a cluster
            ray.shutdown()
            raise
        return results


def start(init: DictConfig) -> None:
    """Start Ray, or connect to a cluster, unless already done.

    The function turns token authentication on, because anyone who reaches Ray's ports can run code.
    It turns usage statistics off. The user's environment variables take precedence.

    Raises:
        JobError: Ray does not start, no cluster answers, or the cluster refuses the token.
    """
    defaults = {
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",  # jobs log similar lines
        "RAY_COLOR_PREFIX": "0",
        # By default Ray restarts a job that takes too much memory without end.
        "RAY_task_oom_retries": "1",
    }
    if init.address == LOCAL:
        # Despite its name, it keeps all ports of Ray on 127.0.0.1 on any system.
        defaults["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        if "RAY_AUTH_TOKEN_PATH" not in os.environ:
            defaults["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    import ray  # it reads the environment

    if ray.is_initialized():
        return

    # Start with the cores that this process may use, and keep the handler of SIGTERM
    settings: Any = OmegaConf.to_container(init, resolve=True)
    if init.address == LOCAL and init.num_cpus is None:
        settings["num_cpus"] = machine.threads(None)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**settings)
    except Exception as error:  # of Ray, OSError or ValueError
        raise JobError(
            f"hydra.launcher.ray.init.address: got {init.address}, which cannot be used "
            f"({one_line(error)})"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, handler)  # Ray sets another
