"""Hits of a run that stopped early: their tests, and their arrays in `predictions.npz`."""

import numpy as np
import pytest

from resnet8ptq.evaluation.sequential import StoppingPlan
from resnet8ptq.evaluation.stopped_hits import StoppedHits, read_pair
from resnet8ptq.tasks.classification import ACCURACY
from resnet8ptq.tasks.scoring.hits import MCNEMAR, Hits
from resnet8ptq.tasks.scoring.statistics import UNKNOWN
from resnet8ptq.tasks.scoring.values import Paired

PLAN = StoppingPlan(2000, 0.01, 0.05)


def hits(lost: int, won: int, seen: int = 1000) -> tuple[Hits, Hits]:
    """Return the classes of a model and of FP32."""
    labels = np.zeros(seen, np.int64)
    model, baseline = labels.copy(), labels.copy()
    model[:lost], baseline[lost : lost + won] = 1, 1
    return Hits(model, labels), Hits(baseline, labels)


def test_hits_of_a_stopped_run_are_read_back_with_their_plan():
    model, baseline = hits(4, 2)
    stopped = StoppedHits(model, PLAN)
    arrays = {**stopped.arrays(), "baseline_predictions": baseline.predictions}
    read = read_pair(MCNEMAR, arrays)
    assert read.model.plan == PLAN and isinstance(read.baseline, Hits)
    margin = read.margin(ACCURACY, 0.01, 1000)
    assert margin == PLAN.margin(4, 2, 1000, 0.01)
    interval, p_value = stopped.against(baseline)
    assert interval[0] < -0.002 < interval[1] and 0.05 < p_value <= 1
    for pair in ((stopped, model), (model, stopped), (stopped, stopped)):  # of two runs
        ours, theirs = (Paired(values, baseline) for values in pair)
        assert ours.margin_over(theirs, ACCURACY, 0.01, 1000) == UNKNOWN
    assert stopped.by_class(baseline, 3) == [1.0] * 3


@pytest.mark.parametrize(
    "plan",
    [
        np.array([2000, 0.01]),
        np.array([2000, 0.01, np.nan]),
        np.array([2000, 0.01, 0.0]),
        np.array([2000, 3.0, 0.05]),
        np.array([2017, 0.01, 0.05]),  # 1,000 samples are no analysis of it
        np.array([1e300, 0.01, 0.05]),
        np.array(["2000", "0.01", "0.05"]),
    ],
)
def test_a_damaged_plan_is_refused(plan):
    model, baseline = hits(4, 2)
    arrays = {**model.arrays(), "baseline_predictions": baseline.predictions, "plan": plan}
    with pytest.raises(ValueError, match="plan"):
        read_pair(MCNEMAR, arrays)
