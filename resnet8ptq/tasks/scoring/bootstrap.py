"""A paired bootstrap over the items, shared by tasks whose metric lacks its own test.

Every run with the same number of items draws the same bootstrap samples (`statistics.resample`).
Two runs on the same items therefore have paired replicates, even if nothing else was kept of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.tasks.scoring import distortion, statistics
from resnet8ptq.tasks.scoring.comparison import OutputScores
from resnet8ptq.tasks.scoring.metric import UNDEFINED, Metric, Metrics
from resnet8ptq.tasks.scoring.outputs import Array
from resnet8ptq.tasks.scoring.statistics import Counts, Interval, Margin, Values
from resnet8ptq.tasks.scoring.values import Arrays, PairedTest, SampleValues, check_columns


@dataclass(frozen=True)
class Replicates(SampleValues):
    """The metric of one model on each bootstrap sample [resamples].

    Attributes:
        values: a value of each item [n], such as its error; None if no item has its own value.
        class_counts: the number of items of each class [classes], if the metric is a mean over
            classes, or the number of the items that count [1]. With None, all items count in
            `margin`.
    """

    replicates: Values
    values: Values | None = None
    class_counts: Counts | None = None

    @classmethod
    def read(cls, arrays: Arrays, prefix: str = "") -> Self:
        """Read the arrays that `Paired.arrays` returned, see `PairedTest.read_values`."""
        check_columns([arrays["replicates"], arrays["baseline_replicates"]], "f")
        counts = arrays.get(f"{prefix}class_counts")
        if counts is not None:
            check_columns([counts], "i")
        return cls(arrays[f"{prefix}replicates"], arrays.get(f"{prefix}values"), counts)

    @property
    def interval(self) -> Interval:
        """95% percentile interval."""
        return statistics.bootstrap_interval(self.replicates)

    def against(self, other: Self) -> tuple[Interval, float]:
        """Return the percentile interval of the difference and the p-value of the paired bootstrap.

        Raises:
            ValueError: the other run has another number of replicates.
        """
        check_columns([self.replicates, other.replicates], "f")
        differences = self.replicates - other.replicates
        return statistics.bootstrap_interval(differences), statistics.bootstrap_p(differences)

    def margin(self, baseline: Self, metric: Metric, limit: float, items: int) -> Margin:
        """Return the margin, from the spread and the skewness of the loss on the bootstrap samples.

        If all replicates with a value equal those of the baseline, no item shows a change. For a
        bounded metric, the margin is then that of `Margin.unchanged`. Its number of items is that
        of the smallest class, which may have all of the loss, times the number of classes; at most
        `items`. Classes without items are left out.
        """
        before = baseline.replicates
        losses = metric.cost(1.0) * (self.replicates - before)
        counts = np.array([items])
        if self.class_counts is not None:
            counts = self.class_counts
        counts = counts[counts > 0]

        # Without any change, the number of items decides
        known = statistics.drop_undefined(losses)
        unchanged = len(known) and not known.any()
        if metric.bounded and unchanged:
            smallest = int(counts.min())
            return Margin.unchanged(limit, min(len(counts) * smallest, items))

        # Otherwise, the spread of the excess over the limit decides
        allowed: float | Values = limit
        if not metric.bounded:  # a fraction of the baseline's value is as uncertain as that value
            allowed = limit * np.abs(before)
        excess = losses - allowed
        if metric.geometric and not unchanged:
            excess = excess / before  # hard items multiply both values alike
        margin = statistics.bootstrap_margin(excess, items, counts)
        if metric.bounded and len(known) and len(counts):
            effective = statistics.count_effective(items, counts)
            return margin.with_rare_losses(float(known.mean()), limit, effective)
        return margin

    def metrics(self, baseline: Self) -> Metrics:
        """Return the share of bootstrap samples without a value; empty if all have one.

        A sample lacks a value if the metric of the model or of the baseline is not finite.
        """
        share = float((~np.isfinite(self.replicates - baseline.replicates)).mean())
        if not share:
            return {}
        return {UNDEFINED: share}

    def arrays(self) -> dict[str, Array]:
        """Return the arrays that are not None, by name."""
        return {name: array for name, array in vars(self).items() if array is not None}


BOOTSTRAP = PairedTest("paired bootstrap", "95% percentile bootstrap intervals", Replicates.read)


@dataclass(frozen=True)
class BootstrapScores(OutputScores):
    """Scores whose metric is computed on all items and on bootstrap samples of them.

    Attributes:
        statistic: returns the metric of the items with the given indices.
        per_item: a value of each item [n], such as its error; None if no item has its own value.
        others: further metrics, by MLflow name.
        of_mean: `per_item` [n] of a network that always predicts the mean of the targets; None if
            the task does not use it.
        items: the number of items; None if each row of the outputs is an item.
    """

    statistic: Callable[[NDArray[np.int64]], float]
    resamples: int
    per_item: Values | None = None
    others: Metrics = field(default_factory=dict)
    of_mean: Values | None = None
    items: int | None = None

    @property
    def total(self) -> int:
        """The number of items."""
        if self.items is not None:
            return self.items
        return len(self.outputs)

    @cached_property
    def value(self) -> float:
        """The metric of all items."""
        return self.statistic(np.arange(self.total))

    @cached_property
    def per_sample(self) -> Replicates:
        """The metric of each bootstrap sample, and the value of each item if there is one."""
        replicates = statistics.bootstrap(self.statistic, self.total, self.resamples)
        return Replicates(replicates, self.per_item)

    def more(self) -> Metrics:
        """Return `others`."""
        return self.others


@dataclass(frozen=True)
class ReducedScores(BootstrapScores):
    """Scores of outputs that a `Reduction` has reduced."""

    def sqnr_db(self, baseline: Self) -> float | None:
        """Return the SQNR of the raw outputs in dB.

        The result is None if the SQNR is not finite, or without raw outputs of equal shapes.
        """
        if not self.outputs.has_raw_of(baseline.outputs):
            return None
        return distortion.sqnr_db(baseline.outputs.raw, self.outputs.raw)


def mean_of(per_item: Values) -> Callable[[NDArray[np.int64]], float]:
    """Return the metric that is the mean of the items' values."""
    return lambda chosen: float(per_item[chosen].mean())


def of_sums(
    measure: Callable[[NDArray[np.float64]], float], counts: NDArray[np.float64]
) -> Callable[[NDArray[np.int64]], float]:
    """Return the metric that `measure` computes from sums of the items' counts [n, k]."""
    return lambda chosen: measure(counts[chosen].sum(axis=0))


def ratio(sums: NDArray[np.float64]) -> float:
    """Return the first of two sums divided by the second; NaN if the second is 0."""
    if not sums[1]:
        return float("nan")
    return float(sums[0] / sums[1])
