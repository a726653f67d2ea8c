"""`task=binary`: two classes, told apart by a threshold; judged by the AUC, which needs none."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import BinaryConfig, TaskConfig
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.tasks import classification, contract, roc
from resnet8ptq.tasks.classification import Classification, Labels, check_classes
from resnet8ptq.tasks.contract import (
    LOGITS,
    Array,
    Arrays,
    Metric,
    Metrics,
    Outputs,
    Setting,
    Targets,
)
from resnet8ptq.tasks.statistics import Auc, Margin, auc, delong, mcnemar

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Scores(roc.Scores, classification.Scores):
    """Probabilities [n, 2]; class 1 is the positive, predicted where it is above `threshold`."""

    threshold: float = 0.5

    @property
    def positive(self) -> NDArray[np.float32]:
        """The probability of class 1 [n]."""
        return self.probabilities[:, 1]

    @cached_property
    def predictions(self) -> Labels:
        """The class of each sample [n]."""
        return (self.positive > self.threshold).astype(np.int64)

    @cached_property
    def auc(self) -> Auc:  # type: ignore[override]
        """The area under the ROC curve."""
        return auc(self.positive, self.labels == 1)

    @property
    def fair(self) -> float:
        """The AUC."""
        return self.value

    def more(self) -> Metrics:
        """Add the accuracy at the threshold."""
        return {**super().more(), "accuracy": self.accuracy}


@dataclass(frozen=True)
class Paired(classification.Paired):
    """Also the probabilities of class 1, of both."""

    ranking: roc.Ranking

    @classmethod
    def read(cls, arrays: Arrays) -> Self:
        """Read what `arrays` returned."""
        top1, ranking = classification.Paired.read(arrays), roc.read_ranking(arrays)
        return cls(top1.model, top1.baseline, top1.labels, ranking)

    def arrays(self) -> dict[str, Array]:
        """Add the probabilities of class 1."""
        return {**super().arrays(), **roc.vars_of(self.ranking)}

    def against(self, other: Self) -> float:
        """Return the p-value of DeLong's test."""
        return delong(self.ranking.model, other.ranking.model)[1]

    def margin(self, metric: Metric, drop: float, items: int) -> Margin:
        """Return the margin of the AUC."""
        return self.ranking.margin(drop)


@dataclass(frozen=True)
class Comparison(roc.Comparison, classification.Comparison):
    """The AUC of two models, beside what became of the samples."""

    model: Scores
    baseline: Scores

    @property
    def fair_delta(self) -> float:
        """The AUC's change."""
        return self.delta

    @property
    def paired(self) -> Paired:
        """The classes and the probabilities of both."""
        top1 = super().paired
        ranking = roc.Ranking(self.model.positive, self.baseline.positive, top1.labels)
        return Paired(top1.model, top1.baseline, top1.labels, ranking)

    def more(self) -> Metrics:
        """Add the accuracy's difference, and the exact McNemar test of it."""
        difference = self.model.accuracy - self.baseline.accuracy
        p_value = mcnemar(self.model.hits, self.baseline.hits)
        luck = ("tied", "expected_correct", "expected_accuracy", "expected_delta")  # of an argmax
        top1 = {key: value for key, value in super().more().items() if key not in luck}
        return {**top1, "accuracy_delta": difference, "accuracy_p_value": p_value}


@dataclass(frozen=True)
class Binary(Classification):
    """Two classes; the network has an output for each, or one for the second.

    Attributes:
        threshold: of the second class's probability.
    """

    threshold: float = 0.5

    name = "binary"
    test = roc.DELONG
    intervals = roc.INTERVALS
    paired: ClassVar[type[contract.Paired]] = Paired
    schema = BinaryConfig
    figure_files: ClassVar[dict[str, str]] = {
        roc.FIGURE: "ROC curve, beside FP32's",
        "confusion.png": Classification.figure_files["confusion.png"],
    }

    @classmethod
    def make(cls, config: TaskConfig, setting: Setting) -> Self:
        """Take labels of two classes."""
        assert isinstance(config, BinaryConfig)  # see `registry`
        single = setting.classes == 1
        names = setting.class_names if single else check_classes(cls.name, setting)
        contract.check_labels(cls.name, setting, "iu", "two classes, 0 and 1")
        found = np.unique(np.asarray(setting.labels))
        if len(names) != 2 or found.tolist() != [0, 1]:
            raise ConfigError(
                f"task=binary: {setting.data} has {len(names)} classes, of which {len(found)} have "
                "test samples; takes two, with samples of both"
            )
        return cls(names, config.threshold)

    @classmethod
    def recall(cls, config: TaskConfig, class_names: tuple[str, ...]) -> Self:
        """Set the task up for what a run has kept."""
        assert isinstance(config, BinaryConfig)
        return cls(class_names, config.threshold)

    @property
    def metric(self) -> Metric:
        """The area under the ROC curve."""
        return Metric("auc", "AUC")

    @property
    def beside(self) -> tuple[Metric, ...]:
        """The accuracy at the threshold."""
        return (Metric("accuracy", "accuracy", percent=True),)

    def score(self, outputs: Outputs, targets: Targets) -> Scores:
        """Score one output (after a sigmoid, or before) or two."""
        if outputs.values[0].shape[1] == 1:
            outputs = _as_two(outputs)
        found = super().score(outputs, targets)
        return Scores(found.probabilities, found.labels, found.logits, self.threshold)

    def compare(
        self, model: classification.Scores, baseline: classification.Scores
    ) -> contract.Comparison:
        """Compare the AUCs."""
        assert isinstance(model, Scores) and isinstance(baseline, Scores)  # what `score` made
        return Comparison(model, baseline)

    def summary(self, found: contract.Comparison) -> str:
        """Return the AUC, and the accuracy at the threshold."""
        shown = contract.Task.summary(self, found)
        return f"{shown}, {found.model.accuracy:.2%} correct above {self.threshold:g}"

    def figures(self, found: contract.Comparison, title: str) -> "dict[str, Figure]":
        """Draw the ROC curves and the confusion matrix."""
        assert isinstance(found, Comparison)
        drawn = super().figures(found, title)
        drawn[roc.FIGURE] = found.paired.ranking.figure(title)
        return {name: drawn[name] for name in self.figure_files}

    def doubt(self, baseline: classification.Scores, expected: float | None) -> str | None:
        """Doubt an AUC near that of guessing, or below `expected`."""
        assert isinstance(baseline, Scores)
        return roc.doubt(baseline.auc, expected)


def _as_two(outputs: Outputs) -> Outputs:
    """Return one output [n, 1] as that of two classes."""
    [found] = outputs.values
    first = np.zeros_like(found) if outputs.final == LOGITS else 1 - found
    return Outputs((np.concatenate([first, found], axis=1),), None, outputs.final)
