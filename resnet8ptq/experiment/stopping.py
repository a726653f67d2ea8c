"""Stops scoring when a test decides, in runs (`evaluate.stop=decided`) and in search trials.

A run also stops when no decision is likely.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.data.dataset import Split
from resnet8ptq.evaluation.evaluator import Evaluator
from resnet8ptq.evaluation.sequential import StoppingPlan
from resnet8ptq.evaluation.stopped_hits import STOPPED_LOSS
from resnet8ptq.experiment.samples import SamplesByRole
from resnet8ptq.tasks.scoring.comparison import Comparison
from resnet8ptq.tasks.scoring.statistics import SIGNIFICANCE
from resnet8ptq.tasks.task import Task

log = logging.getLogger(__name__)


def make_stopping_plan(
    config: RunConfig, task: Task, samples: SamplesByRole, grouped: bool
) -> StoppingPlan | None:
    """Return the plan for an early stop; None for a run that scores all samples.

    FP32 scores all samples, because it has no verdict. So do several models, or an unknown number,
    without selection samples. The significance level is divided by the known number of models, or
    by `report.confirmations` if that is larger (Bonferroni), because a run does not know the
    p-values of the others.

    Args:
        grouped: whether samples of one group are scored as if they were independent.

    Raises:
        ConfigError: the task has no sequential test, samples of one group are not independent, or
            the task joins groups.
    """
    if config.evaluate.stop == "all":
        return None
    if not task.test.sequential:
        raise ConfigError(
            f"evaluate.stop: got decided, expected all with task={task.name}: the sequential test "
            "needs hits, such as those of task=classification and agreement"
        )
    if grouped or task.scope.joins_groups:
        raise ConfigError(
            "evaluate.stop: got decided, expected all with data.groups: the sequential test needs "
            "independent samples"
        )

    # Several models need selection samples that rank them
    models = config.evaluate.models
    if config.dtype.is_fp32:
        return None
    if models != 1 and samples.selection is None:
        log.warning(
            "evaluate.stop: decided has no effect without selection samples (evaluate.choice): "
            "models that stop at different places cannot be ranked; all samples are scored"
        )
        return None
    level = SIGNIFICANCE / max(models or 1, config.report.confirmations)
    return StoppingPlan(len(samples.reported), task.metric.limit(config.report), level)


@dataclass(frozen=True)
class TrialResult:
    """A trial of a search, measured on samples in random order.

    Attributes:
        value: the tie-adjusted metric.
        drop: loss of `value` against FP32; corrected for the interim analyses if scoring stopped.
        p: one-sided p-value of "the drop is at the limit or above".
        samples: number of scored samples, or of joined groups.
    """

    value: float
    drop: float
    p: float
    samples: int


def try_choice(
    evaluator: Evaluator, path: Path, samples: Split, limit: float, level: float | None
) -> TrialResult:
    """Measure a trial of a search until a test proves that its drop is within or beyond the limit.

    If the test does not decide, the trial is scored on all samples, because the measured drops
    decide if no trial is accepted. All samples are also scored for a task without a sequential
    test, and for samples in groups.

    Args:
        level: level of the sequential test; None scores all samples.
    """
    if level is None or not evaluator.task.test.sequential or samples.groups is not None:
        whole = evaluator.compare(path, samples, logits=False).comparison
        return TrialResult(
            value=whole.model.fair,
            drop=whole.loss(fair=True),
            p=p_of(whole, limit),
            samples=whole.model.total,
        )

    # Score until the test decides
    plan = StoppingPlan(len(samples), limit, level)
    seen = evaluator.compare_until(path, samples, plan, search=True).comparison
    stopped = seen.model.total < plan.total
    drop = seen.paired.metrics()[STOPPED_LOSS] if stopped else seen.loss(fair=True)
    return TrialResult(
        value=seen.model.fair,
        drop=drop or 0.0,
        p=seen.p_within(limit),
        samples=seen.model.total,
    )


def p_of(comparison: Comparison, limit: float) -> float:
    """Return the one-sided p-value of "the drop is at the limit or above".

    It is set to 1 if the measured drop is above the limit.
    """
    if comparison.loss(fair=True) > limit:
        return 1.0  # this saves a bootstrap
    return comparison.p_within(limit)
