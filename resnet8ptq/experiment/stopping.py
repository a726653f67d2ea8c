"""The plan of a run that stops scoring when its verdict is decided (`evaluate.stop=decided`)."""

import logging

from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.experiment.samples import Samples
from resnet8ptq.tasks.contract import Task
from resnet8ptq.tasks.sequential import Plan
from resnet8ptq.tasks.statistics import SIGNIFICANCE

log = logging.getLogger(__name__)


def make_plan(config: RunConfig, task: Task, samples: Samples, grouped: bool) -> Plan | None:
    """Return the plan; None for a run that scores all samples.

    FP32 itself is not judged, and scores all. Each of several models gets an equal part of the
    level (Bonferroni), since a run does not know the p-values of the others.

    Args:
        grouped: samples of one group are scored as if they were independent.

    Raises:
        ConfigError: the task's metric is no share of hits, or the samples are not independent.
    """
    if config.evaluate.stop == "all":
        return None
    if not task.test.sequential:
        raise ConfigError(
            f"evaluate.stop: got decided, takes all with task={task.name}: the sequential test "
            "takes hits, as of task=classification and agreement"
        )
    if grouped:
        raise ConfigError(
            "evaluate.stop: got decided, takes all with data.groups: the sequential test takes "
            "independent samples"
        )
    models = config.evaluate.models
    if config.dtype.name == "fp32":
        return None
    if models != 1 and samples.choosing is None:
        log.warning(
            "evaluate.stop: decided has no effect without selection samples (evaluate.choice): "
            "models that stop at different places cannot be ranked; all samples are scored"
        )
        return None
    level = SIGNIFICANCE / (models or 1)
    return Plan(len(samples.reported), task.metric.limit(config.report), level)
