"""`task=anomaly`: what a network cannot reconstruct is none of what it was trained on.

As MLPerf Tiny and DCASE do it: the mean squared error of each window, the mean of them for each
clip, and how well that ranks anomalies above what is normal.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import AnomalyConfig, TaskConfig
from resnet8ptq.core.errors import ConfigError, DataError, ModelError
from resnet8ptq.tasks import contract, distortion, roc
from resnet8ptq.tasks.contract import Array, Metric, Metrics, Outputs, Setting, Targets
from resnet8ptq.tasks.statistics import Auc, auc

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Scores(roc.Scores):
    """The anomaly score of each clip [n], and labels [n], of which 1 is an anomaly.

    Attributes:
        max_fpr: up to which false positive rate the partial AUC counts.
    """

    scores: NDArray[np.float64]
    labels: NDArray[np.int64]
    outputs: Outputs
    max_fpr: float

    @property
    def total(self) -> int:
        """Number of clips."""
        return len(self.labels)

    @cached_property
    def auc(self) -> Auc:  # type: ignore[override]
        """The area under the ROC curve."""
        return auc(self.scores, self.labels == 1)

    def more(self) -> Metrics:
        """Return the partial AUC, standardized (McClish, 1989): 0.5 is chance, 1 the best."""
        from sklearn.metrics import roc_auc_score  # takes a second to import

        return {"pauc": float(roc_auc_score(self.labels, self.scores, max_fpr=self.max_fpr))}


@dataclass(frozen=True)
class Comparison(roc.Comparison):
    """The AUC of two models."""

    model: Scores
    baseline: Scores

    @property
    def sqnr_db(self) -> float | None:
        """SQNR of the outputs, in dB."""
        return distortion.sqnr_db(self.baseline.outputs.values, self.model.outputs.values)

    @property
    def paired(self) -> roc.Paired:
        """The scores of both."""
        found = self.model.scores, self.baseline.scores, self.model.labels
        return roc.Paired(roc.Ranking(*found))


@dataclass(frozen=True)
class Anomaly(contract.Task):
    """Labels are 0, normal, and 1, an anomaly; the network returns what it was given, or a score.

    Attributes:
        max_fpr: see `Scores`.
    """

    max_fpr: float = 0.1

    name = "anomaly"
    test = roc.DELONG
    intervals = roc.INTERVALS
    joins_groups = True
    paired: ClassVar[type[contract.Paired]] = roc.Paired
    schema = AnomalyConfig
    figure_files: ClassVar[dict[str, str]] = {roc.FIGURE: "ROC curve, beside FP32's"}

    @classmethod
    def make(cls, config: TaskConfig, setting: Setting) -> Self:
        """Take labels 0 and 1, and one output of the input's shape or of one value."""
        labels = setting.labels
        found = None if labels is None else np.unique(labels).tolist()
        more = ", …" if found and len(found) > 10 else ""
        if labels is None or labels.ndim > 1 or found != [0, 1]:
            raise ConfigError(
                f"task=anomaly: the labels of {setting.data} are "
                f"{found and ', '.join(map(str, found[:10]))}{more}; takes 0 (normal) and 1 (an "
                "anomaly), one for each sample"
            )
        if list(setting.outputs.values()) not in ([setting.input_shape], [(1,)], [()]):
            raise ModelError(
                f"returns {contract.describe(setting.outputs)}; task=anomaly takes one output: "
                f"the reconstructed input {list(setting.input_shape)}, or a score"
            )
        return cls.recall(config, ())

    @classmethod
    def recall(cls, config: TaskConfig, class_names: tuple[str, ...]) -> Self:
        """Set the task up for what a run has kept."""
        assert isinstance(config, AnomalyConfig)  # see `registry`
        return cls(max_fpr=config.max_fpr)

    @property
    def metric(self) -> Metric:
        """The area under the ROC curve."""
        return Metric("auc", "AUC")

    @property
    def beside(self) -> tuple[Metric, ...]:
        """The partial AUC."""
        return (Metric("pauc", f"pAUC({self.max_fpr:g})"),)

    def score(self, outputs: Outputs, targets: Targets) -> Scores:
        """Score each clip by the mean error of its windows."""
        [found] = outputs.values
        labels = np.asarray(targets.labels, np.int64)
        assert targets.inputs is not None  # evaluation gives them
        errors = _errors(found, targets.inputs)
        if targets.groups is not None:
            _, first, clips = np.unique(targets.groups, return_index=True, return_inverse=True)
            if (labels != labels[first][clips]).any():
                raise DataError("data.groups: a group has samples of both labels; takes one label")
            errors = np.bincount(clips, errors) / np.bincount(clips)
            labels = labels[first]
        return Scores(errors, labels, outputs, self.max_fpr)

    def compare(self, model: Scores, baseline: Scores) -> Comparison:
        """Compare the AUCs."""
        return Comparison(model, baseline)

    def figures(self, found: contract.Comparison, title: str) -> "dict[str, Figure]":
        """Draw the ROC curves."""
        assert isinstance(found, Comparison)
        return {roc.FIGURE: found.paired.ranking.figure(title)}

    def doubt(self, baseline: Scores, expected: float | None) -> str | None:
        """Doubt an AUC near that of guessing, or below `expected`."""
        return roc.doubt(baseline.auc, expected)


def _errors(found: Array, inputs: Callable[[slice], NDArray[np.float32]]) -> NDArray[np.float64]:
    """Return the mean squared error of each window [n]; a single value is the score itself."""
    if found[:1].size == 1:
        return found.reshape(-1).astype(np.float64)
    errors = np.empty(len(found))
    rows = max(1, distortion.AT_ONCE // found[:1].size)
    for start in range(0, len(found), rows):
        part = slice(start, min(start + rows, len(found)))
        wide = (found[part].astype(np.float64) - inputs(part)).reshape(part.stop - start, -1)
        errors[part] = (wide**2).mean(axis=1)
    return errors
