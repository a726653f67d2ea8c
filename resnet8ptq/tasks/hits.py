"""Predicted classes: their hits are compared by McNemar's test."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.tasks.contract import (
    Array,
    Arrays,
    Metric,
    PairedTest,
    SampleValues,
    check_columns,
)
from resnet8ptq.tasks.statistics import (
    Interval,
    Margin,
    Values,
    flips,
    least_found,
    mcnemar,
    tango,
    tango_interval,
    wilson,
)

Labels = NDArray[np.int64]


def count_confusion(labels: Labels, predictions: Labels, classes: int) -> NDArray[np.int64]:
    """Count images by [true class, predicted class]."""
    cells = labels.astype(np.int64) * classes + predictions
    return np.bincount(cells, minlength=classes**2).reshape(classes, classes)


@dataclass(frozen=True)
class Hits(SampleValues):
    """Predicted classes [n] of one model, and labels [n]."""

    predictions: Labels
    labels: Labels

    shared: ClassVar[tuple[str, ...]] = ("labels",)

    @classmethod
    def read(cls, arrays: Arrays, prefix: str = "", labels: str = "labels") -> Self:
        """Read the arrays that `Paired.arrays` returned, see `PairedTest.read_values`."""
        columns = [arrays[f"{prefix}predictions"], arrays[labels]]
        check_columns(columns, "i")
        return cls(*columns)

    @cached_property
    def right(self) -> NDArray[np.bool_]:
        """Whether each prediction is right [n]."""
        return self.predictions == self.labels

    @property
    def interval(self) -> Interval:
        """95% Wilson score interval of the accuracy."""
        return wilson(int(self.right.sum()), len(self.right))

    def against(self, other: Self) -> tuple[Interval, float]:
        """Return Tango's interval of the difference and the p-value of the exact McNemar test."""
        return tango_interval(self.right, other.right), mcnemar(self.right, other.right)

    def margin(self, baseline: Self, metric: Metric, drop: float, items: int) -> Margin:
        """Return Tango's margin of the accuracy."""
        won, lost = flips(self.right, baseline.right)
        return tango(lost, won, len(self.right), drop)

    def losses(self, baseline: Self) -> Values:
        """Return 1 for each sample that only the baseline gets right, -1 for the opposite [n]."""
        return baseline.right.astype(np.float64) - self.right

    def by_class(self, baseline: Self, classes: int) -> list[float]:
        """Return the p-value of the exact McNemar test on the samples of each class."""
        members = (self.labels == label for label in range(classes))
        return [mcnemar(self.right[m], baseline.right[m]) for m in members]

    def found_by_class(self, baseline: Self, classes: int, level: float) -> list[float]:
        """Return the loss on each class that the test would find, see `least_found`."""
        members = [members for label in range(classes) if (members := self.labels == label).any()]
        flipped = self.right != baseline.right
        return [least_found(int(flipped[m].sum()), int(m.sum()), level) for m in members]

    def confusion(self, classes: int) -> NDArray[np.int64]:
        """Count images by [true class, predicted class]."""
        return count_confusion(self.labels, self.predictions, classes)

    def arrays(self) -> dict[str, Array]:
        """Return predictions and labels."""
        return {"predictions": self.predictions, "labels": self.labels}


MCNEMAR = PairedTest(
    "exact McNemar test",
    "95% Wilson score intervals; of a difference, Tango's score intervals (1998), corrected for "
    "continuity",
    Hits.read,
)
