"""Hits of a model whose scoring may stop early, and the plan of the test.

A task only declares that its test is `sequential`; it does not depend on this module.
"""

from dataclasses import astuple, dataclass, replace
from typing import ClassVar

import numpy as np

from resnet8ptq.evaluation.sequential import StoppingPlan
from resnet8ptq.tasks.scoring.comparison import Comparison
from resnet8ptq.tasks.scoring.hits import Hits
from resnet8ptq.tasks.scoring.metric import Metric, Metrics, name_ends
from resnet8ptq.tasks.scoring.outputs import Array
from resnet8ptq.tasks.scoring.statistics import UNKNOWN, Interval, Margin, Values
from resnet8ptq.tasks.scoring.values import (
    SAMPLES,
    Arrays,
    Paired,
    PairedTest,
    SampleValues,
    check_columns,
)

PLAN = "plan"  # the array of `predictions.npz` with the plan
PLANNED = "stopping/planned"  # the metric with the number of planned samples
STOPPED_LOSS = "stopping/loss"  # the metric with the loss, corrected for the interim analyses
# The accepted samples and level of a plan that is read from a file
MOST = 2**40
LEAST = 1e-9


@dataclass(frozen=True)
class StoppedHits(SampleValues):
    """Hits on the first samples, with tests of the loss that allow for the interim analyses."""

    hits: Hits
    plan: StoppingPlan

    shared: ClassVar[tuple[str, ...]] = Hits.shared

    def _changes(self, baseline: SampleValues) -> tuple[int, int, int]:
        assert isinstance(baseline, Hits)  # FP32 scores all samples
        return self.hits.changes(baseline)

    @property
    def interval(self) -> Interval:
        """95% interval of the accuracy, not corrected for the interim analyses."""
        return self.hits.interval

    def against(self, other: SampleValues) -> tuple[Interval, float]:
        """Return interval and p-value of the accuracy minus FP32's, by the stage-wise ordering."""
        changes = self._changes(other)
        low, high = self.plan.interval(*changes)
        equal = self.plan.margin(*changes, 0.0)
        return (-high, -low), min(1.0, 2 * min(equal.p_within, equal.p_beyond))

    def margin(self, baseline: SampleValues, metric: Metric, limit: float, items: int) -> Margin:
        """Return the margin of the loss in accuracy, corrected for the interim analyses."""
        return self.plan.margin(*self._changes(baseline), limit)

    def margin_over(self, other: SampleValues, metric: Metric, limit: float, items: int) -> Margin:
        """Return an unknown margin, because the plan corrects only the loss against FP32."""
        return UNKNOWN

    def metrics(self, baseline: SampleValues) -> Metrics:
        """Return the number of planned samples, and the corrected loss with its interval."""
        changes = self._changes(baseline)
        loss = {PLANNED: self.plan.total, STOPPED_LOSS: self.plan.estimate(*changes)}
        return loss | name_ends(STOPPED_LOSS, self.plan.interval(*changes))

    def losses(self, baseline: SampleValues) -> Values | None:
        """Return the loss of each scored sample, see `Hits.losses`."""
        assert isinstance(baseline, Hits)
        return self.hits.losses(baseline)

    def by_class(self, baseline: SampleValues, classes: int) -> list[float]:
        """Return a p-value of 1 by class, because the plan corrects no tests of single classes."""
        return [1.0] * classes

    def found_by_class(self, baseline: SampleValues, classes: int, level: float) -> list[float]:
        """Return the detectable loss on each class with samples, see `Hits.found_by_class`."""
        assert isinstance(baseline, Hits)
        return self.hits.found_by_class(baseline, classes, level)

    def arrays(self) -> dict[str, Array]:
        """Return predictions, labels, and the plan."""
        return {**self.hits.arrays(), PLAN: np.array(astuple(self.plan), np.float64)}


def stop(comparison: Comparison, plan: StoppingPlan) -> Comparison:
    """Return a comparison whose tests are corrected for this plan."""
    return replace(comparison, stopped=StoppedHits(comparison.model.per_sample, plan))


def find_outcome(comparison: Comparison) -> str:
    """Return the reason to stop scoring here, see `StoppingPlan.outcome`; empty to continue."""
    stopped = comparison.stopped
    assert isinstance(stopped, StoppedHits)  # `stop` made the comparison
    return stopped.plan.outcome(*stopped.hits.changes(comparison.baseline.per_sample))


def read_pair(test: PairedTest, arrays: Arrays) -> Paired:
    """Return the values in `predictions.npz` or `choice.npz`, with the plan if the file has one.

    Raises:
        KeyError, ValueError: the arrays are those of another task, or damaged.
    """
    model = test.read_values(arrays, "")
    baseline = test.read_values(arrays, "baseline_")
    samples = arrays.get(SAMPLES)
    if samples is not None:
        check_columns([samples], "u")
    if test.sequential and PLAN in arrays:
        assert isinstance(model, Hits)  # a sequential test requires these
        model = StoppedHits(model, _read_plan(arrays[PLAN], len(model.labels)))
    return Paired(model, baseline, samples)


def _read_plan(array: Array, seen: int) -> StoppingPlan:
    """Return the plan from a stored array.

    Raises:
        ValueError: the array is not a plan, or its plan has no analysis after `seen` samples.
    """
    if array.shape != (3,) or array.dtype != np.float64 or not np.isfinite(array).all():
        raise ValueError("not a plan")
    total, limit, level = array.tolist()
    plan = StoppingPlan(int(total), limit, level)
    if not 0 < total <= MOST or not abs(limit) < 1 or not LEAST <= level < 0.5:
        raise ValueError("not a plan")
    if seen not in plan.ends:
        raise ValueError("not the samples of an interim analysis of its plan")
    return plan
