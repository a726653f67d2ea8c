"""Predicted classes, whose hits are compared by McNemar's test."""

from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.tasks import statistics
from resnet8ptq.tasks.contract import (
    Array,
    Arrays,
    Metric,
    PairedTest,
    SampleValues,
    check_columns,
)
from resnet8ptq.tasks.sequential import StoppingPlan
from resnet8ptq.tasks.statistics import UNKNOWN, Interval, Margin, Values

Labels = NDArray[np.int64]
MOST, LEAST = 2**40, 1e-9  # samples and level of a plan that is read back


@dataclass(frozen=True)
class Hits(SampleValues):
    """Predicted classes [n] of one model, and labels [n].

    Attributes:
        plan: the plan of the sequential test that ended with these samples; None if all were
            scored.
    """

    predictions: Labels
    labels: Labels
    plan: StoppingPlan | None = None

    shared: ClassVar[tuple[str, ...]] = ("labels",)

    @classmethod
    def read(cls, arrays: Arrays, prefix: str = "", labels: str = "labels") -> Self:
        """Read the arrays that `Paired.arrays` returned, see `PairedTest.read_values`."""
        predictions, true = arrays[f"{prefix}predictions"], arrays[labels]
        check_columns([predictions, true], "i")
        planned = "plan" in arrays and not prefix
        plan = _read_plan(arrays["plan"], len(true)) if planned else None
        return cls(predictions, true, plan)

    @cached_property
    def right(self) -> NDArray[np.bool_]:
        """Whether each prediction is right [n]."""
        return self.predictions == self.labels

    @property
    def interval(self) -> Interval:
        """95% Wilson score interval of the accuracy."""
        return statistics.wilson(int(self.right.sum()), len(self.right))

    def against(self, other: Self) -> tuple[Interval, float]:
        """Return Tango's interval of the difference and the p-value of the exact McNemar test.

        With a plan, both use its stage-wise ordering, which corrects for the interim looks.
        """
        if self.plan is not None:
            low, high = self.plan.interval(*self.changes(other))
            equal = self.plan.margin(*self.changes(other), 0.0)
            return (-high, -low), min(1.0, 2 * min(equal.p_within, equal.p_beyond))
        lost, won, _ = self.changes(other)
        return statistics.tango_interval(self.right, other.right), statistics.mcnemar(lost, won)

    def margin(self, baseline: Self, metric: Metric, drop: float, items: int) -> Margin:
        """Return Tango's margin of the accuracy; with a plan, corrected for the interim looks."""
        margin = statistics.tango if self.plan is None else self.plan.margin
        return margin(*self.changes(baseline), drop)

    def margin_over(self, other: Self, metric: Metric, drop: float, items: int) -> Margin:
        """Return Tango's margin; unknown with a plan, which only corrects the loss against FP32."""
        if self.plan is not None or other.plan is not None:
            return UNKNOWN
        return self.margin(other, metric, drop, items)

    def select(self, rows: NDArray[np.bool_]) -> Self | None:
        """Return the hits of some samples; None with a plan, whose looks covered all of them."""
        if self.plan is not None or len(rows) != len(self.labels):
            return None
        return replace(self, predictions=self.predictions[rows], labels=self.labels[rows])

    def changes(self, baseline: Self) -> tuple[int, int, int]:
        """Return the numbers of lost, won and all samples."""
        won, lost = statistics.flips(self.right, baseline.right)
        return lost, won, len(self.right)

    def losses(self, baseline: Self) -> Values:
        """Return 1 for each sample that only the baseline gets right, -1 for the opposite [n]."""
        return baseline.right.astype(np.float64) - self.right

    def by_class(self, baseline: Self, classes: int) -> list[float]:
        """Return the p-value of the exact McNemar test on the samples of each class.

        With a plan it is 1, because the plan does not correct tests of single classes.
        """
        if self.plan is not None:
            return [1.0] * classes
        members = (self.labels == label for label in range(classes))
        pairs = (statistics.flips(self.right[m], baseline.right[m]) for m in members)
        return [statistics.mcnemar(*pair) for pair in pairs]

    def found_by_class(self, baseline: Self, classes: int, level: float) -> list[float]:
        """Return the loss on each class that the test detects, see `least_found`."""
        members = [members for label in range(classes) if (members := self.labels == label).any()]
        flipped = self.right != baseline.right
        return [statistics.least_found(int(flipped[m].sum()), int(m.sum()), level) for m in members]

    def confusion(self, classes: int) -> NDArray[np.int64]:
        """Count images by [true class, predicted class]."""
        cells = self.labels.astype(np.int64) * classes + self.predictions
        return np.bincount(cells, minlength=classes**2).reshape(classes, classes)

    def arrays(self) -> dict[str, Array]:
        """Return predictions, labels, and the plan, if any."""
        plan = {} if self.plan is None else {"plan": np.array(astuple(self.plan), np.float64)}
        return {"predictions": self.predictions, "labels": self.labels, **plan}


def _read_plan(array: Array, seen: int) -> StoppingPlan:
    """Return the plan that `Hits.arrays` wrote; raise ValueError for another array."""
    if array.shape != (3,) or array.dtype != np.float64 or not np.isfinite(array).all():
        raise ValueError("not a plan")
    total, limit, level = array.tolist()
    plan = StoppingPlan(int(total), limit, level)
    if not 0 < total <= MOST or not abs(limit) < 1 or not LEAST <= level < 0.5:
        raise ValueError("not a plan")
    if seen not in plan.ends:
        raise ValueError("not the samples of a look of its plan")
    return plan


MCNEMAR = PairedTest(
    "exact McNemar test",
    "95% Wilson score intervals; for differences, Tango's score intervals (1998), corrected for "
    "continuity",
    Hits.read,
    sequential=True,
)
