"""The metrics that MLflow shows: few, in the units of a table, with the exact ones in a file."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.core.errors import TrackingError
from resnet8ptq.tasks import registry
from resnet8ptq.tracking import details, history, metrics
from resnet8ptq.tracking.journal import Journal
from resnet8ptq.tracking.mlflow_store import upload
from resnet8ptq.tracking.run import start_run
from tests.helpers import cells
from tests.helpers.logged_runs import log_measured, only_run

MEASURED = {
    "accuracy": 0.867535,
    "drop": 0.0045097,
    "size_bytes": 110_512.0,
    "latency_p50_ms": 0.4208765,
    "speedup": 0.8216,
    "baseline/accuracy": 0.872044,
    "baseline/latency_p50_ms": 0.34580,
    "counts/total": 9980.0,
    **{f"class/{number}/drop": 0.1 for number in range(50)},
}


def journal_of(values: dict[str, float], parent_id: str | None = None, **params: str) -> Journal:
    journal = Journal("run", "x", parent_id, start_ms=0, params=params)
    journal.note(values)
    return journal


def shown_of(journal: Journal) -> dict[str, float]:
    return {key: value for key, value, _, _ in metrics.select(journal)}


def test_units_are_those_of_a_table():
    shown = shown_of(journal_of(MEASURED))
    assert list(shown.items())[:3] == [
        ("accuracy_percent", 86.75),
        ("loss_points", 0.45),
        ("size_kb", 110.5),
    ]
    assert shown["unquantized/accuracy_percent"] == 87.2
    assert (shown["accuracy"], shown["size_bytes"]) == (0.867535, 110_512)
    assert not [key for key in shown if key.startswith("class/")]


def test_few_classes_have_their_accuracy_in_the_store():
    classes = {f"class/{number}/accuracy": 0.5 for number in range(10)}
    few = shown_of(journal_of(MEASURED | classes, "parent"))
    assert few.items() >= classes.items()
    assert len(few) + len(metrics.LATENCIES) <= metrics.MOST
    many = shown_of(journal_of(MEASURED | classes | {"class/10/accuracy": 0.5}, "parent"))
    assert not classes.keys() & many.keys()


def test_a_job_of_a_sweep_has_no_latency_before_the_turns():
    assert not [key for key in shown_of(journal_of(MEASURED, "parent")) if "latency" in key]
    alone = shown_of(journal_of(MEASURED))
    assert alone["timed_alone/latency_ms"] == 0.421
    assert "latency_ms" not in alone and "speedup" not in alone


def test_latencies_of_the_turns_are_read_back():
    shown = metrics.show_latencies(MEASURED)
    assert shown == {"latency_ms": 0.421, "speedup": 0.82, "unquantized/latency_ms": 0.346}
    assert metrics.read_latencies(shown | {"timed_alone/latency_ms": 9.0}) == {
        "latency_p50_ms": 0.421,
        "speedup": 0.82,
        "baseline/latency_p50_ms": 0.346,
    }


@pytest.mark.parametrize("task", registry.TASKS)
def test_every_task_leads_with_its_metric_and_loss(task):
    params = {"scored_as": task}
    if task == "custom":
        params["task.metric._target_"] = "numpy.mean"
    metric = registry.recall(params).metric
    values = {metric.name: 0.5, "drop": 0.25, "size_bytes": 1000.0}
    first, second, third = list(shown_of(journal_of(values, **params)).items())[:3]
    assert first == ((f"{metric.name}_percent", 50) if metric.percent else (metric.name, 0.5))
    assert second[0] in ("loss_points", "loss", "loss_percent")
    assert second[1] == (0.25 if second[0] == "loss" else 25)
    assert third == ("size_kb", 1)


NAMES = st.sampled_from([*MEASURED, *(f"sensitivity/sqnr_db/{n}" for n in range(60))])


@given(st.dictionaries(NAMES, st.floats()), st.integers(0, 40))
def test_at_most_30_metrics_are_shown_with_the_curves(values, curves):
    journal = journal_of(values)
    for step in range(2):
        journal.note({f"qat/{number}": 1.0 for number in range(curves)}, step)
    keys = {key for key, *_ in metrics.select_curves(journal)} | shown_of(journal).keys()
    assert len(keys) <= max(metrics.MOST, curves)


def test_a_reader_gets_the_exact_values_back(own_store, tmp_path):
    run_id = log_measured(own_store, tmp_path / "run", None, 1, lost=7)
    logged = only_run(own_store)
    assert logged.data.metrics["accuracy_percent"] == 89.3
    assert len(logged.data.metrics) <= 30 and len(logged.data.params) <= 25
    record = history.load_named(own_store, "run_id", run_id)
    kept = json.loads((tmp_path / "run" / "result.json").read_text())
    assert kept["metrics"] == record.metrics
    assert kept["params"].items() <= record.params.items()
    assert record.metrics["accuracy"] == 0.893
    assert record.class_names == cells.NAMES


@pytest.mark.parametrize(
    "content",
    [None, "", "[]", '{"metrics": 3}', '{"metrics": {"a": "b"}}', '{"params": {"a": 1}}'],
)
def test_a_run_without_its_result_says_so(own_store, tmp_path, content):
    log_measured(own_store, tmp_path / "run", None, 1)
    logged = only_run(own_store)
    path = own_store.locate(f"{logged.info.artifact_uri}/{details.FILE}")
    assert path is not None
    path.unlink()
    if content is not None:
        path.write_text(content)
    record = history.find_newest(own_store)
    assert record is not None and details.FILE in record.unread


def test_a_failed_run_looks_failed(own_store, tmp_path):
    with pytest.raises(TrackingError), start_run(own_store, "name", tmp_path):
        raise TrackingError("reason with [a link](http://x)")
    tags = only_run(own_store).data.tags
    assert (tags["verdict"], tags["status"]) == ("failed", "failed")
    assert "[a link]" not in tags["mlflow.note.content"]  # escaped


def test_an_unavailable_value_is_refused_by_no_reader(own_store, tmp_path):
    """NaN and infinity, as a diverged run may have."""
    run_id = log_measured(own_store, tmp_path / "run", None, 1)
    upload.log_batch(own_store, run_id, [("latency_ms", float("nan"), 0, 0)])
    record = history.load_named(own_store, "run_id", run_id)
    assert np.isnan(record.metrics["latency_p50_ms"])
