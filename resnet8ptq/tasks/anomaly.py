"""`task=anomaly`: scores that rank anomalies above normal samples, measured by the AUC.

The network returns the score, or reconstructs the sample, and the error is the score. As in MLPerf
Tiny and DCASE, the score of a clip is by default the mean over its windows (`task.join`).
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import AnomalyConfig
from resnet8ptq.core.errors import ConfigError, ModelError
from resnet8ptq.tasks.scoring import distortion
from resnet8ptq.tasks.scoring.comparison import Comparison, OutputScores
from resnet8ptq.tasks.scoring.metric import Metric, Metrics
from resnet8ptq.tasks.scoring.outputs import Outputs, Targets, TaskContext, describe
from resnet8ptq.tasks.scoring.ranking import AUC, DELONG, ROC_CAPTION, ROC_FILE, Ranking, doubt_auc
from resnet8ptq.tasks.task import Joining, Task, TaskFiles, TaskType

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class AnomalyScores(OutputScores):
    """The anomaly score of each sample or clip [n], and labels [n], where 1 is an anomaly.

    Attributes:
        max_fpr: the largest false positive rate of the partial AUC.
    """

    scores: NDArray[np.float64]
    labels: NDArray[np.int64]
    max_fpr: float

    @cached_property
    def per_sample(self) -> Ranking:
        """The score of each sample or clip."""
        return Ranking(self.scores, self.labels)

    @property
    def value(self) -> float:
        """The AUC."""
        return self.per_sample.auc.value

    def more(self) -> Metrics:
        """Return the partial AUC, standardized (McClish, 1989): 0.5 is chance, and 1 is best."""
        from sklearn.metrics import roc_auc_score  # takes a second to import

        scores = self.per_sample.ranked
        scores = np.unique(scores, return_inverse=True)[1]  # ranks, as it refuses infinity
        return {"pauc": float(roc_auc_score(self.labels, scores, max_fpr=self.max_fpr))}


def build(max_fpr: float = 0.1) -> Task:
    """Return `task=anomaly` with this largest false positive rate of the partial AUC."""
    return Task(
        "anomaly",
        AUC,
        partial(_score, max_fpr),
        DELONG,
        beside=(Metric("pauc", f"pAUC({max_fpr:g})"),),
        files=TaskFiles(figures=_draw, captions={ROC_FILE: ROC_CAPTION}),
        doubt=doubt_auc,
        joining=Joining(_to_errors),
    )


def _score(max_fpr: float, outputs: Outputs, targets: Targets) -> AnomalyScores:
    errors = _to_errors(outputs, targets).values[0].reshape(-1)
    return AnomalyScores(outputs, errors, np.asarray(targets.labels, np.int64), max_fpr)


def _to_errors(outputs: Outputs, targets: Targets) -> Outputs:
    """Return outputs with a score of each sample [n, 1] as values.

    The score is the value of a network that returns one value, or else the mean squared error of
    the reconstruction.
    """
    [values] = outputs.values
    if values[:1].size == 1:
        return replace(outputs, values=(values.reshape(-1, 1).astype(np.float64),))
    assert targets.inputs is not None  # the evaluation sets them
    errors = np.empty((len(values), 1))
    for part in distortion.parts(values):
        error = values[part].astype(np.float64) - targets.inputs(part)
        wide = error.reshape(len(error), -1)
        errors[part] = (wide**2).mean(axis=1, keepdims=True)
    return replace(outputs, values=(errors,))


def _draw(comparison: Comparison, title: str) -> "dict[str, Figure]":
    from resnet8ptq.tasks.scoring import roc_plot

    model = comparison.model.per_sample
    baseline = comparison.baseline.per_sample
    return {ROC_FILE: roc_plot.draw(model, baseline, title)}


def _make(config: AnomalyConfig, context: TaskContext) -> Task:
    labels = context.labels
    values = []
    if labels is not None:
        values = np.unique(labels).tolist()
    if labels is None or labels.ndim > 1 or values != [0, 1]:
        got = ", ".join(map(str, values[:10]))
        if labels is None:
            got = "None"
        if len(values) > 10:
            got += ", …"
        raise ConfigError(
            f"task=anomaly: the labels of {context.data} are {got}; expected 0 (normal) and 1 (an "
            "anomaly), one for each sample"
        )

    # The network reconstructs its input, or returns a score
    if list(context.outputs.values()) not in ([context.input_shape], [(1,)], [()]):
        raise ModelError(
            f"returns {describe(context.outputs)}; task=anomaly takes one output: the "
            f"reconstructed input {list(context.input_shape)}, or a score"
        )
    return build(config.max_fpr)


ANOMALY = TaskType(
    make=_make, recall=lambda config, class_names: build(config.max_fpr), schema=AnomalyConfig
)
