"""A store that is away: the run's folder keeps what it found, and `sync` logs it later, once."""

import json
import os
import re
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

from resnet8ptq.config.schema import TrackingConfig
from resnet8ptq.core import background
from resnet8ptq.core.errors import TrackingError
from resnet8ptq.tracking import history, journal
from resnet8ptq.tracking.journal import DataSet, Journal
from resnet8ptq.tracking.mlflow_store import sender, sync, upload
from resnet8ptq.tracking.mlflow_store.store import Store, _make_database, open_store
from resnet8ptq.tracking.run import Run, _start_journal, end_parent, start_parent, start_run
from tests.helpers.calling import NO_REAL_FILES, QUICK, call_beside
from tests.helpers.forked import call_process
from tests.helpers.logged_runs import log_everything, only_run
from tests.helpers.mlflow_server import Server
from tests.helpers.stores import copy_database, new_store

AWAY = Store("http://127.0.0.1:9", "0", "resnet8ptq")  # nobody listens there


@pytest.fixture
def store(own_store: Store) -> Store:
    return own_store


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


def test_what_is_logged_later_is_what_would_have_been_logged(store, tmp_path):
    """And once: a second call changes nothing."""
    log_everything(store, tmp_path / "there" / "run")
    direct = only_run(store)
    store.client.delete_run(direct.info.run_id)

    assert log_everything(AWAY, tmp_path / "away" / "run") == ""
    assert sync.sync(store, tmp_path / "away").logged == [tmp_path / "away" / "run"]
    for _ in range(2):
        later = only_run(store)
        assert later.info.status == direct.info.status == "FINISHED"
        assert later.data.params == direct.data.params
        assert later.data.metrics == direct.data.metrics
        own = {"folder", "record"}
        assert {k: v for k, v in later.data.tags.items() if k not in own} == {
            k: v for k, v in direct.data.tags.items() if k not in own
        }
        assert later.inputs.to_dictionary() == direct.inputs.to_dictionary()
        curve = store.client.get_metric_history(later.info.run_id, "loss")
        assert [(point.step, point.value) for point in curve] == [(0, 1.0), (1, 0.5), (2, 1 / 3)]
        names = [item.path for item in store.client.list_artifacts(later.info.run_id)]
        assert names == ["result.json"]
        assert later.info.end_time >= later.info.start_time
        assert str(sync.sync(store, tmp_path / "away")).startswith("0 runs logged")


def test_single_runs_without_an_id_are_logged_apart(store, tmp_path):
    for name in "ab":
        log_everything(AWAY, tmp_path / "runs" / name)
    assert not sync.sync(store, tmp_path / "runs").parents
    assert [record.sweep_id for record in history.find_runs(store, "")] == ["", ""]


def test_a_sweep_that_closes_waits_for_its_jobs_and_not_for_itself(store, tmp_path, monkeypatch):
    tmp_path.joinpath("0").mkdir()
    parent_id = start_parent(store, "sweep", tmp_path, {})
    waits = {}

    def spy(folder: Path, wait_s: float = 0) -> bool:
        waits[folder] = wait_s
        return True

    monkeypatch.setattr(journal, "is_alive", spy)
    with start_run(store, "job", tmp_path / "0", parent_id, {"job_number": "0"}):
        assert sync.sync(store, tmp_path, wait_s=10).running == [tmp_path, tmp_path / "0"]
    assert waits == {tmp_path: 0, tmp_path / "0": 10}


def test_a_store_that_goes_away_in_the_middle_gets_the_rest_when_it_is_back(
    store, tmp_path, monkeypatch, caplog
):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise MlflowException("API request failed: connection refused")

    log_batch = mlflow.MlflowClient.log_batch
    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", fail)
    monkeypatch.setattr(
        Run,
        "upload_folder",  # at the end of the run
        lambda _: monkeypatch.setattr(mlflow.MlflowClient, "log_batch", log_batch),
    )
    run_id = log_everything(store, tmp_path / "run")
    assert "TRACKING STORE UNAVAILABLE" in caplog.text
    result = only_run(store)
    assert result.info.run_id == run_id
    assert (result.info.status, result.data.tags["status"]) == ("FINISHED", "ok")
    assert result.data.params["weight_dtype"] == "int8"
    assert len(store.client.get_metric_history(run_id, "loss")) == 3
    assert sync.sync(store, tmp_path).logged == []


def test_a_run_that_a_store_refuses_is_one_error_and_is_logged_when_it_ends(
    store, tmp_path, monkeypatch
):
    def refuse(*args: Any) -> None:
        raise ValueError("refused")

    kept = _start_journal(store, "a run", None, {})
    with monkeypatch.context() as patched:
        patched.setattr(upload, "create_run", refuse)
        with pytest.raises(ValueError, match="refused"):
            sender.open_run(store, kept, tmp_path)
    sender.send(store, tmp_path, refuse)
    kept.end("FINISHED", {"status": "ok"})
    sender.close_run(store, kept, tmp_path)
    assert only_run(store).data.tags["status"] == "ok"


def test_a_run_that_a_store_refuses_is_kept_in_its_folder(store, tmp_path, monkeypatch, caplog):
    def refuse(*args: Any) -> None:
        raise ValueError("refused")

    monkeypatch.setattr(upload, "create_run", refuse)
    with background.allowed():
        assert log_everything(store, tmp_path / "run") == ""
    assert "refused" in caplog.text
    kept = Journal.load(tmp_path / "run")
    assert (kept.status, kept.run_id) == ("FINISHED", None)


def test_what_a_store_will_never_take_fails_the_run(store, tmp_path, monkeypatch):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise MlflowException("too long", error_code=INVALID_PARAMETER_VALUE)

    monkeypatch.setattr(mlflow.MlflowClient, "log_inputs", refuse)
    with pytest.raises(TrackingError, match="too long"):
        log_everything(store, tmp_path / "run")
    assert only_run(store).info.status == "FAILED"


def leave_open(store: Store, folder: Path) -> None:
    """Leave what a run leaves that is killed before it can close anything."""
    folder.mkdir(parents=True)
    kept = _start_journal(store, "killed", None, {"folder": str(folder)})
    run = Run(store, kept, folder)
    run.open()
    (folder / journal.LOCK).touch()


def test_a_killed_run_is_closed_and_a_running_one_left_alone(store, tmp_path):
    for name in ("killed", "running"):
        leave_open(store, tmp_path / name)
    with journal.lock(tmp_path / "running"):
        result = sync.sync(store, tmp_path)
    assert result.killed == [tmp_path / "killed"]
    assert result.running == [tmp_path / "running"]
    by_folder = {r.data.tags["folder"]: r for r in store.client.search_runs([store.experiment_id])}
    killed, running = by_folder[str(tmp_path / "killed")], by_folder[str(tmp_path / "running")]
    assert (killed.info.status, killed.data.tags["status"]) == ("KILLED", "killed")
    assert killed.data.tags["reason"] == "its process ended without an error message"
    assert (running.info.status, running.data.tags["status"]) == ("RUNNING", "running")


def test_a_run_that_was_deleted_is_not_logged_again(store, tmp_path):
    store.client.delete_run(log_everything(store, tmp_path / "run"))
    assert sync.sync(store, tmp_path).whole == [tmp_path / "run"]
    assert store.client.search_runs([store.experiment_id]) == []


def test_an_empty_store_takes_sweeps_with_their_runs(store, tmp_path):
    """The database was lost: the folders still have everything."""
    before = new_store(tmp_path / "lost")
    folder = tmp_path / "sweeps" / "one"
    folder.mkdir(parents=True)
    parent_id = start_parent(before, "a sweep", folder, {"overrides": "dtype=int8"})
    log_everything(before, folder / "0", parent_id)
    (folder / "report.md").write_text("# Report")
    (folder / "sweep.json").write_text("secret")
    end_parent(before, parent_id, "ok", folder)

    result = sync.sync(store, tmp_path / "sweeps")
    assert result.logged == [folder, folder / "0"]
    parent = history.find_parent(store)
    assert parent is not None
    (child,) = history.load_children(store, parent.run_id)
    assert child.metrics["loss"] == 1 / 3
    assert result.parents == {parent.run_id}
    assert [i.path for i in store.client.list_artifacts(parent.run_id)] == ["report.md"]


SOUND = {"name": "a", "experiment": "b", "key": "0"}


@pytest.mark.parametrize(
    "content",
    [
        *("", "{}", "[]", "\0", "[" * 100_000, '{"name": "a"}'),
        *(json.dumps({**SOUND, "key": value}) for value in (None, [], {}, 1.5)),
        json.dumps({**SOUND, "key": "0' or tags.kind != '"}),
        json.dumps({**SOUND, "model": {"file": "../../model.onnx"}}),
        json.dumps({**SOUND, "model": {"name": "model.onnx"}}),
        json.dumps({**SOUND, "points": [["loss", "x", 0, 0]]}),
    ],
)
def test_a_damaged_record_is_named_and_left_alone(store, tmp_path, content, caplog):
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / journal.FILE
    path.write_text(content)
    with pytest.raises(TrackingError, match=r"record\.json: is damaged") as caught:
        Journal.load(path.parent)
    assert "\n" not in str(caught.value)
    log_everything(AWAY, tmp_path / "sound")
    assert sync.sync(store, tmp_path).logged == [tmp_path / "sound"]
    assert f"{path}: is damaged" in caplog.text


def test_a_record_of_an_earlier_version_is_read(tmp_path):
    samples = DataSet("pets", "here", "d00d", "test", ("uint8", [10, 32, 32, 3]))
    Journal("a", "b", datasets=[samples]).save(tmp_path)
    path = tmp_path / journal.FILE
    path.write_text(path.read_text().replace('"samples"', '"images"'))
    assert Journal.load(tmp_path).datasets == [samples]


def test_two_runs_do_not_work_in_one_folder(store, tmp_path):
    with (
        journal.lock(tmp_path),
        pytest.raises(TrackingError, match="another run works here"),
        start_run(store, "second", tmp_path),
    ):
        pass
    assert store.client.search_runs([store.experiment_id]) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nope=1"], "expected experiment= | uri= | root= | folder="),
        (["folder=x"], "folder: got x"),
    ],
)
def test_wrong_words_are_one_line(tmp_path, words, says):
    done = call_beside(tmp_path, "sync", *words)
    assert done.code == 2
    assert says in done.err
    assert done.err.count("\n") == 1


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    copy_database(_make_database, tmp_path / "server.db")
    with Server(tmp_path, tmp_path / "server.db") as server:
        yield server


@pytest.mark.slow
def test_a_sweep_outlives_its_server(server, tmp_path):
    """The server is killed in the second of three jobs; it comes back after the sweep."""
    words = ("-m", "dtype=int8,uint8,u8s8", *QUICK)
    env = {"MLFLOW_TRACKING_URI": server.uri, **NO_REAL_FILES}
    result = call_process(tmp_path, *words, strike=(1, server.pid), **env)
    assert result.code == 1, result.err
    (error,) = result.errors
    assert "`python -m resnet8ptq sync folder=" in error
    assert "Traceback" not in result.err
    assert [row["status"] for row in result.table] == ["baseline", "ok", "ok", "ok"]

    server.start()
    synced = call_beside(tmp_path, "sync", **env)
    assert synced.code == 0, synced.err
    # How far the uploads were when the server died is not determined; nothing is lost.
    logged, killed, running, whole = map(
        int, re.findall(r"(\d+) (?:runs logged|closed|still|were)", synced.out)
    )
    assert (logged + whole, killed, running) == (4, 0, 0) and logged
    store = open_store(TrackingConfig(uri=server.uri))
    parent = history.find_parent(store)
    assert parent is not None
    children = history.load_children(store, parent.run_id)
    assert [child.tags["status"] for child in children] == ["ok", "ok", "ok"]
    assert [f"{child.metrics['accuracy']:.2%}" for child in children] == [
        row["accuracy"] for row in result.table[1:]
    ]
    assert {child.ended for child in [parent, *children]} == {True}
    assert sync.sync(store, tmp_path / "runs").logged == []


@pytest.fixture
def silent() -> Iterator[tuple[Store, list[str]]]:
    """A server that takes every connection and never answers, and what it was asked."""
    asked: list[str] = []

    class Silent(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            asked.append(self.request.recv(2**16).decode().split("\r\n")[0])
            while self.request.recv(2**16):  # until the other side gives up
                pass

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Silent) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Store(f"http://127.0.0.1:{server.server_address[1]}", "0", "resnet8ptq"), asked
        server.shutdown()
        thread.join()


def test_a_server_that_never_answers_is_asked_for_its_health_and_nothing_else(
    silent, store, tmp_path, monkeypatch, caplog
):
    """MLflow's own calls would wait for their timeout several times each."""
    monkeypatch.setattr("resnet8ptq.tracking.mlflow_store.store.HEALTH_S", 0.2)
    hung, asked = silent
    assert log_everything(hung, tmp_path / "run") == ""
    assert "TRACKING STORE UNAVAILABLE" in caplog.text
    (tmp_path / "sweep").mkdir()
    start_parent(store, "sweep", tmp_path / "sweep", {})
    with pytest.raises(TrackingError, match="does not answer"):
        end_parent(hung, "1", "ok", tmp_path / "sweep")
    assert set(asked) == {"GET /health HTTP/1.1"}
    assert sync.sync(store, tmp_path / "run").logged == [tmp_path / "run"]


@pytest.mark.parametrize("own", [None, "7"])
def test_a_call_of_mlflow_waits_for_20_seconds_unless_the_user_says_otherwise(own):
    code = (
        "import os, resnet8ptq.tracking.mlflow_store.store; "
        "print(os.environ['MLFLOW_HTTP_REQUEST_TIMEOUT'])"
    )
    env = {k: v for k, v in os.environ.items() if k != "MLFLOW_HTTP_REQUEST_TIMEOUT"}
    env |= {} if own is None else {"MLFLOW_HTTP_REQUEST_TIMEOUT": own}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == (own or "20"), done.stderr
