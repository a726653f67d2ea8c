"""The typed record of a run: the same from MLflow and from the run's folder."""

import math

import numpy as np
import pytest

from resnet8ptq.core.errors import TrackingError
from resnet8ptq.data.dataset import CalibrationSet, Dataset, Split
from resnet8ptq.deploy.registering import register
from resnet8ptq.deploy.source import SourceRun
from resnet8ptq.evaluation.result import RunResult
from resnet8ptq.evaluation.stopped_hits import PLANNED
from resnet8ptq.tasks.scoring.metric import BASELINE, CHOICE, TOTAL
from resnet8ptq.tracking import history
from resnet8ptq.tracking.journal import Journal
from resnet8ptq.tracking.mlflow_store import sync
from resnet8ptq.tracking.record import RunRecord
from resnet8ptq.tracking.run import start_parent, start_run
from tests.helpers.configs import make_config

ATTRIBUTES = (
    *("run_id", "name", "status", "key", "sweep_id", "job_number", "folder", "cpu", "ended"),
    *("samples_digest", "backend", "dtype", "model", "seed", "dataset", "combination"),
    *("samples", "size_bytes", "latency_ms", "held_out", "is_analysis", "quantized", "params"),
    "class_names",
)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e300])
def test_an_impossible_count_was_not_measured(value):
    """Whoever writes to a store may log any float."""
    keys = (TOTAL, PLANNED, "size_bytes", f"{BASELINE}size_bytes")
    record = RunRecord.of("1", {}, dict.fromkeys(keys, value), {})
    counts = (record.samples, record.samples_planned, record.size_bytes, record.fp32_size_bytes)
    assert counts == (None, None, None, None)
    assert RunRecord.of("1", {}, {TOTAL: 9.0, "size_bytes": 7.0}, {}).samples == 9


@pytest.mark.parametrize(
    ("key", "logged"),
    [
        ("tags.status", {"tags": {"status": 3}}),
        ("metrics.drop", {"metrics": {"drop": "0.5"}}),
        ("metrics.size_bytes", {"metrics": {"size_bytes": "7"}}),
        ("params.backend", {"params": {"backend": None}}),
        ("metrics", {"metrics": {"any": None}}),
    ],
)
def test_a_value_of_another_type_is_refused_in_one_line(key, logged):
    """Nothing is converted: whoever writes to a store may log anything."""
    with pytest.raises(TrackingError, match=f"run a: {key}") as refused:
        RunRecord.of(**({"run_id": "a", "params": {}, "metrics": {}, "tags": {}} | logged))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("run_id", ["", "a b", "../x", "a`", "a\n"])
def test_an_id_that_is_not_plain_is_refused(run_id):
    with pytest.raises(TrackingError, match="run_id: got"):
        RunRecord.of(run_id, {}, {}, {})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_was_not_measured(value):
    keys = ("drop", "latency_p50_ms", "speedup", "paired/p_value")
    record = RunRecord.of("a", {}, dict.fromkeys(keys, value), {})
    assert {record.loss, record.latency_ms, record.speedup, record.p_alone} == {None}
    assert not math.isfinite(record.metrics["drop"])  # as logged


def test_texts_of_a_store_are_printable():
    record = RunRecord.of("a", {"model": "a\x1b[31m\nb"}, {}, {"reason": "\u202egnp"})
    assert (record.model, record.reason) == ("a?[31m b", "?gnp")
    assert record.params["model"] == "a\x1b[31m\nb"


def test_a_run_has_the_same_record_in_mlflow_and_in_its_folder(own_store, tmp_path):
    parent = start_parent(own_store, "sweep", tmp_path, {})
    folder = tmp_path / "0"
    folder.mkdir()
    split = Split(np.zeros((10, 2, 2, 3), np.uint8), np.arange(10), "made up")
    data = Dataset("made up", ("a", "b"), split, split)
    with start_run(own_store, "a run", folder, parent, {"job_number": "3"}) as run:
        run.log_config(make_config("data=shapes", "dtype=uint8"))
        run.log_datasets(data, CalibrationSet(split, np.arange(10)), ("a", "b"))
        run.log_result(RunResult("ok", resolved={"weight_dtype": "uint8"}))
        assert not run.record.ended
    (stored,) = history.load_children(own_store, parent)
    (kept,) = sync.load_records(tmp_path)
    values = [[getattr(r, name) for name in ATTRIBUTES] for r in (stored, kept, run.record)]
    assert values[0] == values[1] == values[2]
    assert (stored.name, stored.dataset, stored.job_number) == ("a run", "made up", "3")
    assert (stored.status, stored.ended, stored.sweep_id) == ("ok", True, parent)
    assert stored.combination.name == "onnx-uint8-minmax-per_tensor"
    assert (stored.samples_digest, stored.class_names) == (split.digest, ("a", "b"))
    assert stored.task.name == "classification"


def test_a_job_number_that_somebody_damaged_counts_as_the_first(tmp_path):
    for name, number in (("a", "1"), ("b", "first")):
        tags = {"job_number": number}
        (tmp_path / name).mkdir()
        Journal(name, "experiment", parent_id="sweep", tags=tags).save(tmp_path / name)
    assert [record.name for record in sync.load_records(tmp_path)] == ["b", "a"]


def test_a_record_without_values_has_defaults():
    bare = RunRecord.of("id", {}, {}, {})
    assert (bare.status, bare.backend, bare.dataset, bare.reason) == ("?", "?", "?", "")
    assert (bare.samples, bare.loss, bare.interval("value")) == (None, None, None)
    assert not (bare.held_out or bare.is_analysis or bare.grouped)
    assert bare.select("seed", "dtype") == (None, None)


@pytest.mark.parametrize("prefix", ["", BASELINE, CHOICE])
def test_the_task_names_the_metric_of_a_record(prefix):
    record = RunRecord.of("id", {}, {f"{prefix}accuracy": 0.5}, {})
    assert record.value_of(record.task.metric, prefix) == 0.5
    assert math.isclose(RunRecord.of("id", {}, {"drop": 0.25}, {}).loss or 0, 0.25)


def test_a_run_without_a_logged_model_is_not_registered(own_store, tmp_path):
    with start_run(own_store, "a run", tmp_path) as run:
        pass
    source = SourceRun(run.record, make_config(), tmp_path / "model.onnx")
    with pytest.raises(TrackingError, match=f"run {run.run_id} has logged no model; try a new run"):
        register(own_store, source, "name")


def test_a_terminal_shows_a_run_in_one_line():
    run = RunRecord.of("id", {"dtype": "u8s8"}, {"accuracy": 0.9}, {"status": "ok"})
    assert "run_id='id'" in repr(run) and len(repr(run)) < 200
