"""Jobs on Ray: of this machine, or on a cluster that runs already.

Ray starts a task again when its worker or its node dies, `max_retries` times. A job that starts
again replaces its unfinished attempt, so that this leaves no second run.
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
from resnet8ptq.sweep.jobs import fit, variables
from resnet8ptq.tracking.sweep_file import Worker

LOCAL = "local"  # the address of a Ray that starts and ends with the sweep


class RayJobs(JobsLauncher):
    """Every job is a task: Ray runs as many at once as have the CPUs they ask for."""

    def __init__(self, ray: DictConfig) -> None:
        self.settings = ray

    @classmethod
    def plan(cls, settings: DictConfig) -> Worker:
        """Return how the jobs run; see `jobs.plan`. Connects to the cluster, where there is one."""
        cpus, init = settings.ray.remote.num_cpus, settings.ray.init
        key = "hydra.launcher.ray.remote.num_cpus"
        if init.address == LOCAL:
            cores = init.num_cpus or machine.threads(None)
            return Worker(fit(key, cpus, cores), cpus)
        fit(key, cpus, sys.maxsize)
        start(init)
        import ray

        nodes = (node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"])
        at_once = max(1, sum(int(free // cpus) for free in nodes))
        return Worker(at_once, cpus, variables=variables())

    def run(self, jobs: Sequence[Job]) -> dict[int, JobReturn]:
        """Submit all jobs, and take their results as they end."""
        start(self.settings.init)
        import ray

        ended = {}
        try:
            # Waited for outside of Ray, which would change the exit code of an interrupted sweep.
            options: Any = OmegaConf.to_container(self.settings.remote, resolve=True)
            work = ray.remote(**options)(lambda job: job())
            waiting = {work.remote(job).future(): job for job in jobs}
            for future in as_completed(waiting):
                job = waiting[future]
                try:
                    ended[job.number] = future.result()
                except ray.exceptions.RayError as error:
                    ended[job.number] = job.died(one_line(getattr(error, "cause", None) or error))
        except BaseException:  # Ctrl-C, SIGTERM: ends the workers too, on a cluster as well
            ray.shutdown()
            raise
        return ended


def start(init: DictConfig) -> None:
    """Start Ray, or connect to a cluster; nothing where that is done already.

    With token authentication, since whoever reaches Ray's ports can run code, and without usage
    statistics. What the user's environment says wins.

    Raises:
        JobError: Ray does not start, no cluster answers, or it refuses the token.
    """
    defaults = {
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",  # jobs say similar things
        "RAY_COLOR_PREFIX": "0",
        # Otherwise a job that takes too much memory is started again without end.
        "RAY_task_oom_retries": "1",
    }
    if init.address == LOCAL:
        # Despite its name, it keeps every port of Ray on 127.0.0.1 on any system.
        defaults["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        if "RAY_AUTH_TOKEN_PATH" not in os.environ:
            defaults["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    import ray  # which reads the environment

    if ray.is_initialized():
        return
    settings: Any = OmegaConf.to_container(init, resolve=True)
    if init.address == LOCAL and init.num_cpus is None:
        settings["num_cpus"] = machine.threads(None)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**settings)
    except Exception as error:  # Ray's own, OSError, ValueError
        raise JobError(
            f"hydra.launcher.ray.init.address: got {init.address}, which cannot be used "
            f"({one_line(error)})"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, handler)  # Ray sets its own
