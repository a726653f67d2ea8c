"""Scores with a metric for each class, such as AP, IoU or F1, and a bootstrap over the samples."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr  # scipy.stats takes a second to import

from resnet8ptq.tasks.scoring import distortion, statistics
from resnet8ptq.tasks.scoring.bootstrap import Replicates
from resnet8ptq.tasks.scoring.comparison import Comparison, OutputScores
from resnet8ptq.tasks.scoring.metric import Metrics
from resnet8ptq.tasks.scoring.statistics import SIGNIFICANCE, Values, holm
from resnet8ptq.tasks.task import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLASSES = "classes.png"
ENOUGH = 10  # least number of samples with a class for a test of the class


@dataclass(frozen=True)
class ClasswiseScores(OutputScores):
    """Scores with a metric for each class; by default, the primary metric is the mean of these."""

    @property
    def value(self) -> float:
        """The mean of `of_class` over the classes that have a value."""
        return float(np.nanmean(self.of_class))

    @property
    @abstractmethod
    def of_class(self) -> Values:
        """The metric of each class [classes]; NaN if no sample has the class."""

    @property
    @abstractmethod
    def by_class(self) -> Values:
        """The metric of each class on each bootstrap sample [resamples, classes]."""

    @property
    @abstractmethod
    def samples_of_class(self) -> NDArray[np.int64]:
        """The number of samples with each class [classes], such as pictures with its objects."""

    @cached_property
    def per_sample(self) -> Replicates:
        """The metric of each bootstrap sample [resamples], shifted so that their mean is `value`.

        A bootstrap sample has fewer distinct samples and may lack classes, which changes the mean.
        """
        replicates = mean_of(self.by_class)
        shifted = np.asarray(replicates - np.nanmean(replicates) + self.value)
        return Replicates(shifted, class_counts=self.samples_of_class)

    def sqnr_db(self, baseline: Self) -> float | None:
        """Return the SQNR of the raw outputs in dB.

        The result is None if the SQNR is not finite, or without raw outputs of equal shapes.
        """
        if not self.outputs.has_raw_of(baseline.outputs):
            return None
        return distortion.sqnr_db(baseline.outputs.raw, self.outputs.raw)


def mean_of(classes: Values) -> Values:
    """Return the mean over classes [times] of values [times, classes], without those that are NaN.

    The mean is NaN if all values are.
    """
    defined = ~np.isnan(classes)
    total = np.where(defined, classes, 0).sum(axis=1)
    return np.divide(
        total, defined.sum(axis=1), out=np.full(len(classes), np.nan), where=defined.any(1)
    )


def draw_weights(pictures: int, times: int) -> NDArray[np.int32]:
    """Return how often each bootstrap sample draws each picture or other item [times, pictures]."""
    weights = np.zeros((times, pictures), np.int32)
    for row, chosen in zip(weights, statistics.resample(pictures, times), strict=True):
        row += np.bincount(chosen, minlength=pictures).astype(np.int32)
    return weights


@dataclass(frozen=True)
class ClassChanges:
    """The change of the metric of each class against the baseline.

    Attributes:
        deltas: the metric minus that of the baseline [classes]; NaN if no sample has the class.
        p_values: p-values [classes], corrected for the number of tested classes (Holm); NaN for
            classes in fewer than `ENOUGH` samples.
    """

    deltas: Values
    p_values: Values

    @classmethod
    def of(cls, model: ClasswiseScores, baseline: ClasswiseScores) -> Self:
        """Return the changes from the baseline, tested for classes in at least `ENOUGH` samples.

        The test uses the normal distribution with the bootstrap's standard error (Efron and
        Tibshirani, An Introduction to the Bootstrap, 1993). With many classes, a p-value from
        counted bootstrap samples would never be small enough after the correction.
        """
        deltas = np.asarray(model.of_class - baseline.of_class)
        differences = model.by_class - baseline.by_class
        p_values = np.full(differences.shape[1], np.nan)
        tested = np.flatnonzero(baseline.samples_of_class >= ENOUGH)
        errors = np.nanstd(differences[:, tested], axis=0, ddof=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            scores = np.where(deltas[tested] == 0, 0, np.abs(deltas[tested]) / errors)
        p_values[tested] = holm(2 * ndtr(-scores))
        return cls(deltas, p_values)

    @property
    def lost(self) -> NDArray[np.int64]:
        """The classes with a metric that is significantly worse than in FP32."""
        return np.flatnonzero((self.p_values < SIGNIFICANCE) & (self.deltas < 0))


def count_lost(comparison: Comparison) -> Metrics:
    """Return the SQNR, and the number of classes that are significantly worse than in FP32."""
    lost = ClassChanges.of(comparison.model, comparison.baseline).lost
    return {"sqnr_db": comparison.sqnr_db, "paired/classes_lost": len(lost)}


def list_classes(metric: str, names: Sequence[str], comparison: Comparison) -> dict[str, Table]:
    """Return the rows of `per_class.csv`, under its file name."""
    model = comparison.model
    baseline = comparison.baseline
    changes = ClassChanges.of(model, baseline)

    # Turn the columns into rows
    columns = (
        names,
        baseline.samples_of_class.tolist(),
        model.of_class,
        baseline.of_class,
        changes.deltas,
        changes.p_values,
    )
    rows: list[list[object]] = [
        ["class", "pictures", metric, f"baseline_{metric}", "delta", "p_value_holm"]
    ]
    for name, *values in zip(*columns, strict=True):
        rows.append([name, *map(_as_cell, values)])
    return {"per_class.csv": rows}


def _as_cell(value: float) -> object:
    """Return a number for a table; an empty text for NaN."""
    return "" if math.isnan(value) else value


def draw_classes(names: Sequence[str], comparison: Comparison, title: str) -> "dict[str, Figure]":
    """Return the figure of the metric by class, under its file name."""
    from resnet8ptq.tasks.scoring import classwise_plot

    return {CLASSES: classwise_plot.draw(comparison, names, title)}
