"""Families are read from a store: values of each sample, ranges, earlier runs."""

import json
import math
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from resnet8ptq.report import equal_files, loading
from resnet8ptq.report.families import Cell
from resnet8ptq.tasks.scoring.hits import MCNEMAR, Hits
from resnet8ptq.tracking import history, ledger
from resnet8ptq.tracking.mlflow_store.store import Store
from resnet8ptq.tracking.record import RunRecord
from tests.helpers.cells import (
    BASELINE,
    LABELS,
    amend_record,
    predictions,
    record,
)
from tests.helpers.logged_runs import log_everything
from tests.helpers.stores import new_store


def test_families_are_read_and_tested_apart(tmp_path, monkeypatch):
    ranges = {"activations": {"x": [-1.0, 2.0], "zero": [0, 0]}, "weights": {"w": [-0.5, 0.5]}}
    (tmp_path / "ranges.json").write_text(json.dumps(ranges))
    model = predictions(lost=25, label=1)
    arrays = {"predictions": model, "baseline_predictions": BASELINE, "labels": LABELS}
    np.savez(tmp_path / "predictions.npz", **arrays)
    monkeypatch.setattr(history, "artifact", lambda store, run, name: nullcontext(tmp_path / name))

    first, other = record("a", model), record("b", model, dtype="uint8")
    failed = RunRecord.of("c", first.params, {}, {"status": "failed"})
    first = amend_record(first, tags={"test_digest": "1"})
    failed = amend_record(failed, tags={"test_digest": "1"})
    other = amend_record(other, tags={"test_digest": "2"})
    one, two = loading.load_families(None, [first, failed, other])
    cell, unread = one.cells
    assert one.measured == [cell]
    assert unread == Cell(failed, unread.label)
    assert cell.ranges == ranges
    assert cell.paired is not None
    for hits, predicted in ((cell.paired.model, model), (cell.paired.baseline, BASELINE)):
        assert isinstance(hits, Hits)
        assert np.array_equal(hits.predictions, predicted)
        assert np.array_equal(hits.labels, LABELS)
    assert cell.worse_classes == two.cells[0].worse_classes == ("dog",)
    (p,), (other_p,) = (equal_files.adjusted_p(family.records).values() for family in (one, two))
    assert p == other_p == pytest.approx(2 * 0.5**25)


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.bool_])
@pytest.mark.parametrize("name", ["predictions", "baseline_predictions", "labels"])
def test_predictions_are_an_integer_for_each_image(tmp_path, name, dtype):
    good = {key: np.arange(3) for key in ("predictions", "baseline_predictions", "labels")}
    for wrong in (np.arange(3).astype(dtype), np.arange(4), np.arange(3)[None]):
        np.savez(tmp_path / "predictions.npz", **{**good, name: wrong})
        with pytest.raises(ValueError, match="not one number for each item"):
            loading._read_predictions(MCNEMAR, tmp_path / "predictions.npz", {})


@pytest.mark.parametrize("kind", ["activations", "weights"])
@pytest.mark.parametrize("ends", [(1, 0), (math.nan, 0), (0, math.nan)])
def test_a_range_that_is_read_has_an_inside(tmp_path, kind, ends):
    ranges = {"activations": {"x": [0, 1]}, "weights": {"w": [0, 1]}}
    ranges[kind]["y"] = list(ends)
    (tmp_path / "ranges.json").write_text(json.dumps(ranges))
    with pytest.raises(ValueError, match="a range with low > high"):
        loading._read_ranges(tmp_path / "ranges.json")


def log_scored(store: Store, folder: Path, ids: np.ndarray) -> str:
    """Log a run that was scored on the samples with these numbers."""
    run_id = log_everything(store, folder)
    count = len(ids)
    arrays = {"predictions": BASELINE, "baseline_predictions": BASELINE, "labels": LABELS}
    np.savez(folder / "predictions.npz", samples=ids, **{k: a[:count] for k, a in arrays.items()})
    (folder / "ranges.json").write_text('{"activations": {}, "weights": {}}')
    measured = {"accuracy": 0.9, "counts/total": float(count)}
    (folder / "result.json").write_text(json.dumps({"metrics": measured}))
    for name in ("predictions.npz", "ranges.json", "result.json"):
        store.client.log_artifact(run_id, str(folder / name))
    store.client.set_tag(run_id, "test_digest", f"{count:064x}")
    store.client.set_tag(run_id, "sample_sketch", ledger.sketch(ids))
    return run_id


def test_samples_that_earlier_runs_have_not_scored_are_found(tmp_path):
    store, ids = new_store(tmp_path / "mlruns"), np.arange(900, dtype=np.uint64)
    first = log_scored(store, tmp_path / "a", ids[:500])
    second = log_scored(store, tmp_path / "b", ids[::-1])
    families = loading.load_families(store, [history.load_named(store, "run_id", second)])
    [family] = loading.add_earlier_runs(store, families)
    assert family.earlier_runs.count == 1
    assert family.added is not None
    np.testing.assert_array_equal(family.added, ids[::-1] >= 500)
    for path in tmp_path.glob(f"mlruns/**/{first}/artifacts/predictions.npz"):
        path.unlink()
    [family] = loading.add_earlier_runs(store, families)
    assert (family.earlier_runs.count, family.added) == (1, None)
