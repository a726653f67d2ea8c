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


def place_nan(scores: NDArray[np.floating], positive: NDArray[np.bool_]) -> NDArray[np.floating]:
    """Return scores [n, ...] in which NaN ranks as wrong: a positive lowest, a negative highest.

    A sort would put NaN at one end, where a network that overflows may seem to be right.

    Args:
        positive: whether each score is that of a positive [n, ...].
    """
    wrong = np.where(positive, -np.inf, np.inf)
    return np.where(np.isnan(scores), wrong, scores)


@dataclass(frozen=True)
class Ranking(SampleValues):
    """Scores [n] of one model, and labels [n], where 1 is positive.

    Attributes:
        hits: the classes that a threshold predicts; None without a threshold, and after `read` or
            `select`.
    """

    scores: NDArray[np.floating]
    labels: NDArray[np.int64]
    hits: Hits | None = None

    shared: ClassVar[tuple[str, ...]] = ("labels",)

    @classmethod
    def read(cls, arrays: Arrays, prefix: str = "") -> Self:
        """Read the arrays that `Paired.arrays` returned, see `PairedTest.read_values`.

        Raises:
            KeyError: an array is missing.
            ValueError: an array is not of one number for each item, or the labels are not 0 and 1,
                each at least once.
        """
        ranking = cls(arrays[f"{prefix}scores"], arrays["labels"])
        check_columns([ranking.scores], "f")
        check_columns([ranking.labels], "i")
        if ranking.labels.shape != ranking.scores.shape or set(ranking.labels.tolist()) != {0, 1}:
            raise ValueError("not a label of 0 or 1 for each item")
        return ranking

    @cached_property
    def ranked(self) -> NDArray[np.floating]:
        """The scores by which the items are ranked, see `place_nan`."""
        return place_nan(self.scores, self.labels == 1)

    @cached_property
    def auc(self) -> Auc:
        """The area under the ROC curve; a tie counts half, and NaN as wrong."""
        return auc(self.ranked, self.labels == 1)

    @property
    def interval(self) -> Interval:
        """95% interval of the AUC by DeLong's variance."""
        return self.auc.interval

    def against(self, other: Self) -> tuple[Interval, float]:
        """Return the interval of the difference in AUC, and the p-value of DeLong's test."""
        return delong(self.auc, other.auc)

    def margin(self, baseline: Self, metric: Metric, limit: float, items: int) -> Margin:
        """Return the margin of the loss in AUC, with DeLong's standard error.

        The error is 0 if every positive is above the same negatives as in FP32. The margin is then
        that of `Margin.unchanged`. Its items are disjoint pairs of a positive and a negative, one
        for each sample of the rarer label. Otherwise, the test is corrected for skewness and rare
        losses, as few samples may have most of the loss.
        """
        rarer = min(len(self.auc.of_positives), len(self.auc.of_negatives))
        error = delong_error(self.auc, baseline.auc)
        if error == 0 and self.auc.value == baseline.auc.value:
            return Margin.unchanged(limit, rarer)

        # The skewness of an item, from that of the mean
        loss = baseline.auc.value - self.auc.value
        skewness = delong_skewness(baseline.auc, self.auc) * math.sqrt(rarer)
        margin = Margin.student(loss - limit, error, rarer, skewness)
        return margin.with_rare_losses(loss, limit, rarer)

    def select(self, rows: NDArray[np.bool_]) -> Self | None:
        """Return the scores of the samples in a mask; None without both labels among them.

        The result is also None for a mask of another length.
        """
        if len(rows) != len(self.labels) or len(set(self.labels[rows].tolist())) < 2:
            return None
        return replace(self, scores=self.scores[rows], labels=self.labels[rows], hits=None)

    def by_class(self, baseline: Self, classes: int) -> list[float]:
        """Return McNemar's p-value for the hits of each class; empty without `hits`."""
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
    """Return a doubt if FP32's AUC is not proven above chance, or is proven below `expected`."""
    ranking = baseline.per_sample
    assert isinstance(ranking, Ranking)  # both tasks with an AUC use it
    shown = f"AUC {baseline.value:.4f}"
    if ranking.auc.least <= CHANCE:
        return f"NEAR CHANCE, {shown}"
    return doubt_below(shown, ranking.interval, expected)
