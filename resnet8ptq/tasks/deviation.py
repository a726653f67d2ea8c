"""`task=deviation`: without labels, the relative error of the outputs against FP32."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar, Self

import numpy as np

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.tasks.classification import metric_names
from resnet8ptq.tasks.scoring import distortion
from resnet8ptq.tasks.scoring.bootstrap import BOOTSTRAP, Replicates, mean_of
from resnet8ptq.tasks.scoring.comparison import Comparison, OutputScores, Scores
from resnet8ptq.tasks.scoring.metric import Metric, Metrics
from resnet8ptq.tasks.scoring.outputs import Array, Outputs, Targets
from resnet8ptq.tasks.scoring.statistics import Interval, Margin, Values, bootstrap, ratio_interval
from resnet8ptq.tasks.scoring.values import Arrays, PairedTest, check_columns
from resnet8ptq.tasks.task import Reference, Table, Task, TaskFiles, TaskType

NOTE = (
    "Without labels: the relative error of the outputs is measured against FP32 in the same "
    "framework. The quality of FP32 itself was not measured, and no accuracy is known."
)
RESAMPLES = 9999
SQNR = Metric("sqnr_db", "SQNR dB", bounded=False)


def powers(values: Array, reference: Array) -> tuple[Values, Values]:
    """Return the noise [n] and the signal [n] of each sample, relative to FP32's mean signal.

    Noise and signal are sums of squares. If FP32 returns only zeros, both are absolute.
    """
    noise = np.empty(len(reference))
    signal = np.empty(len(reference))
    for part in distortion.parts(reference):
        exact = reference[part].reshape(len(reference[part]), -1).astype(np.float64)
        error = values[part].reshape(exact.shape) - exact
        noise[part] = (error**2).sum(axis=1)
        signal[part] = (exact**2).sum(axis=1)
    mean = signal.mean() or 1.0
    return noise / mean, signal / mean


@dataclass(frozen=True)
class RelativeError(Metric):
    """The relative error, whose loss is the noise over the signal, with an SQNR as limit."""

    limit_key: str = "min_sqnr_db"

    def limit(self, limits: ReportConfig) -> float:
        """Return the noise over the signal at the smallest accepted SQNR; 25 dB are 0.3%."""
        return float(10 ** (-limits.min_sqnr_db / 10))

    def loss(self, model: Scores, baseline: Scores, fair: bool = False) -> float:
        """Return the noise over the signal of the worst output, see `DeviationScores`."""
        assert isinstance(model, DeviationScores)  # this task makes these scores
        return model.noise_ratio

    def say_limit(self, limit: float) -> str:
        """Return a limit of the loss as text: the lowest SQNR against FP32, in dB."""
        return f"SQNR of at least {-10 * math.log10(limit):g} dB against FP32"

    def say_margin(self, margin: float) -> str:
        """Return the margin against the best model as text."""
        return f"with at most {margin:.2%} more noise than the best"

    def state_loss(self, loss: float) -> str:
        """Return a loss as text: the SQNR, or that the outputs are equal or have NaN."""
        if math.isnan(loss):
            return "outputs of NaN"
        if not loss > 0:
            return "equal outputs"
        return f"SQNR {-10 * math.log10(loss):.1f} dB"

    @property
    def loss_title(self) -> str:
        """The name of the loss in figures."""
        return "noise over signal of the outputs, %"


# Mean over samples and outputs of |value - FP32| / |FP32|, by the Euclidean norm.
RELATIVE_ERROR = RelativeError("relative_error", "relative error", maximize=False, percent=True)


@dataclass(frozen=True, kw_only=True)
class DeviationValues(Replicates):
    """Replicates, and each sample's noise [n] and signal [n] in the worst output, see `powers`."""

    noise: Values
    signal: Values

    shared: ClassVar[tuple[str, ...]] = ("noise", "signal")

    @classmethod
    def read(cls, arrays: Arrays, prefix: str = "") -> Self:
        """Read the arrays that `Paired.arrays` returned, see `PairedTest.read_values`."""
        columns = [arrays["noise"], arrays["signal"]]
        check_columns(columns, "f")
        replicates = Replicates.read(arrays, prefix)
        return cls(**vars(replicates), noise=columns[0], signal=columns[1])

    def margin(self, baseline: Self, metric: Metric, limit: float, items: int) -> Margin:
        """Return the margin of the noise, as a share of the signal, over the limit."""
        return Margin.of_mean(self.noise - limit * self.signal, skewed=True)

    def margin_over(self, other: Self, metric: Metric, limit: float, items: int) -> Margin:
        """Return the margin of this model's noise minus the other's, as a share of the signal."""
        return Margin.of_mean(self.noise - other.noise - limit * self.signal, skewed=True)


@dataclass(frozen=True)
class DeviationScores(OutputScores):
    """Outputs of one model, compared with reference outputs.

    A sample's error is the norm of its noise divided by the root mean square norm of the reference.
    With several outputs, it is the mean of their errors. The limit applies to the worst output.
    Parts of an output in different units count as outputs, see `distortion.find_units`.
    """

    reference: Outputs

    @cached_property
    def _powers(self) -> tuple[Values, Values, Values]:
        noises = []
        signals = []
        for reference, values in zip(*self._parts, strict=True):
            noise, signal = powers(values, reference)
            noises.append(noise)
            signals.append(signal)
        errors = np.mean(np.sqrt(noises), axis=0)
        return errors, noises[self.worst], signals[self.worst]

    @cached_property
    def _parts(self) -> tuple[list[Array], list[Array]]:
        """The reference and the values of each part of each output, see `distortion.find_units`."""
        _, reference, values = distortion.split_units(self.reference.values, self.outputs.values)
        return reference, values

    @cached_property
    def worst(self) -> int:
        """The index of the part that the limit applies to, see `distortion.worst_output`."""
        reference, values = self._parts
        ratios = [distortion.noise_ratio(*pair) for pair in zip(reference, values, strict=True)]
        return distortion.worst_output(reference, ratios)

    @property
    def value(self) -> float:
        """The mean error."""
        return float(self._powers[0].mean())

    @cached_property
    def per_sample(self) -> DeviationValues:
        """The error, noise and signal of each sample, and replicates of the mean error."""
        errors, noise, signal = self._powers
        replicates = bootstrap(mean_of(errors), self.total, RESAMPLES)
        return DeviationValues(replicates=replicates, values=errors, noise=noise, signal=signal)

    @property
    def noise_ratio(self) -> float:
        """The noise over the signal of the worst output, over all samples.

        Without a signal, the result is infinite, or 0 without noise.
        """
        _, noise, signal = self._powers
        if not signal.any():
            return math.inf if noise.any() else 0.0
        return float(noise.sum() / signal.sum())

    @property
    def noise_interval(self) -> Interval | None:
        """95% interval of `noise_ratio`; None for a single sample, or without a signal."""
        _, noise, signal = self._powers
        return ratio_interval(noise, signal)

    @cached_property
    def ratios(self) -> list[float]:
        """The noise ratio of each output, see `distortion.noise_ratios`."""
        return distortion.noise_ratios(self.reference.values, self.outputs.values)


TEST = PairedTest(f"{BOOTSTRAP.name}, between two runs", BOOTSTRAP.intervals, DeviationValues.read)


def summarize(comparison: Comparison) -> str:
    """Return the primary metric as text, with the SQNR if that is not None."""
    metric = comparison.metric
    sqnr_db = comparison.sqnr_db
    shown = f"{metric.title} {metric.show(comparison.model.value)}"
    if sqnr_db is not None:
        shown += f", SQNR {sqnr_db:.1f} dB"
    return shown


def _pair_metrics(names: Sequence[str], comparison: Comparison) -> Metrics:
    """Return SQNR and loss interval of the worst output, and the SQNR of each if there are several.

    Without `names`, only the worst output has an SQNR.
    """
    model = comparison.model
    outputs = model.reference.values, model.outputs.values
    low, high = model.noise_interval or (None, None)
    return {
        "sqnr_db": comparison.sqnr_db,
        "ci95/drop_low": low,
        "ci95/drop_high": high,
        **distortion.sqnr_of_each(metric_names(names), *outputs),
    }


def _tables(names: Sequence[str], comparison: Comparison) -> dict[str, Table]:
    rows: list[list[object]] = [["output", "sqnr_db"]]
    for name, ratio in zip(names, comparison.model.ratios, strict=True):
        rows.append([name, distortion.to_db(ratio)])
    return {"outputs.csv": rows}


def _score(outputs: Outputs, targets: Targets) -> DeviationScores:
    """Use the outputs as their own reference; `_rescore` replaces it by the outputs of FP32."""
    return DeviationScores(outputs, outputs)


def _rescore(model: DeviationScores, baseline: DeviationScores) -> DeviationScores:
    return DeviationScores(model.outputs, baseline.outputs)


def build(outputs: Sequence[str] = ()) -> Task:
    """Return the task for a network with outputs of any kind."""
    return Task(
        "deviation",
        RELATIVE_ERROR,
        _score,
        TEST,
        beside=(SQNR,),
        pair_metrics=partial(_pair_metrics, outputs),
        reference=Reference(_rescore, NOTE),
        files=TaskFiles(tables=partial(_tables, outputs)),
        summary=summarize,
    )


DEVIATION = TaskType(
    make=lambda config, context: build(tuple(context.outputs)),
    recall=lambda config, class_names: build(),
)
