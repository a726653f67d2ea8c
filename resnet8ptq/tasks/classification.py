"""`task=classification`: the top-1 class of each sample, and two models on the same samples."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import TaskConfig
from resnet8ptq.core.errors import ModelError
from resnet8ptq.tasks import contract, distortion
from resnet8ptq.tasks.contract import (
    LOGITS,
    Array,
    Arrays,
    Metric,
    Metrics,
    Outputs,
    Setting,
    Table,
    Targets,
)
from resnet8ptq.tasks.statistics import (
    SIGNIFICANCE,
    Interval,
    Margin,
    above_chance,
    flips,
    mcnemar,
    tango,
    tango_interval,
    wilson,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Probabilities = NDArray[np.float32]
Labels = NDArray[np.int64]

TOP = 5
ACCURACY = Metric(
    "accuracy", "accuracy", percent=True, fair="expected_accuracy", least="min_accuracy"
)
# Half the step of an 8-bit softmax, 1/256: its zeros stand for anything below. Of more classes than
# that, half of what each has where all are as probable.
KL_EPSILON = 1 / 512
MAX_NAME = 100  # characters of a class's name in that of a metric; MLflow takes 250 in all


def confusion(labels: Labels, predictions: Labels, classes: int) -> NDArray[np.int64]:
    """Count images by [true class, predicted class]."""
    cells = labels.astype(np.int64) * classes + predictions
    return np.bincount(cells, minlength=classes**2).reshape(classes, classes)


def metric_names(class_names: Sequence[str]) -> tuple[str, ...]:
    """Return a name for each class that MLflow takes in that of a metric, and no two the same.

    As in `accuracy_{name}`. What MLflow refuses becomes `_`, and so does a slash, of which its
    pages make folders; long names are cut, and of those that come out alike the later are numbered:
    `c++`, `c--` and `c##` are `c__`, `c--` and `c___2`. Depends on the names and their order alone.
    """
    names: list[str] = []
    for name in class_names:
        clean = re.sub(r"[^\w.\- :]", "_", name)[:MAX_NAME]
        numbered = (f"{clean}_{number}" for number in itertools.count(2))
        names.append(next(name for name in itertools.chain([clean], numbered) if name not in names))
    return tuple(names)


@dataclass(frozen=True)
class Paired(contract.Paired):
    """Top-1 classes [n] of a model and of its FP32 baseline on the same images, and labels [n]."""

    model: Labels
    baseline: Labels
    labels: Labels

    @classmethod
    def read(cls, arrays: Arrays) -> Self:
        """Read what `arrays` returned."""
        columns = [arrays[name] for name in ("predictions", "baseline_predictions", "labels")]
        contract.check_columns(columns, "i")
        return cls(*columns)

    def arrays(self) -> dict[str, Array]:
        """Return predictions, labels and the baseline's predictions."""
        return {
            "predictions": self.model,
            "labels": self.labels,
            "baseline_predictions": self.baseline,
        }

    def against(self, other: Self) -> float:
        """Return the p-value of the exact McNemar test."""
        return mcnemar(self.hits, other.hits)

    def margin(self, metric: Metric, drop: float, items: int) -> Margin:
        """Return Tango's margin of the accuracy."""
        won, lost = flips(self.hits, self.baseline_hits)
        return tango(lost, won, len(self.labels), drop)

    def by_class(self, classes: int) -> list[float]:
        """Return the p-value of the exact McNemar test against the baseline on each class."""
        return [
            mcnemar(self.hits[members], self.baseline_hits[members])
            for members in (self.labels == label for label in range(classes))
        ]

    @property
    def hits(self) -> NDArray[np.bool_]:
        """Whether the model is right, by image [n]."""
        return self.model == self.labels

    @property
    def baseline_hits(self) -> NDArray[np.bool_]:
        """Whether the baseline is right, by image [n]."""
        return self.baseline == self.labels

    def confusion(self, classes: int) -> NDArray[np.int64]:
        """Count the model's images by [true class, predicted class]."""
        return confusion(self.labels, self.model, classes)

    def confusion_change(self, classes: int) -> NDArray[np.int64]:
        """Counts [true class, predicted class] of the model minus those of the baseline."""
        return self.confusion(classes) - confusion(self.labels, self.baseline, classes)


@dataclass(frozen=True)
class Scores(contract.Scores):
    """What one model's probabilities [n, classes] say about labels [n].

    Attributes:
        logits: what the final softmax took, for the first m <= n images [m, classes]; None where
            the model does not end in a softmax.
    """

    probabilities: Probabilities
    labels: Labels
    logits: NDArray[np.float32] | None = None

    @cached_property
    def predictions(self) -> Labels:
        """Top-1 class of each image [n]; of tied classes the first, as argmax has it."""
        return self.probabilities.argmax(axis=1).astype(np.int64)

    @cached_property
    def hits(self) -> NDArray[np.bool_]:
        """Whether each image [n] is right."""
        return self.predictions == self.labels

    @property
    def total(self) -> int:
        """Number of images."""
        return len(self.labels)

    @property
    def correct(self) -> int:
        """Number of images whose top-1 class is right."""
        return int(self.hits.sum())

    @property
    def accuracy(self) -> float:
        """Top-1 accuracy, a fraction."""
        return self.correct / self.total

    @property
    def value(self) -> float:
        """Top-1 accuracy."""
        return self.accuracy

    @property
    def fair(self) -> float:
        """Top-1 accuracy with ties at the top broken at random."""
        return self.expected_correct / self.total

    @property
    def interval(self) -> Interval:
        """95% Wilson score interval of the accuracy."""
        return wilson(self.correct, self.total)

    @property
    def top5_accuracy(self) -> float:
        """Fraction of samples whose class is among the five best; of tied ones the first count."""
        found = np.argsort(-self.probabilities, axis=1, kind="stable")[:, :TOP]
        return float((found == self.labels[:, np.newaxis]).any(axis=1).mean())

    @property
    def macro_f1(self) -> float:
        """Mean of 2 TP / (2 TP + FP + FN) over the classes that are true or predicted anywhere."""
        counts = self.confusion()
        sizes = counts.sum(axis=0) + counts.sum(axis=1)
        return float(np.mean(2 * counts.diagonal()[sizes > 0] / sizes[sizes > 0]))

    def more(self) -> Metrics:
        """Return macro F1, and top-5 accuracy where there are more classes than that."""
        top5 = {"top5_accuracy": self.top5_accuracy} if self.probabilities.shape[1] > TOP else {}
        return {"correct": self.correct, "macro_f1": self.macro_f1, **top5}

    @cached_property
    def _at_top(self) -> NDArray[np.bool_]:
        return self.probabilities == self.probabilities.max(axis=1, keepdims=True)

    @property
    def tied(self) -> int:
        """Number of images where several classes share the top score."""
        return int((self._at_top.sum(axis=1) > 1).sum())

    @property
    def expected_correct(self) -> float:
        """Expected number of right images if ties at the top were broken at random.

        An 8-bit softmax ties often, and argmax then favours low class indices.
        """
        label_at_top = self._at_top[np.arange(self.total), self.labels]
        return float((label_at_top / self._at_top.sum(axis=1)).sum())

    def class_accuracy(self, label: int) -> float | None:
        """Top-1 accuracy on the images of one class; None where there are none."""
        members = self.labels == label
        return float(self.hits[members].mean()) if members.any() else None

    def confusion(self) -> NDArray[np.int64]:
        """Counts [true class, predicted class]."""
        return confusion(self.labels, self.predictions, self.probabilities.shape[1])


@dataclass(frozen=True)
class Comparison(contract.Comparison):
    """Two models on the same images: `model` against `baseline`."""

    model: Scores
    baseline: Scores

    @property
    def paired(self) -> Paired:
        """The top-1 classes of both."""
        return Paired(self.model.predictions, self.baseline.predictions, self.model.labels)

    @property
    def interval(self) -> Interval:
        """95% interval of `delta`, by Tango's score test."""
        return tango_interval(self.model.hits, self.baseline.hits)

    @property
    def fair_delta(self) -> float:
        """The accuracy's change with ties at the top broken at random, on both sides."""
        return (self.model.expected_correct - self.baseline.expected_correct) / self.model.total

    @property
    def right_to_wrong(self) -> int:
        """Images that only the baseline gets right."""
        return flips(self.baseline.hits, self.model.hits)[0]

    @property
    def wrong_to_right(self) -> int:
        """Images that only the model gets right."""
        return flips(self.model.hits, self.baseline.hits)[0]

    @property
    def p_value(self) -> float:
        """Exact McNemar test of the model against the baseline."""
        return mcnemar(self.model.hits, self.baseline.hits)

    @property
    def agreement(self) -> float:
        """Fraction of images on which both predict the same class."""
        return float((self.model.predictions == self.baseline.predictions).mean())

    @property
    def kl_divergence(self) -> float:
        """Mean over the images of KL(baseline || model) in nats, see `distortion.kl_divergence`."""
        found = self.model.probabilities, self.baseline.probabilities
        even = 1 / self.model.probabilities.shape[1]
        return distortion.kl_divergence(*found, min(KL_EPSILON, even / 2))

    @property
    def sqnr_db(self) -> float | None:
        """Signal-to-quantization-noise ratio of the logits, in dB, see `distortion.to_db`.

        Over all images and classes, where each image's logits are centred first: a softmax ignores
        a constant. None without logits on both sides.
        """
        if self.model.logits is None or self.baseline.logits is None:
            return None
        return distortion.to_db(
            [distortion.noise_ratio(self.baseline.logits, self.model.logits, _centre)]
        )

    def class_delta(self, label: int) -> float | None:
        """Accuracy on one class minus the baseline's; None where it has no images."""
        ours, theirs = self.model.class_accuracy(label), self.baseline.class_accuracy(label)
        return None if ours is None or theirs is None else ours - theirs

    def more(self) -> Metrics:
        """Return what became of the images, ties, and the distance of the outputs."""
        model = self.model
        return {
            "tied": model.tied,
            "expected_correct": model.expected_correct,
            "expected_accuracy": model.fair,
            "expected_delta": self.fair_delta,
            "right_to_wrong": self.right_to_wrong,
            "wrong_to_right": self.wrong_to_right,
            "agreement": self.agreement,
            "kl_divergence": self.kl_divergence,
            "sqnr_db": self.sqnr_db,
        }


def _centre(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(logits - logits.mean(axis=1, keepdims=True))


@dataclass(frozen=True)
class Classification(contract.Task):
    """Each sample is of one class, for each of which the network returns a value."""

    name = "classification"
    test = "exact McNemar test"
    intervals = (
        "95% Wilson score intervals; of a difference, Tango's score intervals (1998), corrected "
        "for continuity"
    )
    paired: ClassVar[type[contract.Paired]] = Paired
    figure_files: ClassVar[dict[str, str]] = {
        "classes.png": "Accuracy by class, beside FP32",
        "confusion.png": "Confusion matrix and its change from FP32",
    }

    @classmethod
    def make(cls, config: TaskConfig, setting: Setting) -> Self:
        """Take class labels, and a network with one output for each class."""
        return cls(check_classes(cls.name, setting))

    @property
    def metric(self) -> Metric:
        """Top-1 accuracy."""
        return ACCURACY

    def score(self, outputs: Outputs, targets: Targets) -> Scores:
        """Score probabilities [n, classes], or logits, of which the softmax is taken."""
        [found] = outputs.values
        labels = np.asarray(targets.labels)
        if outputs.final == LOGITS:
            return Scores(distortion.softmax(found), labels, found)
        return Scores(found, labels, outputs.logits)

    def compare(self, model: Scores, baseline: Scores) -> contract.Comparison:
        """Compare the top-1 classes."""
        return Comparison(model, baseline)

    def metrics(self, found: contract.Comparison) -> Metrics:
        """Add accuracy and delta of each class, where there are not too many."""
        each: Metrics = {}
        for label, name in enumerate(metric_names(self.few_names)):
            each[f"accuracy_{name}"] = found.model.class_accuracy(label)
            each[f"delta_{name}"] = self._top1(found).class_delta(label)
        return super().metrics(found) | each

    def summary(self, found: contract.Comparison) -> str:
        """Return how many are right."""
        scores, change = found.model, found.delta
        shown = f"{scores.correct} of {scores.total} correct"
        return f"{shown} ({scores.accuracy:.2%}, {self.metric.say_change(change)})"

    def arrays(self, found: contract.Comparison) -> dict[str, Array]:
        """Add the probabilities."""
        return {"probabilities": found.model.probabilities, **found.paired.arrays()}

    def tables(self, found: contract.Comparison) -> dict[str, Table]:
        """Return accuracy by class, and the confusion matrix."""
        top1 = self._top1(found)
        rows: list[list[object]] = [["class", "accuracy", "baseline_accuracy", "delta"]]
        for label, name in enumerate(self.class_names):
            each = (scores.class_accuracy(label) for scores in (top1.model, top1.baseline))
            rows.append([name, *each, top1.class_delta(label)])
        counts = zip(self.class_names, top1.model.confusion().tolist(), strict=True)
        matrix = [["true \\ predicted", *self.class_names], *([name, *row] for name, row in counts)]
        return {"per_class.csv": rows, "confusion.csv": matrix}

    def figures(self, found: contract.Comparison, title: str) -> "dict[str, Figure]":
        """Draw the classes and the confusion matrix."""
        from resnet8ptq.tasks import class_plots

        paired = self._top1(found).paired
        return {
            "classes.png": class_plots.classes(paired, self.class_names, title),
            "confusion.png": class_plots.confusion(paired, self.class_names, title),
        }

    def doubt(self, baseline: Scores, expected: float | None) -> str | None:
        """Doubt an accuracy that is not shown to be above chance, or is below `expected`."""
        classes, metric = baseline.probabilities.shape[1], self.metric
        found = f"{metric.show(baseline.accuracy)} ({baseline.correct} of {baseline.total}"
        if above_chance(baseline.labels, baseline.predictions, classes) > SIGNIFICANCE:
            return f"NEAR CHANCE, {found}, {classes} classes)"
        return contract.doubt_below(f"{found})", wilson(baseline.correct, baseline.total), expected)

    def _top1(self, found: contract.Comparison) -> Comparison:
        assert isinstance(found, Comparison)  # what `compare` made
        return found


def check_classes(task: str, setting: Setting) -> tuple[str, ...]:
    """Return the names of the classes.

    Raises:
        ConfigError: the labels are no classes.
        ModelError: the network returns other than one value for each class.
    """
    contract.check_labels(task, setting, "iu", "classes, integers from 0")
    returned, known = setting.classes, len(setting.class_names)
    if returned is None:
        raise ModelError(
            f"returns {contract.describe(setting.outputs)}; takes one value for each class; "
            "task=deviation and task=anomaly score other outputs"
        )
    if not setting.named and known < returned:
        return tuple(map(str, range(returned)))  # the samples may lack the last classes
    if returned != known:
        raise ModelError(
            f"returns {returned} values, but {setting.data} has {known} classes; takes a network "
            "with one output for each class, or other data (data=)"
        )
    return setting.class_names
