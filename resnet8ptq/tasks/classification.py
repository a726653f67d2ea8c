"""`task=classification`: the top-1 class of each sample. Other tasks use its functions."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.core.errors import ModelError
from resnet8ptq.tasks.scoring import distortion
from resnet8ptq.tasks.scoring.comparison import Comparison, Scores, doubt_below
from resnet8ptq.tasks.scoring.hits import MCNEMAR, Hits, Labels
from resnet8ptq.tasks.scoring.metric import DIGITS, Metric, Metrics
from resnet8ptq.tasks.scoring.outputs import (
    LOGITS,
    Array,
    Outputs,
    Targets,
    TaskContext,
    as_rows,
    check_labels,
    count_scores,
    describe,
)
from resnet8ptq.tasks.scoring.statistics import (
    LEAST_KAPPA,
    SIGNIFICANCE,
    above_chance,
    flips,
    kappa,
)
from resnet8ptq.tasks.task import Joining, Table, Task, TaskFiles, TaskType

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Probabilities = NDArray[np.float32]

TOP = 5
ACCURACY = Metric(
    "accuracy", "accuracy", percent=True, fair="expected_accuracy", least="min_accuracy"
)
KL = Metric("kl_divergence", "KL", maximize=False, bounded=False)
# Half the step 1/256 of an 8-bit softmax, whose zeros stand for any smaller value. With more than
# 256 classes, half of a uniform probability.
KL_EPSILON = 1 / 512
MAX_NAME = 100  # characters of a class in the name of a metric; MLflow takes 250 in all
CONFUSION_FILE = "confusion.png"
CONFUSION_CAPTION = "Confusion matrix and its change from FP32"


def metric_names(class_names: Sequence[str]) -> tuple[str, ...]:
    """Return a unique name for each class or output, valid inside an MLflow metric name.

    The name is the `{name}` in metrics such as `class/{name}/accuracy`. Characters that MLflow
    refuses become `_`; so do slashes, which MLflow shows as folders, and the names `.`, `..` and
    "", which are not valid folders. Long names are cut, and equal names are numbered.

    >>> metric_names(["c++", "c--", "c##", ".."])
    ('c__', 'c--', 'c___2', '_')
    """
    names: list[str] = []
    for name in class_names:
        clean = re.sub(r"^\.{0,2}$|[^\w.\- :]", "_", name)[:MAX_NAME]
        unique = clean
        number = 2
        while unique in names:
            unique = f"{clean}_{number}"
            number += 1
        names.append(unique)
    return tuple(names)


@dataclass(frozen=True)
class ClassScores(Scores):
    """Probabilities [n, classes] of one model, and labels [n].

    Attributes:
        logits: the input of the softmax for the first m samples [m, classes]; None if it is not
            known.
        threshold: with two classes, the second is predicted above this probability; None if the
            largest probability decides.
    """

    probabilities: Probabilities
    labels: Labels
    logits: NDArray[np.float32] | None = None
    threshold: float | None = None

    @property
    def classes(self) -> Self:
        """These scores themselves, for code that also takes `OfClasses`."""
        return self

    @cached_property
    def per_sample(self) -> Hits:
        """The predicted class of each sample; without a threshold, the first of tied classes."""
        if self.threshold is None:
            predictions = self.probabilities.argmax(axis=1)
        else:
            predictions = self.probabilities[:, 1] > self.threshold
        return Hits(predictions.astype(np.int64), self.labels)

    @property
    def total(self) -> int:
        """The number of samples."""
        return len(self.labels)

    @property
    def correct(self) -> int:
        """The number of samples whose predicted class is right."""
        return int(self.per_sample.right.sum())

    @property
    def value(self) -> float:
        """Accuracy, a fraction."""
        return self.correct / self.total

    @property
    def fair(self) -> float:
        """Expected accuracy with random tie-breaking."""
        return self.expected_correct / self.total

    def fair_gain(self, baseline: Self) -> float:
        """Return the change against the baseline in accuracy with random tie-breaking."""
        return (self.expected_correct - baseline.expected_correct) / self.total

    @property
    def top5_accuracy(self) -> float:
        """The fraction of samples whose class is in the top 5; the first of tied classes count."""
        best = np.argsort(-self.probabilities, axis=1, kind="stable")[:, :TOP]
        return float((best == self.labels[:, np.newaxis]).any(axis=1).mean())

    @property
    def macro_f1(self) -> float:
        """Mean of 2 TP / (2 TP + FP + FN) over the classes that occur in labels or predictions."""
        counts = self.confusion()
        sizes = counts.sum(axis=0) + counts.sum(axis=1)
        occurs = sizes > 0
        f1 = 2 * counts.diagonal()[occurs] / sizes[occurs]
        return float(f1.mean())

    def more(self) -> Metrics:
        """Return macro F1 and, with more than 5 classes, top-5 accuracy."""
        metrics: Metrics = {"macro_f1": self.macro_f1}
        if self.probabilities.shape[1] > TOP:
            metrics["top5_accuracy"] = self.top5_accuracy
        return metrics

    @cached_property
    def _at_top(self) -> NDArray[np.bool_]:
        return self.probabilities == self.probabilities.max(axis=1, keepdims=True)

    @property
    def tied(self) -> int:
        """The number of samples for which several classes share the top score."""
        return int((self._at_top.sum(axis=1) > 1).sum())

    @property
    def expected_correct(self) -> float:
        """The expected number of right samples with random tie-breaking.

        An 8-bit softmax often has ties, and argmax then favours low class indices.
        """
        label_at_top = self._at_top[np.arange(self.total), self.labels]
        return float((label_at_top / self._at_top.sum(axis=1)).sum())

    def class_accuracy(self, label: int) -> float | None:
        """Return the accuracy on the samples of one class; None without samples."""
        members = self.labels == label
        if not members.any():
            return None
        return float(self.per_sample.right[members].mean())

    def confusion(self) -> NDArray[np.int64]:
        """Count samples by [true class, predicted class]."""
        return self.per_sample.confusion(self.probabilities.shape[1])

    def agreement(self, baseline: Self) -> float:
        """Return the fraction of samples for which both models predict the same class."""
        return float((self.per_sample.predictions == baseline.per_sample.predictions).mean())

    def kl_divergence(self, baseline: Self) -> float:
        """Return KL(baseline || model) in nats, see `distortion.kl_divergence`."""
        even = 1 / self.probabilities.shape[1]
        smallest = min(KL_EPSILON, even / 2)
        return distortion.kl_divergence(self.probabilities, baseline.probabilities, smallest)

    def sqnr_db(self, baseline: Self) -> float | None:
        """Return the SQNR of the logits in dB; None if logits are unknown, or it is not finite.

        The logits of each sample are centred first, because a softmax ignores a constant.
        """
        if self.logits is None or baseline.logits is None:
            return None
        return distortion.to_db(distortion.noise_ratio(baseline.logits, self.logits, _centre))

    def class_change(self, baseline: Self, label: int) -> float | None:
        """Return the accuracy on one class minus that of the baseline; None without samples."""
        ours = self.class_accuracy(label)
        theirs = baseline.class_accuracy(label)
        if ours is None or theirs is None:
            return None
        return ours - theirs


@dataclass(frozen=True)
class OfClasses(Scores):
    """Base of scores that wrap `ClassScores` but have another metric."""

    classes: ClassScores

    @property
    def total(self) -> int:
        """The number of samples."""
        return self.classes.total

    def sqnr_db(self, baseline: Self) -> float | None:
        """Return the SQNR of the logits in dB, see `ClassScores.sqnr_db`."""
        return self.classes.sqnr_db(baseline.classes)


def _centre(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(logits - logits.mean(axis=1, keepdims=True))


def to_probabilities(outputs: Outputs, targets: Targets | None = None) -> Outputs:
    """Return outputs with probabilities [n, classes] as values, and with logits if known.

    A softmax turns logits into probabilities. Probabilities are only reshaped.
    """
    [values] = outputs.values
    values = as_rows(values)
    if outputs.final == LOGITS:
        return Outputs((distortion.softmax(values),), values)
    logits = outputs.logits
    if logits is not None:
        logits = as_rows(logits)
    return replace(outputs, values=(values,), logits=logits)


def vote(probabilities: Probabilities) -> NDArray[np.bool_]:
    """Return the vote of each sample for its top-1 class [n, classes]."""
    classes = np.arange(probabilities.shape[1])
    return np.asarray(probabilities.argmax(axis=1)[:, np.newaxis] == classes)


def score(outputs: Outputs, targets: Targets) -> ClassScores:
    """Score probabilities or logits, see `to_probabilities`."""
    ready = to_probabilities(outputs)
    return ClassScores(ready.values[0], np.asarray(targets.labels), ready.logits)


def _classes(comparison: Comparison) -> tuple[ClassScores, ClassScores]:
    return comparison.model.classes, comparison.baseline.classes


def answers(comparison: Comparison) -> tuple[Hits, Hits]:
    """Return the predicted classes of model and baseline."""
    model, baseline = _classes(comparison)
    return model.per_sample, baseline.per_sample


def changes(comparison: Comparison) -> Metrics:
    """Return how many predictions became wrong or right, the agreement, KL and SQNR."""
    model, baseline = _classes(comparison)
    lost, won = flips(baseline.per_sample.right, model.per_sample.right)
    return {
        "paired/right_to_wrong": lost,
        "paired/wrong_to_right": won,
        "agreement": model.agreement(baseline),
        "kl_divergence": model.kl_divergence(baseline),
        "sqnr_db": model.sqnr_db(baseline),
    }


def class_metrics(names: Sequence[str], comparison: Comparison) -> Metrics:
    """Return the accuracy of each class and its loss against FP32; None without samples."""
    model, baseline = _classes(comparison)
    metrics: Metrics = {}
    for label, name in enumerate(metric_names(names)):
        change = model.class_change(baseline, label)
        drop = None
        if change is not None:
            drop = round(-change, DIGITS) + 0.0  # turns -0 into 0
        metrics[f"class/{name}/accuracy"] = model.class_accuracy(label)
        metrics[f"class/{name}/drop"] = drop
    return metrics


def class_tables(names: Sequence[str], comparison: Comparison) -> dict[str, Table]:
    """Return the rows of two CSV files: accuracy by class, and the confusion matrix."""
    model, baseline = _classes(comparison)
    rows: list[list[object]] = [["class", "accuracy", "baseline_accuracy", "delta"]]
    for label, name in enumerate(names):
        accuracy = model.class_accuracy(label)
        of_baseline = baseline.class_accuracy(label)
        rows.append([name, accuracy, of_baseline, model.class_change(baseline, label)])
    matrix: list[list[object]] = [["true \\ predicted", *names]]
    for name, counts in zip(names, model.confusion().tolist(), strict=True):
        matrix.append([name, *counts])
    return {"per_class.csv": rows, "confusion.csv": matrix}


def build(class_names: tuple[str, ...] = ()) -> Task:
    """Return `task=classification`: accuracy, McNemar's test, and KL divergence to choose by."""
    task = Task(
        "classification",
        ACCURACY,
        score,
        MCNEMAR,
        criterion=KL,
        class_names=class_names,
        files=TaskFiles(
            arrays=keep_probabilities,
            tables=partial(class_tables, class_names),
            figures=partial(_draw, class_names),
            captions={
                "classes.png": "Accuracy by class, beside FP32",
                CONFUSION_FILE: CONFUSION_CAPTION,
            },
            answers=answers,
        ),
        doubt=_doubt,
        joining=Joining(to_probabilities, vote),
        summary=_summarize,
    )
    return replace(task, pair_metrics=partial(_pair_metrics, task.few_names))


def _pair_metrics(names: Sequence[str], comparison: Comparison) -> Metrics:
    return {
        "counts/tied": comparison.model.tied,
        "expected_accuracy": comparison.model.fair,
        **changes(comparison),
        **class_metrics(names, comparison),
    }


def _summarize(comparison: Comparison) -> str:
    model = comparison.model
    change = comparison.metric.say_change(comparison.delta)
    return f"{model.correct} of {model.total} correct ({model.value:.2%}, {change})"


def keep_probabilities(comparison: Comparison) -> dict[str, Array]:
    """Return the model's probabilities, and the arrays of the paired test."""
    return {"probabilities": comparison.model.classes.probabilities, **comparison.paired.arrays()}


def _draw(names: Sequence[str], comparison: Comparison, title: str) -> "dict[str, Figure]":
    from resnet8ptq.tasks.scoring import class_plots

    hits = comparison.model.per_sample, comparison.baseline.per_sample
    return {
        "classes.png": class_plots.classes(*hits, names, title),
        CONFUSION_FILE: class_plots.confusion(*hits, names, title),
    }


def _doubt(baseline: ClassScores, expected: float | None) -> str | None:
    """Return a doubt if the accuracy is not clearly above chance, or is proven below `expected`."""
    classes = baseline.probabilities.shape[1]
    hits = baseline.per_sample
    shown = f"{ACCURACY.show(baseline.value)} ({baseline.correct} of {baseline.total}"
    proven = above_chance(hits.labels, hits.predictions, classes) <= SIGNIFICANCE
    if not proven or kappa(hits.labels, hits.predictions, classes) < LEAST_KAPPA:
        return f"NEAR CHANCE, {shown}, {classes} classes)"
    return doubt_below(f"{shown})", hits.interval, expected)


def check_label_of_each(task: str, context: TaskContext, expected: str) -> None:
    """Raise `ConfigError` if the labels are missing, or not one integer for each sample."""
    # Labels of tokens and masks are integers as well, but several for each sample
    labels = context.labels
    single = labels is None or labels.ndim == 1
    check_labels(task, context, "iu" if single else "", expected)


def check_classes(task: str, context: TaskContext) -> tuple[str, ...]:
    """Return the names of the classes that the network scores.

    If no class has a name, and the network has more classes than the labels, the names are numbers.

    Raises:
        ConfigError: the labels are missing, or not one class for each sample.
        ModelError: the network does not return one output with a value for each class.
    """
    check_label_of_each(task, context, "classes, integers from 0")

    # Compare the network's classes with those of the data
    returned = context.classes
    named = len(context.class_names)
    if returned is None:
        raise ModelError(
            f"returns {describe(context.outputs)}; expected one output with a value for each class"
            f"{_choose_output(context.outputs, named)}; task=deviation and task=anomaly score "
            "other outputs"
        )
    if not context.named and named < returned:
        return tuple(map(str, range(returned)))  # the labels may lack the last classes
    if returned != named:
        advice = _count_from_zero(context) if returned == named - 1 else ""
        raise ModelError(
            f"returns {returned} values; {context.data} has {named} classes; expected a network "
            f"with one output for each class, or other data (data=){advice}"
        )
    return context.class_names


def _choose_output(outputs: Mapping[str, Sequence[int | None]], classes: int) -> str:
    """Return the advice to keep one of several outputs; empty for one output."""
    if len(outputs) == 1:
        return ""
    name = find_class_output(outputs, classes) or "NAME"
    return f"; model.outputs=[{name}] keeps one of several"


def find_class_output(outputs: Mapping[str, Sequence[int | None]], classes: int) -> str | None:
    """Return the name of the output that holds classes; None if no output stands out.

    Of several outputs with a score for each class, such as logits and probabilities, the first is
    chosen. Without such an output, the only output with several scores is chosen.

    Args:
        outputs: the shape of each output by name, without the batch axis.
        classes: the number of classes that the labels have.
    """
    exact = []  # outputs with a score for each class
    possible = []  # outputs with several scores
    for name, shape in outputs.items():
        scores = count_scores(shape) or 0
        if scores == classes:
            exact.append(name)
        if scores > 1:
            possible.append(name)
    if exact:
        return exact[0]
    return possible[0] if len(possible) == 1 else None


def _count_from_zero(context: TaskContext) -> str:
    """Return the advice for unnamed labels that start at 1; empty for other labels."""
    if context.named or context.labels is None or context.labels.min() != 1:
        return ""
    return "; the labels start at 1: subtract 1"


CLASSIFICATION = TaskType(
    make=lambda config, context: build(check_classes("classification", context)),
    recall=lambda config, class_names: build(class_names),
)
