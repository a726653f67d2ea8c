"""`task.join`: the samples of a group, such as the windows of a clip, are scored as one item."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.core.errors import DataError
from resnet8ptq.tasks.scoring.comparison import Scores
from resnet8ptq.tasks.scoring.outputs import Array, Outputs, Targets
from resnet8ptq.tasks.task import Joining, Score, Task

MEAN = "mean"
MAX = "max"
VOTE = "vote"


@dataclass(frozen=True)
class Groups:
    """The groups of n samples, in ascending order of their group numbers.

    Attributes:
        order: the indices of the samples, sorted by group [n].
        starts: the position of the first sample of each group in `order` [groups].
    """

    order: NDArray[np.int64]
    starts: NDArray[np.int64]

    @classmethod
    def of(cls, numbers: NDArray[np.int64]) -> "Groups":
        """Return the groups of samples with these group numbers [n]."""
        order = np.argsort(numbers, kind="stable")
        return cls(order, np.unique(numbers[order], return_index=True)[1])

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The number of samples in each group [groups]."""
        return np.diff(self.starts, append=len(self.order))

    def mean(self, values: Array) -> Array:
        """Return the mean [groups, ...] of the values [n, ...] of each group."""
        sums = np.add.reduceat(values[self.order].astype(np.float64), self.starts)
        return np.asarray(sums / self.sizes.reshape(-1, *[1] * (values.ndim - 1)))

    def max(self, values: Array) -> Array:
        """Return the maximum [groups, ...] of the values [n, ...] of each group."""
        return np.asarray(np.maximum.reduceat(values[self.order], self.starts))

    def common(self, labels: Array) -> Array:
        """Return the common label [groups, ...] of the labels [n, ...] of each group.

        Raises:
            DataError: the samples of a group have different labels.
        """
        first = labels[self.order[self.starts]]
        if (np.repeat(first, self.sizes, axis=0) != labels[self.order]).any():
            raise DataError("data.groups: a group has samples of several labels, expected one")
        return first


def join(task: Task, how: str) -> Task:
    """Return the task that scores the samples of a group as one item.

    The only target of an item is the label, because inputs, pictures and lengths belong to samples.
    The SQNR is still that of single samples. If the data have no groups, each sample is an item.

    Args:
        task: a task whose `joining` is not None.
        how: `mean`, `max` or `vote`, which is the mean of the samples' votes.
    """
    assert task.joining is not None
    score = partial(_score_groups, task.score, task.joining, how)
    return replace(task, score=score, scope=replace(task.scope, joins_groups=True))


def _score_groups(
    score: Score, joining: Joining, how: str, outputs: Outputs, targets: Targets
) -> Scores:
    if targets.groups is None:
        return score(outputs, targets)

    # Each group needs one label
    groups = Groups.of(targets.groups)
    labels = None
    if targets.labels is not None:
        labels = groups.common(np.asarray(targets.labels))

    # Reduce the values or votes of the samples to those of groups
    samples = joining.values(outputs, targets)
    values = samples.values
    if how == VOTE:
        assert joining.votes is not None
        values = tuple(map(joining.votes, values))
    reduce = groups.max if how == MAX else groups.mean
    joined = replace(samples, values=tuple(map(reduce, values)), raw=outputs.values)
    return score(joined, Targets(labels))
