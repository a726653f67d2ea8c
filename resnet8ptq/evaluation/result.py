"""The result of a run."""

from dataclasses import dataclass, field

from resnet8ptq.evaluation.latency import Latency
from resnet8ptq.tasks.contract import BASELINE, CHOICE, TOTAL, Comparison, Task


@dataclass(frozen=True)
class Measurement:
    """An artifact, reloaded from disk and run over the test images.

    Attributes:
        size_bytes, baseline_size_bytes: file sizes of the model and of its FP32 baseline.
        quantize_s: seconds of conversion, and of calibration unless cached.
        evaluate_s: seconds for all test images.
        evaluation_cached: whether the cache had the outputs; `evaluate_s` is then the earlier
            run's.
        peak_memory_bytes: peak memory of the process during the run; None if it cannot be measured,
            or the evaluation is cached.
        latency: latency of model and baseline; None with `latency.enabled=false`, and for artifacts
            that simulate integers.
        single: the comparison at batch 1; only for dynamic quantization, whose activation ranges
            and result depend on the batch size.
        choice: the comparison on the selection samples; None without them.
        p_within: one-sided p-value of "the loss is at the limit of `report` or above", not
            corrected for other runs; None for FP32, and if samples of a group were scored one by
            one.
        choose_s: seconds for the selection samples.
        preparation: metrics of the preparation steps, by MLflow name.
        prepare_s: seconds of fine-tuning, corrections and choices; None if there were none.
    """

    task: Task
    comparison: Comparison
    size_bytes: int
    baseline_size_bytes: int
    quantized_layers: int
    quantize_s: float
    evaluate_s: float
    evaluate_batch_size: int
    evaluate_threads: int
    peak_memory_bytes: int | None
    evaluation_cached: bool = False
    latency: Latency | None = None
    single: Comparison | None = None
    choice: Comparison | None = None
    p_within: float | None = None
    choose_s: float | None = None
    preparation: dict[str, float] = field(default_factory=dict)
    prepare_s: float | None = None


@dataclass(frozen=True)
class RunResult:
    """The outcome of one run: `ok` with a measurement, or `unsupported` with a reason.

    Attributes:
        resolved: params that the framework derived from the settings, such as `weight_dtype`.
    """

    status: str
    reason: str = ""
    measurement: Measurement | None = None
    resolved: dict[str, str] = field(default_factory=dict)

    def summary(self) -> str:
        """Return the outcome in one line."""
        if self.measurement is None:
            return f"{self.status}: {self.reason}"
        measured = self.measurement
        scored = measured.task.summary(measured.comparison)
        if (plan := measured.comparison.plan) is not None:
            total, outcome = measured.comparison.model.total, measured.comparison.outcome
            scored += f", {outcome} after {total:,} of {plan.total:,} samples"
        return f"{scored}, {measured.size_bytes / 1000:.1f} kB"

    def to_metrics(self) -> dict[str, float]:
        """Return every metric under its MLflow name; accuracies are fractions."""
        measured = self.measurement
        if measured is None:
            return {}
        metrics: dict[str, float | None] = {
            **measured.task.metrics(measured.comparison),
            "paired/p_within": measured.p_within,
            "size_bytes": measured.size_bytes,
            f"{BASELINE}size_bytes": measured.baseline_size_bytes,
            "counts/quantized_layers": measured.quantized_layers,
            "system/quantize_s": measured.quantize_s,
            "system/evaluate_s": measured.evaluate_s,
            "system/evaluate_batch_size": measured.evaluate_batch_size,
            "system/evaluate_threads": measured.evaluate_threads,
            "peak_memory_bytes": measured.peak_memory_bytes,
            "system/choose_s": measured.choose_s,
            "system/prepare_s": measured.prepare_s,
            **measured.preparation,
        }
        if measured.single is not None:
            values = measured.task.metrics(measured.single)
            for name in (measured.task.metric.name, measured.task.metric.ranked_by):
                metrics[f"batch1/{name}"] = values.get(name)
        if measured.choice is not None:
            values = measured.task.metrics(measured.choice)
            metric, criterion = measured.task.metric, measured.task.criterion
            names = [metric.name, metric.ranked_by, f"{BASELINE}{metric.name}", "drop", TOTAL]
            names += [criterion.name] if criterion else []
            metrics |= {f"{CHOICE}{name}": values.get(name) for name in names}
        if measured.latency is not None:
            metrics |= measured.latency.to_metrics()
        return {key: float(value) for key, value in metrics.items() if value is not None}
