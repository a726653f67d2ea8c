"""What is run instead of one quantization, by the name that `+analysis` takes."""

from collections.abc import Callable
from pathlib import Path

from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.evaluation.result import RunResult
from resnet8ptq.experiment.diagnosis import diagnosing
from resnet8ptq.experiment.layers import sensitivity
from resnet8ptq.experiment.recorder import Recorder

# `inspect` is not here: it records no run, see `inspecting`.
ANALYSES: dict[str, Callable[[RunConfig, Path, Recorder], RunResult]] = {
    "sensitivity": sensitivity.analyse,
    "diagnose": diagnosing.analyse,
}


def run_analysis(config: RunConfig, folder: Path, run: Recorder) -> RunResult:
    """Analyse and record; print what was found.

    Args:
        config: what to run; `analysis` says how.
        folder: the run's own folder, existing; all its files land there.
        run: the open MLflow run that records it.

    Raises:
        PtqError: anything that went wrong, in one line.
    """
    assert config.analysis.name is not None
    try:
        result = ANALYSES[config.analysis.name](config, folder, run)
    except UnsupportedError as reason:
        run.log_config(config)
        result = RunResult("unsupported", str(reason))
    run.log_result(result)
    return result
