"""The scores of one model, and the comparison of a model with its FP32 baseline."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from resnet8ptq.tasks.scoring import distortion
from resnet8ptq.tasks.scoring.metric import Metric, Metrics
from resnet8ptq.tasks.scoring.outputs import Outputs
from resnet8ptq.tasks.scoring.statistics import Interval
from resnet8ptq.tasks.scoring.values import Paired, SampleValues


class Scores(ABC):
    """The scores of one model by a task."""

    @property
    @abstractmethod
    def total(self) -> int:
        """The number of scored items."""

    @property
    @abstractmethod
    def value(self) -> float:
        """The primary metric."""

    @property
    @abstractmethod
    def per_sample(self) -> SampleValues:
        """The values for the paired test."""

    @abstractmethod
    def sqnr_db(self, baseline: Self) -> float | None:
        """Return the SQNR of the outputs against the baseline's in dB.

        The result is None if the SQNR is not finite (`distortion.to_db`), or not known.
        """

    @property
    def fair(self) -> float:
        """The primary metric adjusted for ties, see `Metric.fair`; by default, not adjusted."""
        return self.value

    def fair_gain(self, baseline: Self) -> float:
        """Return `fair` minus that of the baseline."""
        return self.fair - baseline.fair

    def more(self) -> Metrics:
        """Return further metrics by MLflow name; the baseline's get the prefix `BASELINE`."""
        return {}


@dataclass(frozen=True)
class OutputScores(Scores):
    """Base of scores that keep the outputs of the model; by default, an item is a row of these."""

    outputs: Outputs

    @property
    def total(self) -> int:
        """The number of scored items: samples, or joined groups."""
        return len(self.outputs)

    def sqnr_db(self, baseline: Self) -> float | None:
        """Return the SQNR in dB of the worst output, see `distortion.sqnr_db`."""
        return distortion.sqnr_db(baseline.outputs.returned, self.outputs.returned)


@dataclass(frozen=True)
class Comparison:
    """A model and its FP32 baseline on the same samples.

    Attributes:
        model, baseline: the `Scores` of the task.
        tested: whether a paired test compares both models; False if FP32 itself is the reference.
        stopped: the values of a model whose scoring may stop early, used in place of the values in
            `model`; None if all samples are always scored.
    """

    model: Any
    baseline: Any
    metric: Metric
    tested: bool = True
    stopped: SampleValues | None = None

    @property
    def delta(self) -> float:
        """The primary metric of the model minus that of the baseline."""
        return float(self.model.value - self.baseline.value)

    def loss(self, fair: bool = False) -> float:
        """Return the loss against the baseline, see `Metric.loss`."""
        return self.metric.loss(self.model, self.baseline, fair)

    def p_within(self, limit: float) -> float:
        """Return the one-sided p-value of "the loss is at the limit or above"."""
        return self.paired.margin(self.metric, limit, self.model.total).p_within

    @cached_property
    def _test(self) -> tuple[Interval | None, float | None]:
        if not self.tested:
            return None, None
        paired = self.paired
        return paired.model.against(paired.baseline)

    @property
    def interval(self) -> Interval | None:
        """95% interval of `delta`, paired; None without a test."""
        return self._test[0]

    @property
    def p_value(self) -> float | None:
        """The p-value of the paired test; None without a test."""
        return self._test[1]

    @cached_property
    def sqnr_db(self) -> float | None:
        """The SQNR of the outputs in dB, see `Scores.sqnr_db`."""
        return self.model.sqnr_db(self.baseline)

    @property
    def paired(self) -> Paired:
        """The values of model and baseline, for the paired test and for `predictions.npz`."""
        return Paired(self.stopped or self.model.per_sample, self.baseline.per_sample)


def summarize(comparison: Comparison) -> str:
    """Return the primary metric and its change from FP32 as text."""
    metric = comparison.metric
    change = metric.say_change(comparison.delta)
    return f"{metric.title} {metric.show(comparison.model.value)} ({change})"


def doubt_below(shown: str, interval: Interval, expected: float | None) -> str | None:
    """Return a doubt if FP32 is significantly worse than expected; else None.

    An unknown interval (NaN) proves nothing.

    >>> doubt_below("accuracy 60%", (0.55, 0.65), expected=0.8)
    'BELOW report.expected_accuracy=0.8, accuracy 60%'
    """
    if expected is not None and interval[1] < expected:  # false for NaN
        return f"BELOW report.expected_accuracy={expected:g}, {shown}"
    return None
