"""A run's folder from others: `sync` reads it, and logs nothing but what lies in it."""

import json
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_plugins.resnet8ptq_launchers.slurm_jobs import SlurmJobs
from resnet8ptq.core.errors import JobError, TrackingError
from resnet8ptq.tracking import journal, params
from resnet8ptq.tracking.journal import Journal
from resnet8ptq.tracking.mlflow_store import mlflow_model, sync
from resnet8ptq.tracking.mlflow_store.store import Store
from resnet8ptq.tracking.record import RunRecord
from tests.helpers.logged_runs import log_everything, only_run

AWAY = Store("http://127.0.0.1:9", "0", "resnet8ptq")  # nobody listens there
ESCAPES = "theirs\x1b]0;title\x07\x1b[2J"

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
SAMPLES = {
    **{"name": "a", "source": "b", "digest": "c", "context": "test"},
    **{"samples": ("uint8", [2]), "targets": None},
}
MODEL = {"file": "model.onnx", "outputs": {"o": [10]}, "engine": None}


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder whose name would control a terminal."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    log_everything(AWAY, tmp_path / "runs" / ESCAPES)
    return tmp_path / "runs" / ESCAPES


def save(folder: Path, **changed: object) -> Journal:
    sound = {"name": "a", "experiment": "b", "key": "0", "datasets": [SAMPLES], "model": MODEL}
    (folder / journal.FILE).write_text(json.dumps({**sound, **changed}))
    return Journal.load(folder)


@given(st.sampled_from([field.name for field in fields(Journal)]), JSON)
def test_a_journal_holds_the_types_of_its_fields_or_is_refused(tmp_path_factory, name, value):
    folder = tmp_path_factory.mktemp("run")
    try:
        loaded = save(folder, **{name: value})
    except TrackingError as error:
        assert str(error).startswith(f"{folder / journal.FILE}: is damaged")
        return
    record = RunRecord.of_journal(loaded, folder)
    assert all(isinstance(text, str) for text in (record.name, *record.tags.values()))
    assert all(isinstance(text, str) for text in params.select(loaded).values())


@pytest.mark.parametrize(
    "kind",
    [["O", [2]], ["V1000000000000", [2]], ["uint8", [10**9] * 8], ["uint8", [-1]], ["<U9", 2]],
)
def test_arrays_of_a_journal_are_numbers_that_memory_could_hold(tmp_path, kind):
    assert [asdict(described) for described in save(tmp_path).datasets] == [SAMPLES]
    for described in (kind, {"input": kind}):
        with pytest.raises(TrackingError, match=r"record\.json: is damaged"):
            save(tmp_path, datasets=[{**SAMPLES, "samples": described}])


def test_a_link_in_a_run_is_not_logged(theirs, tmp_path, own_store):
    (tmp_path / "secret.txt").write_text("secret")
    (theirs / "notes.txt").symlink_to(tmp_path / "secret.txt")
    sync.sync(own_store, tmp_path / "runs")
    names = [item.path for item in own_store.client.list_artifacts(only_run(own_store).info.run_id)]
    assert names == ["result.json"]


@pytest.mark.parametrize("name", ["model.onnx", mlflow_model.EXAMPLE])
def test_a_link_in_place_of_the_model_is_refused(tmp_path, monkeypatch, own_store, name):
    monkeypatch.setattr(mlflow_model, "find_model", lambda *_: None)
    for file in ("model.onnx", mlflow_model.EXAMPLE):
        (tmp_path / file).touch()
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/etc/passwd")
    with pytest.raises(TrackingError, match=f"{name}: is missing or a link"):
        mlflow_model.log_model(own_store, "1", save(tmp_path), tmp_path)


@pytest.mark.parametrize("name", ["model.onnx", mlflow_model.EXAMPLE])
def test_a_damaged_file_of_the_model_is_named(tmp_path, monkeypatch, own_store, name):
    monkeypatch.setattr(mlflow_model, "find_model", lambda *_: None)
    np.savez(tmp_path / mlflow_model.EXAMPLE, inputs=np.zeros((1, 4), np.float32))
    (tmp_path / "model.onnx").touch()
    (tmp_path / name).write_bytes(b"damaged")
    with pytest.raises(TrackingError, match=f"{name}: is damaged"):
        mlflow_model.log_model(own_store, "1", save(tmp_path), tmp_path)


def test_the_name_of_a_folder_steers_no_terminal(theirs, own_store, monkeypatch, capsys):
    monkeypatch.setattr(sync, "open_store", lambda _: own_store)
    sync.main([f"folder={theirs.parent}"])
    assert "theirs?]0;title??[2J" in capsys.readouterr().out


def test_a_folder_with_a_line_break_adds_no_command_to_the_script_of_sbatch(tmp_path):
    pytest.importorskip("submitit", reason="needs the extra slurm")
    settings = {"max_num_timeout": 0, "cpus_per_task": 1}
    for changed in ({"submitit_folder": f"{tmp_path}/a\ntouch b\n"}, {"name": "a\ntouch b"}):
        folder = {"submitit_folder": str(tmp_path / "jobs")}
        with pytest.raises(JobError, match=r"hydra/launcher=slurm: .*, expected one line"):
            SlurmJobs(**settings, **{**folder, **changed})._submit([])
