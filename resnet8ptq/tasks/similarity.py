"""`task=similarity`: similarity of pairs of texts, scored by Spearman's and Pearson's correlation.

A cross-encoder scores a pair of texts, which is one sample, by one output value. A bi-encoder
embeds each text; the two samples of a group are scored by the cosine of their embeddings.
"""

import math
from collections.abc import Callable
from functools import partial
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import SimilarityConfig
from resnet8ptq.core.errors import ConfigError, DataError, ModelError
from resnet8ptq.tasks.joining import Groups
from resnet8ptq.tasks.scoring.bootstrap import BOOTSTRAP, BootstrapScores
from resnet8ptq.tasks.scoring.comparison import Scores, doubt_below
from resnet8ptq.tasks.scoring.metric import Metric
from resnet8ptq.tasks.scoring.outputs import (
    Array,
    Outputs,
    Targets,
    TaskContext,
    check_labels,
    describe,
)
from resnet8ptq.tasks.scoring.statistics import Values
from resnet8ptq.tasks.task import Scope, Task, TaskFiles, TaskType, keep_values

SPEARMAN = Metric("spearman", "Spearman")


def build(resamples: int = 9999, output: int = 0, embeds: bool = False) -> Task:
    """Return `task=similarity` with these settings.

    Args:
        output: the index of the output that is scored.
        embeds: whether the output is the embedding of one text; otherwise, it is a pair's score.
    """
    return Task(
        "similarity",
        SPEARMAN,
        partial(_score, resamples, output, embeds),
        BOOTSTRAP,
        beside=(Metric("pearson", "Pearson"),),
        scope=Scope(output=output, joins_groups=embeds),
        files=TaskFiles(arrays=partial(keep_values, attrgetter("per_item"))),
        doubt=_doubt,
    )


def _score(
    resamples: int, output: int, embeds: bool, outputs: Outputs, targets: Targets
) -> BootstrapScores:
    exact = np.asarray(targets.labels, np.float64)
    values = outputs.values[output].reshape(len(exact), -1).astype(np.float64)

    # Two embeddings give the score of a pair
    if embeds:
        pairs = pair_up(targets.groups)
        if (exact[pairs[:, 0]] != exact[pairs[:, 1]]).any():
            raise DataError("data.groups: a pair has two scores; expected one")
        values = cosine(values[pairs[:, 0]], values[pairs[:, 1]])
        exact = exact[pairs[:, 0]]
    predicted = values.reshape(-1)
    return BootstrapScores(
        outputs,
        _correlate_ranks(predicted, exact),
        resamples,
        predicted,
        {"pearson": correlate(predicted, exact)},
        items=len(exact),
    )


def pair_up(numbers: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Return the samples of each pair [pairs, 2]; samples without their partner are left out.

    A partner may be missing, because held-out samples leave out copies of test samples.

    >>> pair_up(np.array([4, 7, 4, 9, 7])).tolist()
    [[0, 2], [1, 4]]

    Raises:
        ConfigError: there are no groups.
        DataError: a group has more than two samples, or no group has two.
    """
    if numbers is None:
        raise ConfigError(
            "data.groups: got null, and the network embeds single texts; expected equal numbers "
            "for the two texts of a pair; for a table, try data.pairs=apart"
        )
    groups = Groups.of(numbers)
    largest = groups.sizes.max()
    if largest != 2:
        raise DataError(f"data.groups: got groups of {largest} samples, expected pairs")

    # Samples of a group are neighbours in the order
    first = groups.starts[groups.sizes == 2]
    return groups.order[np.stack([first, first + 1], axis=1)]


def cosine(one: Array, other: Array) -> NDArray[np.float64]:
    """Return the cosine of the angle between rows [n, d]; 0 if a row is zero."""
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return (one * other).sum(axis=1) / np.where(lengths == 0, 1, lengths)


def correlate(one: Array, other: Array) -> float:
    """Return Pearson's correlation of two arrays [n]; 0 if one of them is constant."""
    left = one - one.mean()
    right = other - other.mean()
    spread = math.sqrt((left @ left) * (right @ right))
    if not spread:
        return 0.0
    return float(left @ right) / spread


def _correlate_ranks(one: Values, other: Values) -> Callable[[NDArray[np.int64]], float]:
    """Return a function from item indices to Spearman's correlation; ties share their mean rank.

    Values are sorted only once, so a bootstrap sample needs only counts.
    """
    ranks = np.unique(one, return_inverse=True)[1]
    other_ranks = np.unique(other, return_inverse=True)[1]

    def correlate_chosen(chosen: NDArray[np.int64]) -> float:
        return correlate(_rank_again(ranks[chosen]), _rank_again(other_ranks[chosen]))

    return correlate_chosen


def _rank_again(ranks: NDArray[np.int64]) -> Values:
    """Return ranks [n] among the chosen items, from their ranks among all; ties share the mean."""
    counts = np.bincount(ranks)
    return (np.cumsum(counts) - (counts - 1) / 2)[ranks]


def _doubt(baseline: Scores, expected: float | None) -> str | None:
    """Return a doubt if the correlation is not proven above 0, or is proven below `expected`."""
    shown = f"Spearman {baseline.value:.4f}"
    interval = baseline.per_sample.interval
    if interval[0] <= 0:
        return f"NEAR ZERO, {shown}"
    return doubt_below(shown, interval, expected)


def _make(config: SimilarityConfig, context: TaskContext) -> Task:
    check_labels("similarity", context, "fiu", "a score for each pair [N]")
    labels = np.asarray(context.labels)
    if labels.ndim > 1:
        raise ConfigError(
            f"task=similarity: the labels of {context.data} are {list(labels.shape)}, expected a "
            "score for each pair [N]"
        )

    # Further outputs may be values of each token, with two axes
    flat = [number for number, shape in enumerate(context.outputs.values()) if len(shape) < 2]
    if len(flat) != 1:
        raise ModelError(
            f"returns {describe(context.outputs)}; task=similarity takes one output with a score "
            "[1] of each pair, or the embedding [width] of each text"
        )
    [output] = flat
    shape = list(context.outputs.values())[output]
    return build(config.resamples, output, embeds=shape not in ((), (1,)))


SIMILARITY = TaskType(
    make=_make, recall=lambda config, class_names: build(config.resamples), schema=SimilarityConfig
)
