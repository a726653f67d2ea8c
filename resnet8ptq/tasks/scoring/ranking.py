"""Scores that rank positives above negatives, whose AUCs are compared by DeLong's test."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.tasks.scoring.comparison import Scores, doubt_below
from resnet8ptq.tasks.scoring.hits import Hits
from resnet8ptq.tasks.scoring.metric import Metric
from resnet8ptq.tasks.scoring.outputs import Array
from resnet8ptq.tasks.scoring.statistics import (
    Auc,
    Interval,
    Margin,
    auc,
    delong,
    delong_error,
    delong_skewness,
)
from resnet8ptq.tasks.scoring.values import Arrays, PairedTest, SampleValues, check_columns

AUC = Metric("auc", "AUC")
ROC_FILE = "roc.png"
ROC_CAPTION = "ROC curve, beside FP32's"
CHANCE = 0.5  # the AUC of random scores


@dataclass(frozen=True)
class Ranking(SampleValues):
    """Scores [n] of one model, and labels [n], where 1 is positive.

    Attributes:
        hits: classes by a threshold; None without a threshold.
    """

    scores: NDArray[np.floating]
    labels: NDArray[np.int64]
    hits: Hits | None = None

    shared: ClassVar[tuple[str, ...]] = ("labels",)

    @classmethod
    def read(cls, arrays: Arrays, prefix: str = "") -> Self:
        """Read the arrays that `Paired.arrays` returned, see `PairedTest.read_values`.

        Raises:
            KeyError, ValueError: an array is missing or damaged.
        """
        ranking = cls(arrays[f"{prefix}scores"], arrays["labels"])
        check_columns([ranking.scores], "f")
        check_columns([ranking.labels], "i")
        if ranking.labels.shape != ranking.scores.shape or set(ranking.labels.tolist()) != {0, 1}:
            raise ValueError("not a label of 0 or 1 for each item")
        return ranking

    @cached_property
    def auc(self) -> Auc:
        """The area under the ROC curve; a tie counts half."""
        return auc(self.scores, self.labels == 1)

    @property
    def interval(self) -> Interval:
        """95% interval of the AUC by DeLong's variance."""
        return self.auc.interval

    def against(self, other: Self) -> tuple[Interval, float]:
        """Return the interval of the difference in AUC, and the p-value of DeLong's test."""
        return delong(self.auc, other.auc)

    def margin(self, baseline: Self, metric: Metric, limit: float, items: int) -> Margin:
        """Return the margin of the AUC, from DeLong's covariance.

        The variance is 0 if every positive is above the same negatives as before. The margin then
        counts disjoint pairs of a positive and a negative, one for each item of the rarer label. As
        few items may have most of the loss, the test is corrected for skewness.
        """
        rarer = min(len(self.auc.of_positives), len(self.auc.of_negatives))
        error = delong_error(self.auc, baseline.auc)
        if error == 0 and self.auc.value == baseline.auc.value:
            return Margin.unchanged(limit, rarer)
        loss = baseline.auc.value - self.auc.value
        # Skewness of each item
        skewness = delong_skewness(baseline.auc, self.auc) * math.sqrt(rarer)
        margin = Margin.student(loss - limit, error, rarer, skewness)
        return margin.with_rare_losses(loss, limit, rarer)

    def select(self, rows: NDArray[np.bool_]) -> Self | None:
        """Return the scores of some samples; None unless both labels are among them."""
        if len(rows) != len(self.labels) or len(set(self.labels[rows].tolist())) < 2:
            return None
        return replace(self, scores=self.scores[rows], labels=self.labels[rows], hits=None)

    def by_class(self, baseline: Self, classes: int) -> list[float]:
        """Return the p-value of the hits of each class; empty without a threshold."""
        if self.hits is None or baseline.hits is None:
            return []
        return self.hits.by_class(baseline.hits, classes)

    def arrays(self) -> dict[str, Array]:
        """Return scores and labels, and predictions if there are any."""
        arrays: dict[str, Array] = {}
        if self.hits is not None:
            arrays = self.hits.arrays()
        return {**arrays, "scores": self.scores, "labels": self.labels}


DELONG = PairedTest("DeLong's test (1988)", "95%, by DeLong's variance", Ranking.read)


def doubt_auc(baseline: Scores, expected: float | None) -> str | None:
    """Return a doubt if an AUC is not significantly above chance, or is below `expected`."""
    ranking = baseline.per_sample
    assert isinstance(ranking, Ranking)  # both tasks with an AUC use it
    shown = f"AUC {baseline.value:.4f}"
    if ranking.auc.least <= CHANCE:
        return f"NEAR CHANCE, {shown}"
    return doubt_below(shown, ranking.interval, expected)
