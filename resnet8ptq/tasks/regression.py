"""`task=regression`: values, scored by mean absolute error or root mean squared error."""

import math
from functools import partial

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import RegressionConfig
from resnet8ptq.core.errors import ModelError
from resnet8ptq.tasks.scoring.bootstrap import BOOTSTRAP, BootstrapScores, mean_of
from resnet8ptq.tasks.scoring.metric import Metric, Metrics
from resnet8ptq.tasks.scoring.outputs import (
    Array,
    Outputs,
    Targets,
    TaskContext,
    check_labels,
    describe,
)
from resnet8ptq.tasks.scoring.statistics import SIGNIFICANCE, Margin
from resnet8ptq.tasks.task import Joining, Task, TaskFiles, TaskType, keep_values


def build(primary: str = "mae", resamples: int = 9999) -> Task:
    """Return the task for a network with one output value for each target value.

    Args:
        primary: `mae` or `rmse`. The absolute or squared error is averaged over an item's values,
            then over the items; the root comes last.
    """
    other = "mae"
    if primary == "mae":
        other = "rmse"
    return Task(
        "regression",
        _error_metric(primary),
        partial(_score, primary, resamples),
        BOOTSTRAP,
        beside=(_error_metric(other),),
        files=TaskFiles(arrays=partial(keep_values, _take_output)),
        doubt=partial(_doubt, primary),
        joining=Joining(),
    )


def _error_metric(name: str) -> Metric:
    return Metric(name, name.upper(), maximize=False, bounded=False)


def _score(primary: str, resamples: int, outputs: Outputs, targets: Targets) -> BootstrapScores:
    exact = _flat(np.asarray(targets.labels))
    predicted = _flat(outputs.values[0])
    error = np.abs(predicted - exact)

    # The error of predicting the mean of the targets, exactly 0 if all targets are equal
    offset = exact - exact[0]
    of_mean = np.abs(offset.mean(axis=0) - offset)

    # Both errors of each sample, of which one is primary
    absolute = error.mean(axis=1)
    squared = (error**2).mean(axis=1)
    mae = mean_of(absolute)

    def rmse(chosen: NDArray[np.int64]) -> float:
        return math.sqrt(squared[chosen].mean())

    every = np.arange(len(predicted))
    if primary == "mae":
        others: Metrics = {"rmse": rmse(every)}
        return BootstrapScores(outputs, mae, resamples, absolute, others, of_mean.mean(axis=1))
    others = {"mae": mae(every)}
    return BootstrapScores(outputs, rmse, resamples, squared, others, (of_mean**2).mean(axis=1))


def _flat(values: Array) -> NDArray[np.float64]:
    return values.reshape(len(values), -1).astype(np.float64)


def _doubt(primary: str, baseline: BootstrapScores, expected: float | None) -> str | None:
    """Return a doubt if the error is not proven below the error of predicting the mean.

    If all targets are equal, no doubt is returned.
    """
    errors = baseline.per_item
    of_mean = baseline.of_mean
    assert errors is not None and of_mean is not None  # `_score` sets both
    if not of_mean.any() or Margin.of_mean(errors - of_mean).p_within <= SIGNIFICANCE:
        return None
    trivial = float(of_mean.mean())
    if primary == "rmse":
        trivial = math.sqrt(trivial)
    show = _error_metric(primary).show
    return f"NO BETTER THAN THE MEAN, {show(baseline.value)} (of the mean {show(trivial)})"


def _take_output(scores: BootstrapScores) -> Array:
    return scores.outputs.values[0]


def _make(config: RegressionConfig, context: TaskContext) -> Task:
    check_labels("regression", context, "fiub", "values [N, ...]")
    labels = np.asarray(context.labels)

    # The output needs one value for each target value
    shapes = list(context.outputs.values())
    values = 0  # of each sample; a free axis counts as 0
    if len(shapes) == 1:
        values = math.prod(size or 0 for size in shapes[0])
    if values != labels[:1].size:
        mend = ""
        if labels.ndim == 1 and (labels == labels.round()).all():
            mend = "; labels that are classes must be integers, not floats"
        raise ModelError(
            f"returns {describe(context.outputs)}, but {context.data} has {labels[:1].size} values "
            f"to predict; expected one output with as many{mend}"
        )
    return build(config.primary, config.resamples)


REGRESSION = TaskType(
    make=_make,
    recall=lambda config, class_names: build(config.primary, config.resamples),
    schema=RegressionConfig,
)
