"""Results of runs, made by hand."""

from resnet8ptq.evaluation.result import Measurement, RunResult
from resnet8ptq.tasks.scoring.comparison import Comparison
from resnet8ptq.tasks.scoring.metric import Metrics
from resnet8ptq.tasks.task import Task


def make_result(task: Task, comparison: Comparison, **more: float | None) -> RunResult:
    """Return the result of a measured run, with more metrics of its `Measurement`."""
    metrics: Metrics = {
        "baseline/size_bytes": 400_000,
        "counts/quantized_layers": 11,
        "system/quantize_s": 2.5,
        "system/evaluate_s": 0.5,
        "system/evaluate_batch_size": 64,
        "system/evaluate_threads": 2,
        **more,
    }
    measurement = Measurement(task, comparison, 100_000, metrics)
    return RunResult("ok", measurement=measurement, resolved={"weight_dtype": "int8"})
