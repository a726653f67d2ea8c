"""Predicted classes; McNemar's test compares which of them are right."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.tasks.scoring import statistics
from resnet8ptq.tasks.scoring.metric import Metric
from resnet8ptq.tasks.scoring.outputs import Array
from resnet8ptq.tasks.scoring.statistics import Interval, Margin, Values
from resnet8ptq.tasks.scoring.values import Arrays, PairedTest, SampleValues, check_columns

Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Hits(SampleValues):
    """Predicted classes [n] of one model, and labels [n]."""

    predictions: Labels
    labels: Labels

    shared: ClassVar[tuple[str, ...]] = ("labels",)

    @classmethod
    def read(cls, arrays: Arrays, prefix: str = "", labels: str = "labels") -> Self:
        """Read the arrays that `Paired.arrays` returned, see `PairedTest.read_values`.

        Args:
            labels: the name of the array of labels.
        """
        predictions = arrays[f"{prefix}predictions"]
        true = arrays[labels]
        check_columns([predictions, true], "i")
        return cls(predictions, true)

    @cached_property
    def right(self) -> NDArray[np.bool_]:
        """Whether each prediction is right [n]."""
        return self.predictions == self.labels

    @property
    def interval(self) -> Interval:
        """95% Wilson score interval of the accuracy."""
        return statistics.wilson(int(self.right.sum()), len(self.right))

    def against(self, other: Self) -> tuple[Interval, float]:
        """Return Tango's interval of the difference and the p-value of the exact McNemar test."""
        lost, won, _ = self.changes(other)
        return statistics.tango_interval(self.right, other.right), statistics.mcnemar(lost, won)

    def margin(self, baseline: Self, metric: Metric, limit: float, items: int) -> Margin:
        """Return Tango's margin of the loss in accuracy."""
        return statistics.tango(*self.changes(baseline), limit)

    def select(self, rows: NDArray[np.bool_]) -> Self | None:
        """Return the hits of the samples in a mask; None for a mask of another length."""
        if len(rows) != len(self.labels):
            return None
        return replace(self, predictions=self.predictions[rows], labels=self.labels[rows])

    def changes(self, baseline: Self) -> tuple[int, int, int]:
        """Return the numbers of lost, won and all samples."""
        won, lost = statistics.flips(self.right, baseline.right)
        return lost, won, len(self.right)

    def losses(self, baseline: Self) -> Values:
        """Return the loss of each sample [n].

        The loss is 1 if only the baseline is right, -1 if only this model is right, and 0
        otherwise.
        """
        return baseline.right.astype(np.float64) - self.right

    def by_class(self, baseline: Self, classes: int) -> list[float]:
        """Return the p-value of the exact McNemar test for the samples of each class."""
        p_values = []
        for label in range(classes):
            members = self.labels == label
            won, lost = statistics.flips(self.right[members], baseline.right[members])
            p_values.append(statistics.mcnemar(won, lost))
        return p_values

    def found_by_class(self, baseline: Self, classes: int, level: float) -> list[float]:
        """Return, for each class with samples, the smallest loss that the test is likely to detect.

        See `statistics.least_found`.
        """
        flipped = self.right != baseline.right
        losses = []
        for label in range(classes):
            members = self.labels == label
            total = int(members.sum())
            if total:
                changed = int(flipped[members].sum())
                losses.append(statistics.least_found(changed, total, level))
        return losses

    def confusion(self, classes: int) -> NDArray[np.int64]:
        """Count samples by [true class, predicted class]."""
        cells = self.labels.astype(np.int64) * classes + self.predictions
        return np.bincount(cells, minlength=classes**2).reshape(classes, classes)

    def arrays(self) -> dict[str, Array]:
        """Return predictions and labels."""
        return {"predictions": self.predictions, "labels": self.labels}


MCNEMAR = PairedTest(
    "exact McNemar test",
    "95% Wilson score intervals; for differences, Tango's score intervals (1998), corrected for "
    "continuity",
    Hits.read,
    sequential=True,
)
