"""What a run found."""

from dataclasses import dataclass, field

from resnet8ptq.evaluation.latency import Latency
from resnet8ptq.tasks.classification import Comparison, Scores, metric_names


@dataclass(frozen=True)
class Measurement:
    """An artifact, reloaded from disk and run over the test images.

    Attributes:
        size_bytes, baseline_size_bytes: the files of the model and of its FP32 baseline.
        quantize_s: conversion, and calibration where the cache has nothing to offer, in seconds.
        evaluate_s: all test images, in seconds; `evaluate_batch_size` at once, on
            `evaluate_threads`.
        peak_memory_bytes: of the process during the run; None where it cannot be measured.
        latency: beside the baseline's; None with `latency.enabled=false`, and where the artifact
            only simulates integers.
        single: scores at batch 1, for dynamic quantization: it takes its activation ranges from
            the batch, so that the accuracy depends on the batch size. None for all others.
        preparation: what the choices before quantization came to, by MLflow name.
        prepare_s: fine-tuning, corrections and choices, in seconds; None without any.
    """

    class_names: tuple[str, ...]
    comparison: Comparison
    size_bytes: int
    baseline_size_bytes: int
    quantized_layers: int
    quantize_s: float
    evaluate_s: float
    evaluate_batch_size: int
    evaluate_threads: int
    peak_memory_bytes: int | None
    latency: Latency | None = None
    single: Scores | None = None
    preparation: dict[str, float] = field(default_factory=dict)
    prepare_s: float | None = None


@dataclass(frozen=True)
class RunResult:
    """The outcome of one run: `ok` with a measurement, or `unsupported` with a reason.

    Attributes:
        resolved: what the settings came to in the framework, e.g. `weight_dtype`.
    """

    status: str
    reason: str = ""
    measurement: Measurement | None = None
    resolved: dict[str, str] = field(default_factory=dict)

    def summary(self) -> str:
        """Return the outcome in one line."""
        if self.measurement is None:
            return f"{self.status}: {self.reason}"
        scores = self.measurement.comparison.model
        return (
            f"{scores.correct} of {scores.total} correct ({scores.accuracy:.2%}, "
            f"{100 * self.measurement.comparison.delta:+.2f} points), "
            f"{self.measurement.size_bytes / 1000:.1f} kB"
        )

    def to_metrics(self) -> dict[str, float]:
        """Return every metric under its MLflow name; accuracies are fractions."""
        measured = self.measurement
        if measured is None:
            return {}
        scores, comparison = measured.comparison.model, measured.comparison
        low, high = scores.interval
        metrics: dict[str, float | None] = {
            "accuracy": scores.accuracy,
            "ci95_low": low,
            "ci95_high": high,
            "delta": comparison.delta,
            "correct": scores.correct,
            "total": scores.total,
            "tied": scores.tied,
            "expected_correct": scores.expected_correct,
            "expected_accuracy": scores.expected_correct / scores.total,
            "expected_delta": comparison.expected_delta,
            "baseline_accuracy": comparison.baseline.accuracy,
            "baseline_correct": comparison.baseline.correct,
            "right_to_wrong": comparison.right_to_wrong,
            "wrong_to_right": comparison.wrong_to_right,
            "p_value": comparison.p_value,
            "agreement": comparison.agreement,
            "kl_divergence": comparison.kl_divergence,
            "sqnr_db": comparison.sqnr_db,
            "size_bytes": measured.size_bytes,
            "baseline_size_bytes": measured.baseline_size_bytes,
            "size_reduction": 1 - measured.size_bytes / measured.baseline_size_bytes,
            "quantized_layers": measured.quantized_layers,
            "quantize_s": measured.quantize_s,
            "evaluate_s": measured.evaluate_s,
            "evaluate_batch_size": measured.evaluate_batch_size,
            "evaluate_threads": measured.evaluate_threads,
            "images_per_s": scores.total / measured.evaluate_s,
            "peak_memory_bytes": measured.peak_memory_bytes,
            "prepare_s": measured.prepare_s,
            **measured.preparation,
        }
        if measured.single is not None:
            metrics["batch1_accuracy"] = measured.single.accuracy
            metrics["batch1_expected_correct"] = measured.single.expected_correct
        if measured.latency is not None:
            metrics |= measured.latency.to_metrics()
        for label, name in enumerate(metric_names(measured.class_names)):
            metrics[f"accuracy_{name}"] = scores.class_accuracy(label)
            metrics[f"delta_{name}"] = comparison.class_delta(label)
        return {key: float(value) for key, value in metrics.items() if value is not None}
