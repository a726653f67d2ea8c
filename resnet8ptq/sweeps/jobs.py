"""Jobs of a sweep in separate processes, here or on other machines.

Unless `threads` is set, a job uses the cores that the launcher gives it. The result of a job must
be picklable; `to_picklable` replaces an error that is not.
"""

import logging
import os
import platform
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from hydra.utils import get_class
from omegaconf import DictConfig

from resnet8ptq.core import console
from resnet8ptq.core.errors import ConfigError, portable
from resnet8ptq.tracking.sweep_file import ParallelJobs

# Environment variables that jobs need; MLflow's hold a server's credentials and time limits.
_PATHS = ("CIFAR10_DIR", "RESNET8_H5")
_PREFIXES = (*_PATHS, "RESNET8PTQ_CACHE", "MLFLOW_")


def enter(parallel: ParallelJobs) -> None:
    """Set the environment variables and the working folder of a job in this process.

    Raises:
        ConfigError: this machine does not see a folder or file that the job needs.
    """
    logging.getLogger("submitit").setLevel(logging.WARNING)  # hides the end of each job
    for name, value in parallel.variables.items():
        os.environ.setdefault(name, value)

    # Refuse a node without the folders, before anything is written
    needed = {"the sweep's folder": parallel.folder}
    for name in _PATHS:
        if name in parallel.variables:
            needed[name] = os.environ[name]
    for name, path in needed.items():
        if not Path(path).exists():
            raise ConfigError(
                f"{name}: {platform.node()} does not see {path}; expected a path that every node "
                "sees; for a variable, try the node's own path in its environment"
            )
    os.chdir(parallel.folder)
    console.speak_seldom()


def refuse_joblib(launcher: DictConfig) -> None:
    """Raise `ConfigError` for the launcher joblib, which `processes` replaces."""
    if launcher._target_.endswith(".JoblibLauncher"):
        raise ConfigError("hydra/launcher: got 'joblib'; try hydra/launcher=processes")


def plan(launcher: DictConfig) -> ParallelJobs | None:
    """Return the settings for jobs in separate processes, by the launcher's own `plan`.

    Returns None for a launcher without `plan`, such as Hydra's own, which runs jobs in this
    process.

    Raises:
        ConfigError: see `fit`.
        JobError: the launcher's cluster does not answer.
    """
    own: Callable[[DictConfig], ParallelJobs] | None = getattr(
        get_class(launcher._target_), "plan", None
    )
    if own is None:
        return None
    return own(launcher)


def run_here(launcher: DictConfig) -> bool:
    """Return whether the launcher is `processes`, whose jobs use the folders of this machine."""
    return launcher._target_.endswith(".ProcessJobs")


def fit(key: str, cpus: object, cores: int) -> int:
    """Return the number of parallel jobs of `cpus` cores each on `cores` cores.

    Raises:
        ConfigError: `cpus` is not an integer from 1 to `cores`.
    """
    if not isinstance(cpus, int) or not 1 <= cpus <= cores:
        limit = f"to {cores}, the cores of this machine"
        if cores == sys.maxsize:
            limit = "or more"
        raise ConfigError(f"{key}: got {cpus}, expected 1 {limit}")
    return cores // cpus


def variables() -> dict[str, str]:
    """Return the environment variables for jobs on other machines, see `_PREFIXES`.

    The address of the store is left out, and so are `_PATHS` that do not exist here.
    """
    kept = {}
    for key, value in os.environ.items():
        if value and key.startswith(_PREFIXES):
            kept[key] = value
    kept.pop("MLFLOW_TRACKING_URI", None)  # the sweep's file names the store
    for key in _PATHS:
        if key in kept and not Path(kept[key]).exists():
            del kept[key]
    return kept


def prepare_workers() -> None:
    """Set the environment for the workers and their child processes."""
    os.environ["TTY_INTERACTIVE"] = "0"  # read by rich; progress bars of several jobs would mix
    # Python would warn about the semaphores of interrupted workers, although it cleans them up.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")


def to_picklable(error: Exception) -> Exception:
    """Return an error that the parent process can unpickle, with the traceback as a note.

    An error that cannot be pickled would end the sweep, so an error with its text replaces it.
    """
    trace = "".join(traceback.format_exception(error))
    error = portable(error)
    error.add_note(trace)  # pickle keeps notes, but no traceback
    return error
