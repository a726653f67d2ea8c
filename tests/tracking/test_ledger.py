"""Earlier runs on the same samples are counted, those of the same sweep are not."""

import numpy as np
import pytest

from resnet8ptq.tracking import history, ledger
from resnet8ptq.tracking.ledger import EarlierRuns
from resnet8ptq.tracking.run import start_parent
from tests.helpers.logged_runs import log_everything
from tests.helpers.stores import new_store


@pytest.mark.slow
def test_runs_before_the_sweep_count_and_its_own_do_not(tmp_path, monkeypatch):
    store = new_store(tmp_path / "mlruns")
    first = log_everything(store, tmp_path / "0")
    [record] = history.load_runs(store, [first]).values()
    assert ledger.count_earlier(store, [record]) == EarlierRuns(0)
    deleted = log_everything(store, tmp_path / "1")
    store.client.delete_run(deleted)
    parent = start_parent(store, "sweep", tmp_path, {})
    for number in (2, 3):
        log_everything(store, tmp_path / str(number), parent)
    children = history.load_children(store, parent)
    assert ledger.count_earlier(store, children) == EarlierRuns(2)  # also the deleted one
    last = log_everything(store, tmp_path / "4")
    [record] = history.load_runs(store, [last]).values()
    assert ledger.count_earlier(store, [record]) == EarlierRuns(4)
    monkeypatch.setattr(ledger, "MOST", 2)
    assert ledger.count_earlier(store, children) == EarlierRuns(2, more=True)


def test_a_sketch_finds_shared_samples_in_any_order():
    ids = np.random.default_rng(0).integers(0, 2**64, 1000, np.uint64)
    small, other = ledger.read_sketch(ledger.sketch(ids[:300])), np.uint64(7)
    assert len(small) == ledger.KEPT
    assert np.isin(small, ids[::-1]).all()
    assert not np.isin(ledger.read_sketch(ledger.sketch(ids[500:])), ids[:500]).any()
    assert ledger.read_sketch(ledger.sketch(np.array([other, other]))).tolist() == [7]
    for damaged in ("xyz", "0" * 15, "0" * 16 * 65, "'; DROP"):
        assert len(ledger.read_sketch(damaged)) == 0


def test_a_run_on_some_of_the_samples_counts(tmp_path):
    store, ids = new_store(tmp_path / "mlruns"), np.arange(10, dtype=np.uint64)
    first, second = (log_everything(store, tmp_path / name) for name in "ab")
    for run_id, part in ((first, ids[:4]), (second, ids)):
        store.client.set_tag(run_id, "test_digest", f"{len(part):064x}")
        store.client.set_tag(run_id, "sample_sketch", ledger.sketch(part))
    record = history.load_run(store, second)
    assert ledger.count_earlier(store, [record]) == EarlierRuns(0)
    looks = ledger.count_earlier(store, [record], ids)
    assert looks.count == 1 and [other.run_id for other in looks.others] == [first]
    assert ledger.count_earlier(store, [record], ids[4:]) == EarlierRuns(0)


def test_a_later_run_is_not_earlier(tmp_path):
    store = new_store(tmp_path / "mlruns")
    first, second = (log_everything(store, tmp_path / name) for name in "ab")
    counts = [ledger.count_earlier(store, [history.load_run(store, i)]) for i in (first, second)]
    assert counts == [EarlierRuns(0), EarlierRuns(1)]


def test_all_runs_are_earlier_than_a_run_that_the_store_lacks(tmp_path):
    store = new_store(tmp_path / "mlruns")
    record = history.load_run(store, log_everything(store, tmp_path / "a"))
    lacking = record.changed(run_id="0", tags={**record.tags, "record": "0"})
    assert ledger.count_earlier(store, [lacking]) == EarlierRuns(1)


def test_a_digest_of_a_stranger_is_no_query(tmp_path):
    store = new_store(tmp_path / "mlruns")
    run_id = log_everything(store, tmp_path / "0")
    store.client.set_tag(run_id, "test_digest", "' OR 1=1")
    assert ledger.count_earlier(store, history.find_runs(store, "")) == EarlierRuns(0)


def test_runs_after_a_run_that_the_sweep_has_taken_over_are_earlier(tmp_path):
    store = new_store(tmp_path / "mlruns")
    shared, _ = (log_everything(store, tmp_path / name) for name in "ab")
    parent = start_parent(store, "sweep", tmp_path, {})
    own = log_everything(store, tmp_path / "c", parent)
    records = [history.load_run(store, run_id) for run_id in (shared, own)]
    assert ledger.count_earlier(store, records) == EarlierRuns(1)
