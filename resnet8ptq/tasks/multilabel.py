"""`task=multilabel`: any number of labels for a sample, scored by mean average precision."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit  # scipy.stats takes a second to import

from resnet8ptq.config.schema import MultilabelConfig
from resnet8ptq.core.errors import ConfigError, ModelError
from resnet8ptq.tasks.scoring import distortion
from resnet8ptq.tasks.scoring.bootstrap import BOOTSTRAP
from resnet8ptq.tasks.scoring.classwise import (
    CLASSES,
    ClasswiseScores,
    count_lost,
    draw_classes,
    draw_weights,
    list_classes,
)
from resnet8ptq.tasks.scoring.comparison import doubt_below
from resnet8ptq.tasks.scoring.metric import Metric, Metrics
from resnet8ptq.tasks.scoring.outputs import (
    Array,
    Outputs,
    Targets,
    TaskContext,
    as_rows,
    check_labels,
    describe,
)
from resnet8ptq.tasks.scoring.ranking import place_nan
from resnet8ptq.tasks.scoring.statistics import Values
from resnet8ptq.tasks.task import Joining, Task, TaskFiles, TaskType

MAP = Metric("map", "mAP")
MACRO_F1 = Metric("macro_f1", "macro F1")
ROUNDED = 0.05  # quantized probabilities lie at most this far beyond 0 and 1


@dataclass(frozen=True)
class MultilabelScores(ClasswiseScores):
    """The outputs of one model, and labels [n, classes]: whether the sample has the class.

    Attributes:
        threshold: a class is predicted above this probability.
    """

    labels: NDArray[np.bool_]
    threshold: float
    resamples: int

    @cached_property
    def _precision(self) -> Callable[[NDArray[np.integer]], Values]:
        return rank(as_rows(self.outputs.values[0]), self.labels)

    @cached_property
    def of_class(self) -> Values:
        """The average precision of each class [classes]; NaN without samples of the class."""
        return self._precision(np.ones(self.total, np.int64))

    @cached_property
    def by_class(self) -> Values:
        """The average precision of each class on each bootstrap sample [resamples, classes]."""
        weights = draw_weights(self.total, self.resamples)
        return np.stack([self._precision(drawn) for drawn in weights])

    @property
    def samples_of_class(self) -> NDArray[np.int64]:
        """The number of samples of each class [classes]."""
        return self.labels.sum(axis=0)

    def more(self) -> Metrics:
        """Return the mean F1 of the classes at the threshold.

        A class without right predictions has an F1 of 0.
        """
        predicted = _to_probabilities(self.outputs).values[0] > self.threshold
        hits = (predicted & self.labels).sum(axis=0)
        named = predicted.sum(axis=0) + self.labels.sum(axis=0)
        return {MACRO_F1.name: float((2 * hits / np.maximum(named, 1)).mean())}

    def sqnr_db(self, baseline: "MultilabelScores") -> float | None:
        """Return the SQNR of the outputs in dB, see `distortion.sqnr_db`."""
        return distortion.sqnr_db(baseline.outputs.returned, self.outputs.returned)


def _to_probabilities(outputs: Outputs, targets: Targets | None = None) -> Outputs:
    """Return outputs with probabilities [n, classes] as values.

    If any value is more than `ROUNDED` outside of 0 to 1, the values are logits, which a sigmoid
    turns into probabilities.
    """
    values = as_rows(outputs.values[0])
    if ((values < -ROUNDED) | (values > 1 + ROUNDED)).any():  # false for NaN
        values = expit(values)
    return replace(outputs, values=(values,))


def _vote(threshold: float, probabilities: Array) -> Array:
    return np.asarray(probabilities > threshold)


def rank(
    scores: NDArray[np.floating], labels: NDArray[np.bool_]
) -> Callable[[NDArray[np.integer]], Values]:
    """Return a function from the weight of each sample [n] to the average precision [classes].

    The average precision is the mean precision at the samples of a class, in descending order of
    the score, without interpolation. Samples of equal scores are retrieved together. A class
    without samples has NaN. The scores are sorted only once, for all bootstrap samples.

    Args:
        scores, labels: [n, classes]; a score of NaN counts as wrong, see `place_nan`.
    """
    scores = place_nan(scores, labels)
    order = np.argsort(-scores, axis=0, kind="stable")
    ranked = np.take_along_axis(scores, order, axis=0)
    present = np.take_along_axis(labels, order, axis=0)

    # Samples with equal scores share the precision at the last of them
    rows = np.arange(len(scores))[:, np.newaxis]
    is_last = np.ones(scores.shape, np.bool_)
    is_last[:-1] = ranked[:-1] != ranked[1:]
    last = np.where(is_last, rows, len(scores))  # the last sample with an equal score
    last = np.minimum.accumulate(last[::-1], axis=0)[::-1]

    def measure(weights: NDArray[np.integer]) -> Values:
        drawn = weights[order]
        hits = drawn * present
        retrieved = np.cumsum(hits, axis=0)
        precision = retrieved / np.maximum(np.cumsum(drawn, axis=0), 1)
        gained = (hits * np.take_along_axis(precision, last, axis=0)).sum(axis=0)
        total = retrieved[-1]
        return np.divide(gained, total, out=np.full(len(total), np.nan), where=total > 0)

    return measure


def build(class_names: tuple[str, ...] = (), threshold: float = 0.5, resamples: int = 2000) -> Task:
    """Return `task=multilabel` with these settings."""
    return Task(
        "multilabel",
        MAP,
        partial(_score, threshold, resamples),
        BOOTSTRAP,
        beside=(MACRO_F1,),
        class_names=class_names,
        pair_metrics=count_lost,
        files=TaskFiles(
            tables=partial(list_classes, "ap", class_names),
            figures=partial(draw_classes, class_names),
            captions={CLASSES: "AP by class: those that changed most, beside FP32"},
        ),
        doubt=_doubt,
        joining=Joining(_to_probabilities, partial(_vote, threshold)),
    )


def _score(
    threshold: float, resamples: int, outputs: Outputs, targets: Targets
) -> MultilabelScores:
    return MultilabelScores(outputs, np.asarray(targets.labels), threshold, resamples)


def _doubt(baseline: MultilabelScores, expected: float | None) -> str | None:
    """Return a doubt if the 95% interval of the mAP is not above chance, or is below `expected`.

    Chance is the mAP of equal scores: the share of samples with a class, averaged over the classes
    that occur. An unknown interval (NaN) raises no doubt.
    """
    shares = baseline.labels.mean(axis=0)
    chance = float(shares[shares > 0].mean())
    interval = baseline.per_sample.interval
    shown = f"mAP {MAP.show(baseline.value)} (of equal scores {MAP.show(chance)})"
    if interval[0] <= chance:
        return f"NEAR CHANCE, {shown}"
    return doubt_below(shown, interval, expected)


def _make(config: MultilabelConfig, context: TaskContext) -> Task:
    expected = "a matrix [N, classes] of 0 and 1, or lists of classes"
    check_labels("multilabel", context, "b", expected)
    labels = np.asarray(context.labels)
    if context.classes != labels.shape[1]:
        raise ModelError(
            f"returns {describe(context.outputs)}; {context.data} has labels of "
            f"{labels.shape[1]} classes; expected one output with a value for each class"
        )

    # The average precision compares samples with and without a class
    if not (labels.any(axis=0) & ~labels.all(axis=0)).any():
        raise ConfigError(
            f"task=multilabel: no class of {context.data} has samples with and without it"
        )
    return build(context.class_names, config.threshold, config.resamples)


MULTILABEL = TaskType(
    make=_make,
    recall=lambda config, class_names: build((), config.threshold, config.resamples),
    schema=MultilabelConfig,
)
