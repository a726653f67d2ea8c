"""Jobs of a sweep that run in processes of their own, here or on other machines.

Each takes its share of the cores; what it hands back must survive pickling.
"""

import logging
import multiprocessing
import os
import pickle
import platform
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from resnet8ptq import environment
from resnet8ptq.errors import ConfigError, one_line

# Environment variables that jobs depend on. MLflow's: credentials of a server, time limits.
_PATHS = ("CIFAR10_DIR", "RESNET8_H5")
_PREFIXES = (*_PATHS, "RESNET8PTQ_CACHE", "MLFLOW_")


@dataclass(frozen=True)
class Worker:
    """What a job in a process of its own needs to know, wherever that process is.

    Attributes:
        at_once: how many jobs run at the same time, at most.
        threads: of each, where `threads` is not set.
        folder: the program's current folder, which relative paths in settings start from.
        variables: those of the environment that jobs depend on, for a cluster's nodes, which do
            not inherit them; what a node has set itself wins.
    """

    at_once: int
    threads: int
    folder: str = field(default_factory=os.getcwd)
    variables: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, found: dict[str, Any]) -> "Worker":
        """Make one from what was read in a file.

        Raises:
            TypeError: it is not what was written there.
        """
        worker = cls(**found)
        if not isinstance(worker.variables, dict):
            raise TypeError("a worker's variables are of another type")
        texts = (worker.folder, *worker.variables.keys(), *worker.variables.values())
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("a worker's texts are of other types")
        if type(worker.at_once) is not int or type(worker.threads) is not int:
            raise TypeError("a worker's numbers are of other types")
        if unknown := [key for key in worker.variables if not key.startswith(_PREFIXES)]:
            raise TypeError(f"a worker's variables are of other names: {unknown}")
        return worker

    def enter(self) -> None:
        """Make this process one that the job can run in.

        Raises:
            ConfigError: this machine does not see a folder or file that the job needs.
        """
        # loky leaves its own start method, which processes that the job starts do not know.
        if multiprocessing.get_start_method() == "loky":
            multiprocessing.set_start_method("spawn", force=True)
        logging.getLogger("submitit").setLevel(logging.WARNING)  # says that a job is done
        for name, value in self.variables.items():
            os.environ.setdefault(name, value)
        needed = {name: os.environ[name] for name in _PATHS if name in self.variables}
        for name, path in {"the sweep's folder": self.folder, **needed}.items():
            if not Path(path).exists():
                raise ConfigError(
                    f"{name}: {platform.node()} does not see {path}; takes a path that every node "
                    "sees, or for a variable the node's own in its environment"
                )
        os.chdir(self.folder)


def plan(launcher: DictConfig) -> Worker | None:
    """Return how the launcher's jobs run; None where one after the other in this process.

    Raises:
        ConfigError: a setting leaves no room for a job.
        JobError: the launcher's cluster does not answer.
    """
    cores = environment.threads(None)
    match launcher._target_.rpartition(".")[2]:
        case "JoblibLauncher":
            at_once = _count_joblib(launcher.n_jobs)
            # Joblib limits OpenMP and BLAS, which no setting reaches, to the same share.
            return Worker(at_once, max(1, cores // at_once)) if at_once > 1 else None
        case "ProcessJobs":
            cpus = launcher.cpus_per_task
            return Worker(_fit("hydra.launcher.cpus_per_task", cpus, cores), cpus)
        case "SlurmJobs":
            cpus = launcher.cpus_per_task
            _fit("hydra.launcher.cpus_per_task", cpus, sys.maxsize)
            return Worker(launcher.array_parallelism, cpus, variables=variables())
        case "RayJobs":
            from hydra_plugins.resnet8ptq_launchers import ray_jobs

            cpus = launcher.ray.remote.num_cpus
            key = "hydra.launcher.ray.remote.num_cpus"
            if launcher.ray.init.address == ray_jobs.LOCAL:
                return Worker(_fit(key, cpus, launcher.ray.init.num_cpus or cores), cpus)
            _fit(key, cpus, sys.maxsize)
            return Worker(ray_jobs.count(launcher.ray), cpus, variables=variables())
    return None


def _count_joblib(setting: int) -> int:
    import joblib  # which comes with the plugin

    if setting == 0:
        raise ConfigError("hydra.launcher.n_jobs: got 0, takes 1 or more; -1 for one on each core")
    return int(joblib.effective_n_jobs(setting))


def _fit(key: str, cpus: object, cores: int) -> int:
    """Return how many jobs of so many CPUs fit."""
    if not isinstance(cpus, int) or not 1 <= cpus <= cores:
        limit = "or more" if cores == sys.maxsize else f"to {cores}, the cores of this machine"
        raise ConfigError(f"{key}: got {cpus}, takes 1 {limit}")
    return cores // cpus


def variables() -> dict[str, str]:
    """Return those of the environment that jobs depend on; no path that leads nowhere here."""
    found = {key: value for key, value in os.environ.items() if key.startswith(_PREFIXES) and value}
    found.pop("MLFLOW_TRACKING_URI", None)  # the sweep's store is known
    for key in _PATHS:
        if not Path(found.get(key, ".")).exists():
            del found[key]
    return found


def prepare_workers() -> None:
    """Set in the parent process what the workers, and the processes that they start, inherit."""
    os.environ["TTY_INTERACTIVE"] = "0"  # rich's: the progress bars of several would mix
    # Python counts the semaphores of workers that Ctrl-C has ended, and cleans them up.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")


def to_picklable(error: Exception) -> Exception:
    """Return what the parent process can be told of an error: it, or its text; with its traceback.

    An error that cannot be pickled would end the whole sweep.
    """
    trace = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(one_line(error))
    error.add_note(trace)  # pickle keeps notes, and no traceback
    return error
