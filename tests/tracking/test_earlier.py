"""Tests of the metrics of runs that were logged before metrics had groups."""

import json

from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.tasks.contract import CHOICE
from resnet8ptq.tracking import earlier
from resnet8ptq.tracking.record import RunRecord

EARLIER = {
    **{"accuracy": 0.875, "baseline_accuracy": 0.9, "delta": -0.025, "drop": 0.025},
    **{"total": 1000.0, "correct": 875.0, "p_value": 0.5, "size_bytes": 100.0},
    **{"baseline_size_bytes": 400.0, "size_reduction": 0.75, "quantize_s": 2.0},
    **{"ci95_low": 0.8, "ci95_high": 0.95, "delta_ci95_low": -0.05, "delta_ci95_high": 0.0},
    **{"choice_accuracy": 0.5, "choice_baseline_accuracy": 0.6, "choice_total": 200.0},
    **{"accuracy_cat": 0.7, "delta_cat": -0.25, "baseline_correct": 900.0},
}
TAGS = {"class_names": json.dumps(["cat", "dog"])}


def test_an_earlier_run_reads_as_one_of_today():
    record = RunRecord("id", {}, earlier.rename(EARLIER, TAGS), TAGS)
    metric = record.task.metric
    assert (record.total, record.p_value, record.size_reduction) == (1000, 0.5, 0.75)
    assert record.delta(metric) == 0.875 - 0.9
    assert record.value(metric, CHOICE) == 0.5
    assert (record.interval("value"), record.interval("delta")) == ((0.8, 0.95), (-0.05, 0))
    kept = record.metrics
    assert (kept["choice/counts/total"], kept["choice/baseline/accuracy"]) == (200, 0.6)
    assert (kept["baseline/counts/correct"], kept["class/cat/drop"]) == (900, 0.25)
    assert kept["system/quantize_s"] == 2


@given(st.dictionaries(st.text(min_size=1), st.floats(allow_nan=False)), st.text())
def test_metrics_of_today_stay_as_they_are(metrics, text):
    today = {**metrics, "counts/total": 10.0}
    assert earlier.rename(today, {"class_names": text}) == today
    earlier.rename({**metrics, "total": 10.0}, {"class_names": text})  # a store may hold anything
