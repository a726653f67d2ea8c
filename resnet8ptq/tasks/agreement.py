"""Without labels: `task=agreement` counts the top-1 classes that stay, `task=deviation` values.

Both say how close a model is to FP32, and nothing of how good either is.
"""

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import ReportConfig, TaskConfig
from resnet8ptq.core.errors import ModelError
from resnet8ptq.tasks import bootstrap, classification, contract, distortion
from resnet8ptq.tasks.contract import (
    Array,
    Arrays,
    Metric,
    Metrics,
    Outputs,
    Setting,
    Table,
    Targets,
)
from resnet8ptq.tasks.statistics import UNKNOWN, Margin, Values, mcnemar, tango

NOTE = (
    "No labels: {what} is measured against FP32 in the same framework. How good FP32 itself is was "
    "not measured, and no accuracy is known."
)
RESAMPLES = 9999
SQNR = Metric("sqnr_db", "SQNR dB", bounded=False)
KL = Metric("kl_divergence", "KL", maximize=False, bounded=False)


@dataclass(frozen=True)
class AgreementPaired(contract.Paired):
    """Top-1 classes [n] of a model and of its baseline."""

    model: NDArray[np.int64]
    baseline: NDArray[np.int64]

    @classmethod
    def read(cls, arrays: Arrays) -> Self:
        """Read what `arrays` returned."""
        columns = [arrays["predictions"], arrays["baseline_predictions"]]
        contract.check_columns(columns, "i")
        return cls(*columns)

    def arrays(self) -> dict[str, Array]:
        """Return the predictions of both."""
        return {"predictions": self.model, "baseline_predictions": self.baseline}

    def against(self, other: Self) -> float:
        """Return the p-value of the exact McNemar test of the samples that agree."""
        return mcnemar(self.model == self.baseline, other.model == other.baseline)

    def margin(self, metric: Metric, drop: float, items: int) -> Margin:
        """Return Tango's margin of the samples that do not agree."""
        return tango(int((self.model != self.baseline).sum()), 0, len(self.model), drop)


class AgreementScores(classification.Scores):
    """The FP32 classes stand in for labels, so that what is right is what agrees."""

    @property
    def fair(self) -> float:
        """The agreement: what a tie at the top is worth is not known."""
        return self.value

    def more(self) -> Metrics:
        """Return nothing: no label is known."""
        return {}


@dataclass(frozen=True)
class AgreementComparison(classification.Comparison):
    """Two models of which the second is the yardstick."""

    @property
    def fair_delta(self) -> float:
        """The agreement minus 1."""
        return self.delta

    interval = None  # type: ignore[assignment]
    p_value = None  # type: ignore[assignment]

    @property
    def paired(self) -> AgreementPaired:  # type: ignore[override]
        """The top-1 classes of both."""
        return AgreementPaired(self.model.predictions, self.baseline.predictions)

    def more(self) -> Metrics:
        """Return the distance of the outputs."""
        return {"kl_divergence": self.kl_divergence, "sqnr_db": self.sqnr_db}


class _AgainstFp32(contract.Task):
    """The baseline is the yardstick: it has no value of its own, and no test against itself."""

    def metrics(self, found: contract.Comparison) -> Metrics:
        """Leave out what would look like a measurement of the baseline."""
        metrics = super().metrics(found)
        return {
            key: value
            for key, value in metrics.items()
            if key != "delta" and not key.startswith("baseline_")
        }

    def summary(self, found: contract.Comparison) -> str:
        """Return the primary metric, and the SQNR."""
        shown = f"{self.metric.title} {self.metric.show(found.model.value)}"
        sqnr_db = found.sqnr_db
        return shown if sqnr_db is None else f"{shown}, SQNR {sqnr_db:.1f} dB"


@dataclass(frozen=True)
class Agreement(_AgainstFp32):
    """The network returns a value for each class; labels are not needed."""

    name = "agreement"
    test = "exact McNemar test of the samples that agree with FP32, between two runs"
    intervals = "95% Wilson score intervals"
    note = NOTE.format(what="top-1 agreement")
    paired: ClassVar[type[contract.Paired]] = AgreementPaired

    @classmethod
    def make(cls, config: TaskConfig, setting: Setting) -> Self:
        """Take one output of several values."""
        if (setting.classes or 0) < 2:
            raise ModelError(
                f"returns {contract.describe(setting.outputs)}; task=agreement takes one output, a "
                "value for each class; task=deviation compares values of any kind"
            )
        return cls()

    @property
    def metric(self) -> Metric:
        """Fraction of samples whose top-1 class is that of FP32."""
        return Metric("agreement", "agreement", percent=True)

    @property
    def beside(self) -> tuple[Metric, ...]:
        """How far the outputs are from FP32's."""
        return KL, SQNR

    def score(self, outputs: Outputs, targets: Targets) -> classification.Scores:
        """Take the top-1 classes: until they are compared, those of FP32 are their own."""
        unlabelled = Targets(np.zeros(len(outputs), np.int64))
        found = classification.Classification().score(outputs, unlabelled)
        return AgreementScores(found.probabilities, found.predictions, found.logits)

    def compare(
        self, model: classification.Scores, baseline: classification.Scores
    ) -> AgreementComparison:
        """Compare with the classes of FP32."""
        return AgreementComparison(replace(model, labels=baseline.predictions), baseline)


def powers(found: Array, reference: Array) -> tuple[Values, Values]:
    """Return the noise [n] and the signal [n] of each sample, in FP32's mean signal.

    Of each the sum of the squares. Where FP32 returns zeros alone, as they are.
    """
    rows = max(1, distortion.AT_ONCE // max(1, reference[:1].size))
    noise, signal = np.empty(len(reference)), np.empty(len(reference))
    for start in range(0, len(reference), rows):
        part = slice(start, start + rows)
        wanted = reference[part].reshape(len(reference[part]), -1).astype(np.float64)
        error = found[part].reshape(wanted.shape) - wanted
        noise[part], signal[part] = ((values**2).sum(axis=1) for values in (error, wanted))
    mean = signal.mean() or 1.0
    return noise / mean, signal / mean


@dataclass(frozen=True)
class RelativeError(Metric):
    """The metric of `Deviation`, whose limit is an SQNR: its drop is the noise over the signal."""

    limit_key: str = "min_sqnr_db"

    def limit(self, limits: ReportConfig) -> float:
        """Return the noise over the signal that the SQNR stands for; 25 dB are 0.3%."""
        return float(10 ** (-limits.min_sqnr_db / 10))

    def say_limit(self, limits: ReportConfig) -> str:
        """Return the limit in words."""
        return f"SQNR of at least {limits.min_sqnr_db:g} dB against FP32"

    @property
    def loss_title(self) -> str:
        """What a figure calls the drop."""
        return "noise over signal of the outputs, %"


@dataclass(frozen=True)
class DeviationPaired(bootstrap.Paired):
    """Also noise [n] and signal [n] of each sample, of several outputs the mean; see `powers`."""

    noise: Values | None = None
    signal: Values | None = None

    @classmethod
    def read(cls, arrays: Arrays) -> Self:
        """Read what `arrays` returned; older runs have kept neither noise nor signal."""
        kept = vars(bootstrap.Paired.read(arrays))
        if "noise" not in arrays:
            return cls(**kept)
        columns = [arrays["noise"], arrays["signal"]]
        contract.check_columns(columns, "f")
        return cls(**kept, noise=columns[0], signal=columns[1])

    def margin(self, metric: Metric, drop: float, items: int) -> Margin:
        """Return the margin of noise over signal, the mean of what each sample is above the limit.

        FP32's outputs are the yardstick: which share of the signal is a sample's is known.
        """
        if self.noise is None or self.signal is None:
            return UNKNOWN
        excess = self.noise - drop * self.signal
        error = float(excess.std(ddof=1)) / math.sqrt(items) if items > 1 else 0.0
        return Margin.student(float(excess.mean()), error, items)


@dataclass(frozen=True)
class DeviationScores(bootstrap.Scores):
    """The relative error: the norm of a sample's error over FP32's root mean square norm.

    Of several outputs the mean.
    """

    noise: Values = field(default_factory=lambda: np.empty(0))
    signal: Values = field(default_factory=lambda: np.empty(0))


def _score(outputs: Outputs, reference: Outputs) -> DeviationScores:
    pairs = zip(outputs.values, reference.values, strict=True)
    noises, signals = zip(*(powers(*pair) for pair in pairs), strict=True)
    errors = np.mean(np.sqrt(noises), axis=0)
    return DeviationScores(
        *(outputs, bootstrap.mean_of(errors), len(outputs), RESAMPLES, errors),
        noise=np.mean(noises, axis=0),
        signal=np.mean(signals, axis=0),
    )


@dataclass(frozen=True)
class DeviationComparison(bootstrap.Comparison):
    """The outputs of two models."""

    model: DeviationScores
    baseline: DeviationScores

    interval = None
    p_value = None

    @property
    def paired(self) -> DeviationPaired:
        """The replicates of both, and the model's noise."""
        model = self.model
        return DeviationPaired(**vars(super().paired), noise=model.noise, signal=model.signal)

    def ratios(self) -> list[float]:
        """Return noise over signal of each output."""
        pairs = zip(self.baseline.outputs.values, self.model.outputs.values, strict=True)
        return [distortion.noise_ratio(*pair) for pair in pairs]


@dataclass(frozen=True)
class Deviation(_AgainstFp32):
    """The network returns anything, in one output or several; labels are not needed.

    Attributes:
        outputs: the names of the outputs.
    """

    outputs: tuple[str, ...] = ()

    name = "deviation"
    test = "paired bootstrap, between two runs"
    intervals = bootstrap.INTERVALS
    note = NOTE.format(what="the relative error of the outputs")
    paired: ClassVar[type[contract.Paired]] = DeviationPaired

    @classmethod
    def make(cls, config: TaskConfig, setting: Setting) -> Self:
        """Take any outputs."""
        return cls((), tuple(setting.outputs))

    @property
    def metric(self) -> Metric:
        """Mean over samples and outputs of |found - FP32| / |FP32|, by the Euclidean norm."""
        return RelativeError("relative_error", "relative error", maximize=False, percent=True)

    @property
    def beside(self) -> tuple[Metric, ...]:
        """How far the outputs are from FP32's."""
        return (SQNR,)

    def score(self, outputs: Outputs, targets: Targets) -> DeviationScores:
        """Keep the outputs: until they are compared, those of FP32 are their own."""
        return _score(outputs, outputs)

    def compare(self, model: DeviationScores, baseline: DeviationScores) -> DeviationComparison:
        """Compare with the outputs of FP32."""
        return DeviationComparison(_score(model.outputs, baseline.outputs), baseline)

    def metrics(self, found: contract.Comparison) -> Metrics:
        """Add the noise over the signal as drop; of several outputs the SQNR of each."""
        metrics = super().metrics(found)
        metrics["drop"] = float(np.mean(self._ratios(found)))
        if len(self.outputs) > 1:
            names = classification.metric_names(self.outputs)
            ratios = self._ratios(found)
            metrics |= {
                f"sqnr_db_{name}": distortion.to_db([r])
                for name, r in zip(names, ratios, strict=True)
            }
        return metrics

    def tables(self, found: contract.Comparison) -> dict[str, Table]:
        """Return the SQNR of each output."""
        rows = [
            [name, distortion.to_db([ratio])]
            for name, ratio in zip(self.outputs, self._ratios(found), strict=True)
        ]
        return {"outputs.csv": [["output", "sqnr_db"], *rows]}

    def _ratios(self, found: contract.Comparison) -> list[float]:
        assert isinstance(found, DeviationComparison)  # what `compare` made
        return found.ratios()
