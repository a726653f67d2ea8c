"""Classification: metrics from per-image probabilities, and two models on the same images."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.tasks.statistics import mcnemar, wilson

Probabilities = NDArray[np.float32]
Labels = NDArray[np.int64]

# Half the step of an 8-bit softmax, 1/256: its zeros stand for anything below.
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
class Paired:
    """Top-1 classes [n] of a model and of its FP32 baseline on the same images, and labels [n]."""

    model: Labels
    baseline: Labels
    labels: Labels

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
class Scores:
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
    def interval(self) -> tuple[float, float]:
        """95% Wilson score interval of the accuracy."""
        return wilson(self.correct, self.total)

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
class Comparison:
    """Two models on the same images: `model` against `baseline`."""

    model: Scores
    baseline: Scores

    @property
    def paired(self) -> Paired:
        """The top-1 classes of both."""
        return Paired(self.model.predictions, self.baseline.predictions, self.model.labels)

    @property
    def delta(self) -> float:
        """Accuracy minus the baseline's, a fraction."""
        return self.model.accuracy - self.baseline.accuracy

    @property
    def expected_delta(self) -> float:
        """The same with ties at the top broken at random, on both sides."""
        return (self.model.expected_correct - self.baseline.expected_correct) / self.model.total

    @property
    def right_to_wrong(self) -> int:
        """Images that only the baseline gets right."""
        return int((self.baseline.hits & ~self.model.hits).sum())

    @property
    def wrong_to_right(self) -> int:
        """Images that only the model gets right."""
        return int((self.model.hits & ~self.baseline.hits).sum())

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
        """Mean over the images of KL(baseline || model) in nats (Kullback and Leibler, 1951).

        Both sides are raised to at least `KL_EPSILON` and normalized first: an 8-bit softmax has
        exact zeros, and rows that do not sum to 1. So values below the step of 8 bits do not
        count, and the result is 0 for equal probabilities and never negative.
        """
        p, q = _smooth(self.baseline.probabilities), _smooth(self.model.probabilities)
        return float((p * np.log(p / q)).sum(axis=1).mean())

    @property
    def sqnr_db(self) -> float | None:
        """Signal-to-quantization-noise ratio of the logits, in dB.

        10 * log10(sum z_fp32**2 / sum (z_fp32 - z_model)**2) over all images and classes (Jayant
        and Noll, Digital Coding of Waveforms, 1984: signal variance over error variance), where
        each image's logits are centred first: a softmax ignores a constant. None without logits
        on both sides, and where the ratio is not finite: equal logits make it infinite, and
        for a signal of zero it is not defined.
        """
        if self.model.logits is None or self.baseline.logits is None:
            return None
        signal = _centre(self.baseline.logits)
        noise = signal - _centre(self.model.logits)
        signal_power, noise_power = float((signal**2).sum()), float((noise**2).sum())
        if signal_power == 0 or noise_power == 0:
            return None
        return 10 * math.log10(signal_power / noise_power)

    def class_delta(self, label: int) -> float | None:
        """Accuracy on one class minus the baseline's; None where it has no images."""
        ours, theirs = self.model.class_accuracy(label), self.baseline.class_accuracy(label)
        return None if ours is None or theirs is None else ours - theirs


def _smooth(probabilities: Probabilities) -> NDArray[np.float64]:
    raised = np.maximum(probabilities.astype(np.float64), KL_EPSILON)
    return raised / raised.sum(axis=1, keepdims=True)


def _centre(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    return wide - wide.mean(axis=1, keepdims=True)
