"""Chooses the function of a run: the experiment, or the analysis that `+analysis` names.

Functions are named as text, so that a run does not import all of them.
"""

from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from resnet8ptq.core import cache
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.evaluation.result import RunResult
from resnet8ptq.experiment.recorder import Recorder
from resnet8ptq.experiment.settings import Settings

if TYPE_CHECKING:  # a run imports only what it calls
    from resnet8ptq.experiment.pipeline import FileCheck

EXPERIMENT = "resnet8ptq.experiment.pipeline:run_experiment"
ANALYSES = {
    "inspect": "resnet8ptq.exploration.inspection:inspect",  # `inspect` below calls it
    "sensitivity": "resnet8ptq.experiment.layers.sensitivity:analyse",
    "diagnose": "resnet8ptq.exploration.diagnosis.diagnosing:analyse",
    "profile": "resnet8ptq.exploration.profiling.profile:analyse",
    "compare": "resnet8ptq.exploration.tensors.analysing:analyse",
    "plan_test": "resnet8ptq.exploration.power_analysis:analyse",
}


def run_or_analyse(settings: Settings, folder: Path, recorder: Recorder) -> RunResult:
    """Run the experiment or the analysis of the settings; log its config and its result.

    Args:
        settings: the run's settings, with all files located.
        folder: the run's existing folder, for all its files.
        recorder: the open run.

    Returns:
        The result; `unsupported` after an `UnsupportedError`.
    """
    recorder.log_config(settings.config)
    name = settings.config.analysis.name
    function = EXPERIMENT if name is None else ANALYSES[name]
    experiment = resolve_name(function)
    if name is None and not settings.config.backend.quantizes:
        experiment = partial(experiment, check_file=_file_check(settings, folder))

    # Unsupported settings are a result; other errors end the run
    try:
        result: RunResult = experiment(settings, folder, recorder)
    except UnsupportedError as reason:
        result = RunResult("unsupported", str(reason))
    except FileNotFoundError as error:
        cache.check_still_there(settings.runtime.cache_root, error)
        raise
    recorder.log_result(result)
    return result


def _file_check(settings: Settings, folder: Path) -> "FileCheck":
    """Return the function that looks for the cause if another program's file is far from FP32."""
    from resnet8ptq.exploration import file_check

    return partial(file_check.check_against_fp32, config=settings.config, folder=folder)


def inspect(settings: Settings, data_given: bool) -> None:
    """Describe the network, or another program's file, and record nothing.

    Args:
        settings: see `settings.resolve_to_inspect`.
        data_given: whether `data` was set; default data are not compared with the network.
    """
    resolve_name(ANALYSES["inspect"])(settings, data_given)
