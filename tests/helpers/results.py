"""Results of runs, made by hand."""

from typing import Any

from resnet8ptq.evaluation.result import Measurement, RunResult
from resnet8ptq.tasks.contract import Comparison, Task


def make_result(task: Task, comparison: Comparison, **changes: Any) -> RunResult:
    """Return the result of a measured run; `changes` are fields of its `Measurement`."""
    figures: dict[str, Any] = {
        "size_bytes": 100_000,
        "baseline_size_bytes": 400_000,
        "quantized_layers": 11,
        "quantize_s": 2.5,
        "evaluate_s": 0.5,
        "evaluate_batch_size": 64,
        "evaluate_threads": 2,
        "peak_memory_bytes": None,
    }
    measurement = Measurement(task, comparison, **{**figures, **changes})
    return RunResult("ok", measurement=measurement, resolved={"weight_dtype": "int8"})
