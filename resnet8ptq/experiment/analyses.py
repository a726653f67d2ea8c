"""What is run instead of one quantization, by the name that `+analysis` takes."""

from pathlib import Path
from pkgutil import resolve_name

from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.evaluation.result import RunResult
from resnet8ptq.experiment import mlperf_tiny
from resnet8ptq.experiment.recorder import Recorder

# Imported when they are asked for. `inspect` is not here: it records no run, see `inspecting`.
ANALYSES = {
    "sensitivity": "resnet8ptq.experiment.layers.sensitivity:analyse",
    "diagnose": "resnet8ptq.experiment.diagnosis.diagnosing:analyse",
    "profile": "resnet8ptq.experiment.profiling.profile:analyse",
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
    analyse = resolve_name(ANALYSES[config.analysis.name])
    try:
        result: RunResult = analyse(mlperf_tiny.settle(config), folder, run)
    except UnsupportedError as reason:
        run.log_config(config)
        result = RunResult("unsupported", str(reason))
    run.log_result(result)
    return result
