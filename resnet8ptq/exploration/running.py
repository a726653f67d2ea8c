"""Runs one quantization, or the analysis chosen by `+analysis`."""

from functools import partial
from pathlib import Path
from pkgutil import resolve_name

from resnet8ptq.core import cache
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.evaluation.result import RunResult
from resnet8ptq.experiment.recorder import Recorder
from resnet8ptq.experiment.settings import Settings

ANALYSES = {
    "inspect": "resnet8ptq.exploration.inspection:inspect",  # called by `inspect` below
    "sensitivity": "resnet8ptq.experiment.layers.sensitivity:analyse",
    "diagnose": "resnet8ptq.exploration.diagnosis.diagnosing:analyse",
    "profile": "resnet8ptq.exploration.profiling.profile:analyse",
    "compare": "resnet8ptq.exploration.tensors.analysing:analyse",
    "plan_test": "resnet8ptq.exploration.power_analysis:analyse",
}


def run(settings: Settings, folder: Path, recorder: Recorder) -> RunResult:
    """Run and record; an analysis prints its result.

    Args:
        settings: the run's settings, with all files located.
        folder: the run's existing folder, for all its files.
        recorder: the open run.

    Returns:
        The result; `unsupported` if the framework does not support the combination.
    """
    recorder.log_config(settings.config)
    name = settings.config.analysis.name
    try:
        if name is None:
            result = _quantize(settings, folder, recorder)
        else:
            result = resolve_name(ANALYSES[name])(settings, folder, recorder)
    except UnsupportedError as reason:
        result = RunResult("unsupported", str(reason))
    except FileNotFoundError as error:
        cache.check_still_there(settings.runtime.cache_root, error)
        raise
    recorder.log_result(result)
    return result


def _quantize(settings: Settings, folder: Path, recorder: Recorder) -> RunResult:
    """Run the recipe; a file of another program is checked for the cause of its loss."""
    from resnet8ptq.experiment.pipeline import run_experiment

    config = settings.config
    if config.backend.quantizes:
        return run_experiment(settings, folder, recorder)
    from resnet8ptq.exploration import file_check

    sized = config.preprocess.size is not None
    check_file = partial(file_check.check, report=config.report, sized=sized)
    return run_experiment(settings, folder, recorder, check_file)


def inspect(settings: Settings, data_given: bool) -> None:
    """Describe the network, or the file, and record nothing.

    Args:
        settings: see `settings.resolve_to_inspect`.
        data_given: whether `data` was set; its default is not compared with the network.
    """
    resolve_name(ANALYSES["inspect"])(settings, data_given)
