"""Jobs of a sweep that run at once on this machine, as `hydra/launcher=joblib` has it.

Each worker process takes its share of the cores; what it hands back must survive pickling.
"""

import multiprocessing
import os
import pickle
import traceback

from omegaconf import DictConfig

from resnet8ptq import environment
from resnet8ptq.errors import ConfigError, one_line

_PLUGIN = "hydra_plugins.hydra_joblib_launcher"


def count(launcher: DictConfig) -> int:
    """Return how many jobs run at once: 1 unless the launcher is joblib's.

    Raises:
        ConfigError: `n_jobs` is 0.
    """
    if not launcher._target_.startswith(_PLUGIN):
        return 1
    import joblib  # which comes with the plugin

    if launcher.n_jobs == 0:
        raise ConfigError("hydra.launcher.n_jobs: got 0, takes 1 or more; -1 for one on each core")
    return int(joblib.effective_n_jobs(launcher.n_jobs))


def share_threads(setting: int | None, jobs: int) -> int:
    """Return the threads of one of `jobs` jobs: `setting`, or its share of the cores, at least 1.

    Joblib limits OpenMP and BLAS, which no setting reaches, to the same share.
    """
    return setting if setting is not None else max(1, environment.threads(None) // jobs)


def prepare_workers() -> None:
    """Set in the parent process what the workers, and the processes that they start, inherit."""
    os.environ["TTY_INTERACTIVE"] = "0"  # rich's: the progress bars of several would mix
    # Python counts the semaphores of workers that Ctrl-C has ended, and cleans them up.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")


def enter_worker() -> None:
    """Let this process start others: loky leaves its own start method, which they do not know."""
    if multiprocessing.get_start_method() == "loky":
        multiprocessing.set_start_method("spawn", force=True)


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
