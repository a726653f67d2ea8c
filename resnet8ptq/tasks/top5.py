"""`task=top5`: the share of samples whose class is among the five largest outputs."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from resnet8ptq.core.errors import ConfigError
from resnet8ptq.tasks.classification import check_classes
from resnet8ptq.tasks.scoring.comparison import OutputScores, doubt_below
from resnet8ptq.tasks.scoring.hits import MCNEMAR, Hits, Labels
from resnet8ptq.tasks.scoring.metric import Metric
from resnet8ptq.tasks.scoring.outputs import Array, Outputs, Targets, TaskContext, as_rows
from resnet8ptq.tasks.task import Task, TaskType

TOP = 5
TOP5_ACCURACY = Metric("top5_accuracy", "top-5 accuracy", percent=True)


@dataclass(frozen=True)
class Top5Scores(OutputScores):
    """The outputs of one model, and labels [n]."""

    labels: Labels

    @property
    def rows(self) -> Array:
        """The output values [n, classes]."""
        [values] = self.outputs.values
        return as_rows(values)

    @cached_property
    def per_sample(self) -> Hits:
        """The label if it is among the top 5, else the top class; of ties, the first counts."""
        best = np.argsort(-self.rows, axis=1, kind="stable")[:, :TOP]
        right = (best == self.labels[:, np.newaxis]).any(axis=1)
        return Hits(np.where(right, self.labels, best[:, 0]), self.labels)

    @property
    def value(self) -> float:
        """The top-5 accuracy, a fraction."""
        return float(self.per_sample.right.mean())


def _score(outputs: Outputs, targets: Targets) -> Top5Scores:
    return Top5Scores(outputs, np.asarray(targets.labels))


def _doubt(baseline: Top5Scores, expected: float | None) -> str | None:
    """Return a doubt if the accuracy is not proven above chance, or is proven below `expected`."""
    interval = baseline.per_sample.interval
    shown = TOP5_ACCURACY.show(baseline.value)
    if interval[0] <= TOP / baseline.rows.shape[1]:
        return f"NEAR CHANCE, {shown}"
    return doubt_below(shown, interval, expected)


def build(class_names: tuple[str, ...] = ()) -> Task:
    """Return the task for these classes."""
    return Task("top5", TOP5_ACCURACY, _score, MCNEMAR, class_names=class_names, doubt=_doubt)


def _make(context: TaskContext) -> Task:
    names = check_classes("top5", context)
    if len(names) <= TOP:
        raise ConfigError(f"task=top5: {context.data} has {len(names)} classes, expected 6 or more")
    return build(names)


TOP5 = TaskType(
    make=lambda config, context: _make(context), recall=lambda config, names: build(names)
)
