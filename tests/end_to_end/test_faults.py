"""Disks that are full or read-only, and files that are damaged: one line each, and nothing lost.

Killed processes are in test_resume.py and test_sync.py, damaged cache entries in test_cache.py,
damaged batches in test_cifar10.py.
"""

import errno
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from mlflow import MlflowClient
from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.exc import OperationalError

from resnet8ptq import dispatch
from resnet8ptq.config.schema import TrackingConfig
from resnet8ptq.core import cache
from resnet8ptq.core.errors import ConfigError, ModelError, PtqError, TrackingError
from resnet8ptq.experiment.settings import resolve
from resnet8ptq.tracking.journal import Journal
from resnet8ptq.tracking.mlflow_store import sync, upload
from resnet8ptq.tracking.mlflow_store.store import Store, open_store
from tests.helpers.calling import NO_REAL_FILES, QUICK, call
from tests.helpers.configs import make_config
from tests.helpers.logged_runs import log_everything, only_run
from tests.helpers.stores import new_store


class Disk:
    """A small file system of a test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        with self._filler.open("wb") as file:
            while True:
                try:
                    os.write(file.fileno(), bytes(4096))
                except OSError:
                    break

    def empty(self) -> None:
        self._filler.unlink()

    def make_read_only(self) -> None:
        subprocess.run(["mount", "-o", "remount,ro", self.folder], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield Disk(folder)
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def store_on_disk(disk: Disk) -> Store:
    return new_store(disk.folder)


def test_a_full_store_leaves_the_run_in_its_folder(disk, store_on_disk, tmp_path, caplog):
    earlier = log_everything(store_on_disk, tmp_path / "earlier")
    disk.fill()
    log_everything(store_on_disk, tmp_path / "run")
    assert f"TRACKING STORE UNAVAILABLE: the run is kept in {tmp_path / 'run'}" in caplog.text
    assert Journal.load(tmp_path / "run").metrics["loss"] == 1 / 3
    assert only_run(store_on_disk).info.run_id == earlier

    disk.empty()
    assert sync.sync(store_on_disk, tmp_path).logged == [tmp_path / "run"]
    runs = store_on_disk.client.search_runs([store_on_disk.experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED"] * 2
    assert [run.data.metrics["loss"] for run in runs] == [1 / 3] * 2
    assert sync.sync(store_on_disk, tmp_path).logged == []


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_store_that_cannot_be_written_is_refused_at_the_start(disk, fault):
    if fault == "full":
        disk.fill()
    else:
        disk.make_read_only()
    with pytest.raises(TrackingError, match=r"^tracking\.") as caught:
        open_store(TrackingConfig(root=str(disk.folder)))
    assert "\n" not in str(caught.value)
    assert not (disk.folder / "mlflow.db").exists()


def test_a_store_that_is_full_when_a_sweep_starts_is_one_line(tmp_path, monkeypatch):
    """The database is there and takes nothing more: SQLite's own words for it."""

    def fail(*_: object, **__: object) -> None:
        original = sqlite3.OperationalError("database or disk is full")
        raise OperationalError("INSERT INTO runs VALUES (?)", {}, original)

    monkeypatch.setattr(MlflowClient, "create_run", fail)
    done = call(tmp_path, "-m", *QUICK, "dtype=int8,uint8", **NO_REAL_FILES)
    assert done.code == 1
    *_, line = done.err.splitlines()
    assert line.startswith(f"error: tracking.root: no space left on the disk of {tmp_path}")


def without_waiting(
    _connection: object, _cursor: object, statement: str, parameters: object, *_: object
) -> tuple[str, object]:
    """Replace MLflow's 20 seconds of waiting for a lock."""
    return statement.replace("busy_timeout = 20000", "busy_timeout = 0"), parameters


def test_a_locked_database_loses_nothing(own_store, tmp_path, monkeypatch, caplog):
    """Another program holds the database in the middle of a run; nobody waits for it here."""
    path = own_store.uri.removeprefix("sqlite:///")
    other = sqlite3.connect(path, isolation_level=None)
    log_datasets = upload.log_datasets

    def lock_before(*arguments: Any) -> None:
        if not other.in_transaction:
            other.execute("BEGIN EXCLUSIVE")
        log_datasets(*arguments)

    monkeypatch.setattr(upload, "log_datasets", lock_before)
    event.listen(Engine, "before_cursor_execute", without_waiting, retval=True)
    try:
        log_everything(own_store, tmp_path / "run")
    finally:
        event.remove(Engine, "before_cursor_execute", without_waiting)
        other.close()
    warnings = [line for line in caplog.messages if "TRACKING STORE UNAVAILABLE" in line]
    assert {"\n" in line for line in warnings} == {False}
    assert f"the run is kept in {tmp_path / 'run'}" in warnings[0] and "locked" in warnings[0]
    assert Journal.load(tmp_path / "run").status == "FINISHED"

    monkeypatch.setattr(upload, "log_datasets", log_datasets)
    assert sync.sync(own_store, tmp_path).logged == [tmp_path / "run"]
    logged = only_run(own_store)
    assert (logged.info.status, logged.data.metrics["loss"]) == ("FINISHED", 1 / 3)
    assert len(logged.inputs.dataset_inputs) == 2


@pytest.mark.parametrize("fault", ["own", "handed on"])
def test_a_full_cache_is_named_whatever_library_says_so(tmp_path, fault):
    def make(folder: Path) -> None:
        full = OSError(errno.ENOSPC, "No space left on device", str(folder / "model.onnx"))
        if fault == "own":
            raise full
        raise ModelError(f"model.h5: cannot be converted (RuntimeError: {full})")

    with pytest.raises(ConfigError, match=rf"^cache_dir: cannot write to {tmp_path}.*No space"):
        cache.entry(tmp_path, "models", {"a": 1}, make)
    assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] == []


def test_a_cache_that_is_removed_in_a_run_is_named(cache_root, monkeypatch):
    settings = resolve(make_config("data=shapes", f"cache_dir={cache_root}"))

    def run_without(root: Path) -> None:
        def experiment(*_: object) -> None:
            (root / "models" / "gone.onnx").read_bytes()

        monkeypatch.setattr(dispatch, "resolve_name", lambda _: experiment)
        dispatch.run_or_analyse(settings, cache_root, mock.Mock())

    with pytest.raises(PtqError, match=rf"^cache_dir: {cache_root}/models/gone\.onnx was removed"):
        run_without(cache_root)
    with pytest.raises(FileNotFoundError):
        run_without(cache_root.parent / "elsewhere")


def test_a_full_cache_is_named_and_keeps_nothing_half_made(disk):
    def make(folder: Path) -> None:
        (folder / "model.onnx").write_bytes(bytes(1_000_000))

    disk.fill()
    with pytest.raises(ConfigError, match=rf"^cache_dir: .*{disk.folder}.*No space left"):
        cache.entry(disk.folder, "models", {"a": 1}, make)
    assert [path.name for path in disk.folder.iterdir() if path.is_dir()] in ([], ["models"])
    disk.empty()
    made = cache.entry(disk.folder, "models", {"a": 1}, make)
    assert (made / "model.onnx").stat().st_size == 1_000_000
    assert [path for path in made.parent.iterdir() if path.is_dir()] == [made]


@pytest.mark.slow
def test_a_run_on_a_full_disk_fails_in_one_line_and_is_on_record(disk, tmp_path):
    disk.fill()
    (disk.folder / "filler").write_bytes(bytes(3_900_000))  # 300 kB are left; the network has 320
    result = call(
        tmp_path, *QUICK, "dtype=fp32", f"hydra.run.dir={disk.folder}/run", **NO_REAL_FILES
    )
    assert result.code == 1
    (error,) = result.errors
    assert "No space left on device" in error
    assert "Traceback" not in result.err
    (run,) = result.runs
    assert (run.info.status, run.data.tags["status"]) == ("FAILED", "failed")
    assert "No space left on device" in run.data.tags["reason"]
    assert run.data.metrics == {}
    assert not list((disk.folder / "run").glob("model.*"))


@pytest.mark.slow
def test_a_run_in_a_read_only_folder_is_one_line(disk, tmp_path):
    disk.make_read_only()
    result = call(
        tmp_path, *QUICK, "dtype=fp32", f"hydra.run.dir={disk.folder}/run", **NO_REAL_FILES
    )
    assert result.code == 2
    (error,) = result.errors
    assert f"Read-only file system: '{disk.folder}/run'" in error
    assert "Traceback" not in result.err


@pytest.mark.parametrize("launcher", ["basic", "processes"])
def test_a_sweep_with_a_read_only_cache_starts_no_job(disk, tmp_path, launcher):
    disk.make_read_only()
    words = (*QUICK, "dtype=int8,uint8", f"hydra/launcher={launcher}")
    cached = {**NO_REAL_FILES, "RESNET8PTQ_CACHE": str(disk.folder / "cache")}
    result = call(tmp_path, "-m", *words, **cached)
    assert result.code == 2
    (error,) = result.errors
    assert error.startswith(f"error: cache_dir: cannot write to {disk.folder}/cache")
    assert "job 1" not in result.err
    assert result.out == ""
    assert not (tmp_path / "mlruns").exists()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def overwrite(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[:4096] = bytes(4096)
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, overwrite])
def test_a_damaged_database_is_refused_and_can_be_made_again_from_the_folders(tmp_path, damage):
    root = tmp_path / "mlruns"
    log_everything(new_store(root), tmp_path / "runs" / "run")
    damage(root / "mlflow.db")
    with pytest.raises(TrackingError, match=r"is damaged; move it away, and `python") as caught:
        open_store(TrackingConfig(root=str(root)))
    assert "\n" not in str(caught.value)

    # Elsewhere: this process still has the damaged file open.
    fresh = new_store(tmp_path / "fresh")
    assert sync.sync(fresh, tmp_path / "runs").logged == [tmp_path / "runs" / "run"]
    result = only_run(fresh)
    assert (result.info.status, result.data.metrics["loss"]) == ("FINISHED", 1 / 3)
    names = [item.path for item in fresh.client.list_artifacts(result.info.run_id)]
    assert names == ["result.json"]
