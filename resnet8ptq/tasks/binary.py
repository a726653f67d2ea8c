"""`task=binary`: two classes, scored by the AUC and separated by a threshold."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from resnet8ptq.config.schema import BinaryConfig
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.tasks import classification
from resnet8ptq.tasks.classification import (
    ACCURACY,
    CONFUSION_CAPTION,
    CONFUSION_FILE,
    OfClasses,
)
from resnet8ptq.tasks.scoring.comparison import Comparison, summarize
from resnet8ptq.tasks.scoring.hits import Hits
from resnet8ptq.tasks.scoring.metric import Metric, Metrics
from resnet8ptq.tasks.scoring.outputs import (
    LOGITS,
    Array,
    Outputs,
    Targets,
    TaskContext,
    as_rows,
)
from resnet8ptq.tasks.scoring.ranking import AUC, DELONG, ROC_CAPTION, ROC_FILE, Ranking, doubt_auc
from resnet8ptq.tasks.scoring.values import Arrays
from resnet8ptq.tasks.task import Joining, Task, TaskFiles, TaskType

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class BinaryScores(OfClasses):
    """The AUC of class 1, and the classes at the threshold."""

    @cached_property
    def per_sample(self) -> Ranking:
        """The probability of class 1 for each sample [n], and the classes at the threshold."""
        hits = self.classes.per_sample
        return Ranking(self.classes.probabilities[:, 1], hits.labels, hits)

    @property
    def value(self) -> float:
        """The AUC."""
        return self.per_sample.auc.value

    def more(self) -> Metrics:
        """Return macro F1 and accuracy of the classes at the threshold."""
        return {**self.classes.more(), "accuracy": self.classes.value}


def build(class_names: tuple[str, ...] = (), threshold: float = 0.5) -> Task:
    """Return the task for a network with a value for each of two classes, or one for class 1."""
    return Task(
        "binary",
        AUC,
        partial(_score, threshold),
        replace(DELONG, read_values=_read),
        beside=(Metric(ACCURACY.name, ACCURACY.title, percent=True),),
        class_names=class_names,
        pair_metrics=partial(_pair_metrics, class_names),
        files=TaskFiles(
            arrays=classification.keep_probabilities,
            tables=partial(classification.class_tables, class_names),
            figures=partial(_draw, class_names),
            captions={ROC_FILE: ROC_CAPTION, CONFUSION_FILE: CONFUSION_CAPTION},
            answers=classification.answers,
        ),
        doubt=doubt_auc,
        joining=Joining(_to_probabilities, partial(_vote, threshold)),
        summary=partial(_summarize, threshold),
    )


def _score(threshold: float, outputs: Outputs, targets: Targets) -> BinaryScores:
    """Score one output value (a logit or a probability) or two output values of each sample."""
    scores = classification.score(_to_probabilities(outputs, targets), targets)
    return BinaryScores(replace(scores, threshold=threshold))


def _to_probabilities(outputs: Outputs, targets: Targets) -> Outputs:
    if as_rows(outputs.values[0]).shape[1] == 1:
        outputs = _as_two(outputs)
    return classification.to_probabilities(outputs)


def _vote(threshold: float, probabilities: Array) -> Array:
    second = probabilities[:, 1] > threshold
    return np.stack([~second, second], axis=1)


def _as_two(outputs: Outputs) -> Outputs:
    """Return one output value of each sample as values of two classes [n, 2]."""
    second = as_rows(outputs.values[0])
    first = 1 - second
    if outputs.final == LOGITS:  # a sigmoid equals the softmax of zero and the value
        first = np.zeros_like(second)
    return Outputs((np.concatenate([first, second], axis=1),), None, outputs.final)


def _read(arrays: Arrays, prefix: str) -> Ranking:
    return replace(Ranking.read(arrays, prefix), hits=Hits.read(arrays, prefix))


def _pair_metrics(names: Sequence[str], comparison: Comparison) -> Metrics:
    model = comparison.model.classes
    baseline = comparison.baseline.classes
    return {
        **classification.changes(comparison),
        "paired/accuracy_p_value": model.per_sample.against(baseline.per_sample)[1],
        **classification.class_metrics(names, comparison),
    }


def _summarize(threshold: float, comparison: Comparison) -> str:
    accuracy = comparison.model.classes.value
    return f"{summarize(comparison)}, {accuracy:.2%} correct above {threshold:g}"


def _draw(names: Sequence[str], comparison: Comparison, title: str) -> "dict[str, Figure]":
    from resnet8ptq.tasks.scoring import class_plots, roc_plot

    model = comparison.model
    baseline = comparison.baseline
    hits = model.classes.per_sample, baseline.classes.per_sample
    return {
        ROC_FILE: roc_plot.draw(model.per_sample, baseline.per_sample, title),
        CONFUSION_FILE: class_plots.confusion(*hits, names, title),
    }


def _make(config: BinaryConfig, context: TaskContext) -> Task:
    names = context.class_names
    if context.classes != 1:
        names = classification.check_classes("binary", context)

    # Both classes need samples, because the AUC compares them
    classification.check_label_of_each("binary", context, "two classes, 0 and 1")
    labels = np.unique(np.asarray(context.labels))
    if len(names) != 2 or labels.tolist() != [0, 1]:
        raise ConfigError(
            f"task=binary: {context.data} has {len(names)} classes, of which {len(labels)} have "
            "test samples; expected two, with samples of both"
        )
    return build(names, config.threshold)


BINARY = TaskType(
    make=_make,
    recall=lambda config, class_names: build(class_names, config.threshold),
    schema=BinaryConfig,
)
