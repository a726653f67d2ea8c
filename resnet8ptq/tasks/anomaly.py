"""`task=anomaly`: the network reconstructs normal samples better than anomalies.

As in MLPerf Tiny and DCASE, the score of a clip is the mean over its windows of the mean squared
error. The metric is the AUC of ranking anomalies above normal clips.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import AnomalyConfig
from resnet8ptq.core.errors import ConfigError, DataError, ModelError
from resnet8ptq.tasks.scoring import distortion
from resnet8ptq.tasks.scoring.comparison import Comparison, OutputScores
from resnet8ptq.tasks.scoring.metric import Metric, Metrics
from resnet8ptq.tasks.scoring.outputs import Array, Outputs, Targets, TaskContext, describe
from resnet8ptq.tasks.scoring.ranking import AUC, DELONG, ROC_CAPTION, ROC_FILE, Ranking, doubt_auc
from resnet8ptq.tasks.task import Scope, Task, TaskFiles, TaskType

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class AnomalyScores(OutputScores):
    """The anomaly score of each clip [n], and labels [n], where 1 is an anomaly.

    Attributes:
        max_fpr: the largest false positive rate of the partial AUC.
    """

    scores: NDArray[np.float64]
    labels: NDArray[np.int64]
    max_fpr: float

    @cached_property
    def per_sample(self) -> Ranking:
        """The score of each clip."""
        return Ranking(self.scores, self.labels)

    @property
    def total(self) -> int:
        """Number of scored clips (groups of samples)."""
        return len(self.labels)

    @property
    def value(self) -> float:
        """The AUC."""
        return self.per_sample.auc.value

    def more(self) -> Metrics:
        """Return the partial AUC, standardized (McClish, 1989): 0.5 is chance, 1 the best."""
        from sklearn.metrics import roc_auc_score  # takes a second to import

        return {"pauc": float(roc_auc_score(self.labels, self.scores, max_fpr=self.max_fpr))}


def build(max_fpr: float = 0.1) -> Task:
    """Return the task for labels 0 (normal) and 1 (an anomaly)."""
    return Task(
        "anomaly",
        AUC,
        partial(_score, max_fpr),
        DELONG,
        beside=(Metric("pauc", f"pAUC({max_fpr:g})"),),
        scope=Scope(joins_groups=True),
        files=TaskFiles(figures=_draw, captions={ROC_FILE: ROC_CAPTION}),
        doubt=doubt_auc,
    )


def _score(max_fpr: float, outputs: Outputs, targets: Targets) -> AnomalyScores:
    """Score each clip by the mean error of its windows."""
    [values] = outputs.values
    labels = np.asarray(targets.labels, np.int64)
    assert targets.inputs is not None  # the evaluation sets them
    errors = _errors(values, targets.inputs)
    if targets.groups is not None:
        _, first, clips = np.unique(targets.groups, return_index=True, return_inverse=True)
        if (labels != labels[first][clips]).any():
            raise DataError("data.groups: a group has samples of both labels; expected one label")
        errors = np.bincount(clips, errors) / np.bincount(clips)
        labels = labels[first]
    return AnomalyScores(outputs, errors, labels, max_fpr)


def _errors(values: Array, inputs: Callable[[slice], NDArray[np.float32]]) -> NDArray[np.float64]:
    """Return the mean squared error of each window [n], or the single output value."""
    if values[:1].size == 1:
        return values.reshape(-1).astype(np.float64)
    errors = np.empty(len(values))
    for part in distortion.parts(values):
        error = values[part].astype(np.float64) - inputs(part)
        wide = error.reshape(len(error), -1)
        errors[part] = (wide**2).mean(axis=1)
    return errors


def _draw(comparison: Comparison, title: str) -> "dict[str, Figure]":
    from resnet8ptq.tasks.scoring import roc_plot

    model = comparison.model.per_sample
    baseline = comparison.baseline.per_sample
    return {ROC_FILE: roc_plot.draw(model, baseline, title)}


def _make(config: AnomalyConfig, setting: TaskContext) -> Task:
    labels = setting.labels
    values = None if labels is None else np.unique(labels).tolist()
    more = ", …" if values and len(values) > 10 else ""
    if labels is None or labels.ndim > 1 or values != [0, 1]:
        raise ConfigError(
            f"task=anomaly: the labels of {setting.data} are "
            f"{values and ', '.join(map(str, values[:10]))}{more}; expected 0 (normal) and 1 (an "
            "anomaly), one for each sample"
        )
    if list(setting.outputs.values()) not in ([setting.input_shape], [(1,)], [()]):
        raise ModelError(
            f"returns {describe(setting.outputs)}; task=anomaly takes one output: the "
            f"reconstructed input {list(setting.input_shape)}, or a score"
        )
    return build(config.max_fpr)


ANOMALY = TaskType(_make, lambda config, class_names: build(config.max_fpr), AnomalyConfig)
