"""A store of others names hosts and files: nothing is sent there, and none of them is read."""

import shutil
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.tracking._tracking_service.utils import _artifact_repos_cache
from requests import ConnectionError as NoConnection
from sqlalchemy.exc import OperationalError

from resnet8ptq.config.loading import find_paths, without_paths
from resnet8ptq.config.schema import TrackingConfig
from resnet8ptq.core.errors import TrackingError
from resnet8ptq.server import ui
from resnet8ptq.tracking import history
from resnet8ptq.tracking.journal import Journal
from resnet8ptq.tracking.mlflow_store import artifacts, upload, view
from resnet8ptq.tracking.mlflow_store.store import Store, is_away, open_store
from resnet8ptq.tracking.record import RunRecord
from tests.helpers.calling import QUICK, Called, call, call_beside
from tests.helpers.configs import make_config
from tests.helpers.foreign_store import Foreign

SECRETS = {
    "MLFLOW_TRACKING_TOKEN": "hunter2",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "1",
}


class Listener:
    """A socket on 127.0.0.1 that knows whether anybody has connected."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self.host = f"127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def was_reached(self) -> bool:
        try:
            self._socket.accept()[0].close()
        except BlockingIOError:
            return False
        return True


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener() as opened:
        yield opened


@pytest.fixture
def foreign(sweep: Called, tmp_path: Path) -> Foreign:
    return Foreign(sweep, tmp_path)


PROXY = "/api/2.0/mlflow-artifacts/artifacts"  # of an address that MLflow logs in at
SCHEMES = (
    *("http", "https", "ftp", "sftp", "s3", "gs", "hdfs", "dbfs", "wasbs", "abfss", "r2", "b2"),
    *("mlflow-artifacts", "runs", "models", "file", "FILE", "FTP", "data", "ssh", ""),
)


def outside(root: Path, host: str) -> list[str]:
    """Return addresses that a local store in `root` may not name."""
    own = root / "artifacts"
    (own / "run").mkdir(parents=True, exist_ok=True)
    if not (own / "link").exists():
        (own / "link").symlink_to("/etc")
        (own / "run" / "inner").symlink_to(own / "run")
    return [
        *(f"{scheme}://{host}/{own}/run" for scheme in SCHEMES),
        *(f"{scheme}:/etc" for scheme in SCHEMES),
        *(f"{scheme}://{host}{PROXY}/run" for scheme in ("http", "https")),
        *("file:///etc", "/etc", "//etc", "etc", "", ".", "..", "file:", "http://[", "file://["),
        *(f"{own}/../../secret", f"file://{own}/../../secret", f"file://{own}/%2e%2e/%2E./secret"),
        *(f"{own}/run#/../../../etc", f"{own}/run?/../../etc", f"file://{own}/run#x"),
        *(f"file://{own}/link", f"{own}/link/passwd", f"file://{own}/run/inner"),
        *(f"{root}/mlflow.db", f"{root}", f"{own}-of-mine/run", "/proc/self/cwd", f"/net/{host}/x"),
        *(f"file://{host}{own}/run", f" file://{own}/run", f"\tfile://{own}/run"),
    ]


def test_a_local_store_names_only_paths_below_its_own_artifacts(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    for address in outside(tmp_path, "host"):
        with pytest.raises(TrackingError, match=r"^artifact_uri: got .*, expected ") as caught:
            artifacts.locate(address, uri)
        assert str(caught.value).isprintable()
    own = tmp_path / "artifacts" / "run"
    for address in (str(own), own.as_uri(), f"{own.as_uri()}/", f"{own}/model.onnx"):
        assert artifacts.locate(address, uri) == Path(address.removeprefix("file://"))


@given(st.text())
def test_no_text_is_an_address_elsewhere(text):
    uri = "sqlite:////nowhere/mlruns/mlflow.db"
    for address in (text, f"/nowhere/mlruns/artifacts{text}", f"file:///nowhere/mlruns/{text}"):
        try:
            path = artifacts.locate(address, uri)
        except TrackingError:
            continue
        assert path is not None and ".." not in path.parts
        assert path.is_relative_to("/nowhere/mlruns/artifacts")


def test_links_above_a_store_are_those_of_the_user(tmp_path):
    root = tmp_path / "disk" / "mlruns"
    (root / "artifacts" / "run").mkdir(parents=True)
    (tmp_path / "mine").symlink_to(tmp_path / "disk")
    linked = tmp_path / "mine" / "mlruns"
    for database in (root, linked):
        for folder in {root, database}:
            path = folder / "artifacts" / "run"
            assert artifacts.locate(path.as_uri(), f"sqlite:///{database}/mlflow.db") == path


def test_a_folder_that_the_user_names_may_hold_the_artifacts_of_a_database(tmp_path):
    path, uri = tmp_path / "big" / "1" / "run", "postgresql://host/name"
    with pytest.raises(TrackingError, match="artifact_uri"):
        artifacts.locate(str(path), uri, str(tmp_path / "mlruns"))
    assert artifacts.locate(str(path), uri, str(tmp_path / "big")) == path


def test_a_server_names_only_its_own_artifacts(tmp_path):
    server = "http://me@host:5000/path"
    for address in ("mlflow-artifacts:/1/run", "mlflow-artifacts://host:5000/1/run"):
        assert artifacts.locate(address, server) is None
    for address in (
        *outside(tmp_path, "evil"),
        *(str(tmp_path / "artifacts" / "run"), "mlflow-artifacts://host/1", "s3://bucket/1"),
        *("mlflow-artifacts:/1/../2", "mlflow-artifacts:/1/%2e%2e/2", "mlflow-artifacts:/1?x"),
    ):
        if address != "mlflow-artifacts:/etc":
            with pytest.raises(TrackingError, match=r"^artifact_uri: got .*, expected "):
                artifacts.locate(address, server)


def reach(store: Store, record: RunRecord, folder: Path) -> dict[str, object]:
    """Return a call for each function of the package that reaches artifacts."""

    def read() -> None:
        with history.artifact(store, record, "model.onnx"):
            pass

    file = folder / "report.md"
    file.write_text("")
    return {
        "read": read,
        "list": lambda: history.list_artifacts(store, record),
        "upload": lambda: upload.log_files(store, record.run_id, [file]),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["read", "list", "upload"])
def test_no_address_of_others_is_reached(foreign, listener, tmp_path, monkeypatch, name):
    for variable, value in SECRETS.items():
        monkeypatch.setenv(variable, value)
    store = open_store(TrackingConfig(root=str(tmp_path / "mlruns")))
    run_id, _ = foreign.run("onnx")
    for address in outside(tmp_path / "mlruns", listener.host):
        foreign.write("UPDATE runs SET artifact_uri = ?", address)
        record = history.load_run(store, run_id)
        with pytest.raises(TrackingError, match="artifact_uri"):
            reach(store, record, tmp_path)[name]()
        assert not listener.was_reached(), address


def commands(foreign: Foreign) -> dict[str, list[str]]:
    """Return the words of each command that reads a store."""
    run_id = foreign.run("onnx")[0]
    return {
        "report": ["report", "folder=out"],
        "deploy": ["deploy", "verify=false", "folder=out"],
        "deploy run": ["deploy", f"run_id={run_id}", "verify=false", "folder=out"],
        "verdict": ["verdict"],
        "verdict run": ["verdict", f"run_id={run_id}"],
        "sync": ["sync"],
    }


NAMES = ("report", "deploy", "deploy run", "verdict", "verdict run", "sync")


@pytest.mark.parametrize("name", NAMES)
def test_no_command_sends_a_password_where_a_store_says(foreign, sweep, listener, tmp_path, name):
    shutil.copytree(sweep.folder / "runs", tmp_path / "runs")  # for `sync`
    words = commands(foreign)[name]
    address = f"http://{listener.host}{PROXY}/run"
    foreign.write("UPDATE runs SET status = 'RUNNING', artifact_uri = ?", address)
    done = call_beside(tmp_path, *words, **SECRETS)
    assert (done.code, len(done.errors)) == (1, 1), done.err
    assert "artifact_uri: got http://" in done.errors[0]
    assert "Traceback" not in done.err and "hunter2" not in done.err
    assert not listener.was_reached()
    assert not (tmp_path / "out" / "README.md").exists()


def test_an_experiment_that_sends_new_runs_elsewhere_is_not_opened(foreign, listener, tmp_path):
    foreign.write("UPDATE experiments SET artifact_location = ?", f"http://{listener.host}")
    done = call(tmp_path, *QUICK, **SECRETS)
    assert done.code != 0 and "artifact_uri: got http://" in done.err
    assert "hunter2" not in done.err
    with pytest.raises(TrackingError, match="artifact_uri: got http://"):
        open_store(TrackingConfig(root=str(tmp_path / "mlruns")))
    assert not listener.was_reached()


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "model.onnx", "config.yaml", "predictions.npz", "example.npz"]
)
def test_deploy_copies_no_file_that_an_artifact_links_to(foreign, tmp_path, name):
    run_id, paths = foreign.run("onnx")
    key = tmp_path / "id_rsa"
    key.write_text("PRIVATE")
    path = paths["model.onnx"].with_name(name)
    path.unlink(missing_ok=True)
    path.symlink_to(key)
    done = foreign.deploy(run_id)
    assert (done.code, len(done.errors)) == (1, 1), done.err
    assert name in done.errors[0] and "without links" in done.errors[0]
    assert not (tmp_path / "out").exists()


def test_deploy_follows_no_link_to_a_folder(foreign, tmp_path):
    run_id, paths = foreign.run("onnx")
    folder = paths["model.onnx"].parent
    folder.rename(tmp_path / "private")
    folder.symlink_to(tmp_path / "private")
    done = foreign.deploy(run_id)
    assert (done.code, len(done.errors)) == (1, 1), done.err
    assert "without links" in done.errors[0]


def test_a_report_writes_through_no_link(foreign, tmp_path):
    store = open_store(TrackingConfig(root=str(tmp_path / "mlruns")))
    run_id, paths = foreign.run("onnx")
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (paths["model.onnx"].parent / "report.md").symlink_to(precious)
    report = tmp_path / "report.md"
    report.write_text("of the report")
    # MLflow keeps the folder of each run id for the process: here, that of the copied store.
    _artifact_repos_cache.clear()
    with pytest.raises(TrackingError, match="outside the artifact directory"):
        upload.log_files(store, run_id, [report])
    assert precious.read_text() == "mine"


def change_config(paths: dict[str, Path], **groups: object) -> None:
    config = yaml.safe_load(paths["config.yaml"].read_text())
    for group, values in groups.items():
        config[group] = {**config[group], **values}
    paths["config.yaml"].write_text(yaml.safe_dump(config))


def test_deploy_reads_no_pictures_that_only_a_store_names(foreign, tmp_path):
    """The folder is for others: ten of the scored samples would be in it."""
    private = tmp_path / "private"
    for label in ("a", "b"):
        (private / label).mkdir(parents=True)
    run_id, paths = foreign.run("onnx")
    data = {"name": "folder", "root": str(private), "labels": None, "classes": None}
    change_config(paths, data={**data, "on_bad": "error", "split_seed": 0, "test_fraction": 0.5})
    foreign.write("DELETE FROM tags WHERE key = 'test_digest'")
    done = foreign.deploy(run_id)
    assert done.code == 0, done.err
    card = (tmp_path / "out" / "README.md").read_text()
    assert "not compared on the run's samples" in card and "data.root" in card


def test_deploy_reads_no_data_of_a_run_without_their_digest(foreign, tmp_path):
    run_id, paths = foreign.run("onnx")
    change_config(paths, model={"path": None}, data={"root": None})  # both are found without
    foreign.write("DELETE FROM tags WHERE key = 'test_digest'")
    done = foreign.deploy(run_id)
    assert done.code == 0, done.err
    card = (tmp_path / "out" / "README.md").read_text()
    assert "names no digest of its samples" in card
    assert foreign.deploy(run_id, "trust=true", "folder=trusted").code == 0


PATHS = {
    "data=folder": ["data.root"],
    "data=table": ["data.root", "data.test", "data.folder", "data.tokenizer"],
    "data=coco": ["data.root", "data.images", "data.annotations"],
    "backend=onnx": ["model.path", "calib.table", "calib.images"],
}


@pytest.mark.parametrize("group", PATHS)
def test_a_config_of_others_keeps_no_path(tmp_path, group):
    config = make_config(group, *(f"{key}={tmp_path}" for key in PATHS[group]))
    config = replace(config, cache_dir=str(tmp_path), tracking=TrackingConfig(root=str(tmp_path)))
    assert set(PATHS[group]) <= set(find_paths(config))
    left = without_paths(config)
    assert find_paths(left) == {}
    assert str(tmp_path) not in repr(left)


def test_ids_of_others_are_plain_or_one_error(foreign, tmp_path):
    run_id, _ = foreign.run("onnx")
    for nasty in ("`touch x`", "a' OR '1", "$(touch x)", "a\nb", "../x", "x;y", "-x"):
        info = SimpleNamespace(run_id=nasty, artifact_uri="", status="FINISHED")
        data = SimpleNamespace(params={}, metrics={}, tags={})
        with pytest.raises(TrackingError, match="run_id: got ") as caught:
            RunRecord.of_mlflow(SimpleNamespace(info=info, data=data))
        assert str(caught.value).isprintable()
    foreign.set_tag(run_id, "mlflow.parentRunId", "x' OR '1")
    done = call_beside(tmp_path, "verdict", f"run_id={run_id}")
    assert (done.code, len(done.errors)) == (1, 1), done.err
    assert "run_id: got " in done.errors[0]


def test_a_link_of_ui_holds_no_text_of_a_store(tmp_path):
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as connection:
        connection.execute("CREATE TABLE experiments (experiment_id, name, lifecycle_stage)")
        row = ("1\x1b[31m#<script>", "resnet8ptq", "active")
        connection.execute("INSERT INTO experiments VALUES (?, ?, ?)", row)
        connection.commit()
    _, page = ui.find_store(ui.Arguments(root=str(tmp_path)))
    assert page == view.HOME


def test_pages_of_mlflow_get_no_password(tmp_path, monkeypatch):
    """They open the artifacts of every address in the store."""
    started = []

    def start(words: list[str], variables: dict[str, str]) -> None:
        started.append(variables)
        raise KeyboardInterrupt

    monkeypatch.setattr(ui, "start", start)
    for name in ("USERNAME", "PASSWORD", "TOKEN"):
        monkeypatch.setenv(f"MLFLOW_TRACKING_{name}", "hunter2")
    with pytest.raises(KeyboardInterrupt):
        ui.serve(f"sqlite:///{tmp_path}/mlflow.db", 5000, "/")
    assert "hunter2" not in started[0].values()
    assert "PATH" in started[0]


# Errors


ERRORS = [
    MlflowException("no\nsuch table: tags"),
    OperationalError("SELECT *\nFROM tags", {}, Exception("database is locked")),
    NoConnection("refused\nby the host"),
    ValueError("not a\nnumber"),
    KeyError("x"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_any_error_of_a_store_is_one_line(own_store, monkeypatch, error):
    def fail(*args: object, **named: object) -> None:
        raise error

    monkeypatch.setattr(MlflowClient, "get_run", fail)
    with pytest.raises(TrackingError, match=r"^tracking\.uri: .* cannot be used") as caught:
        history.load_run(own_store, "0")
    assert str(caught.value).isprintable()
    assert is_away(caught.value) == is_away(error)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_table_that_is_a_view_is_one_line(foreign, sweep, tmp_path, name):
    shutil.copytree(sweep.folder / "runs", tmp_path / "runs")
    words = commands(foreign)[name]
    foreign.write("UPDATE runs SET status = 'RUNNING'")
    foreign.write("ALTER TABLE tags RENAME TO others")
    foreign.write("CREATE VIEW tags AS SELECT key, value AS worth, run_uuid FROM others")
    done = call_beside(tmp_path, *words)
    assert (done.code, len(done.errors)) == (1, 1), done.err
    assert "Traceback" not in done.err


def test_mlflow_prints_no_traceback_of_what_it_raises(own_store, caplog):
    run_id = upload.create_run(own_store, Journal("a run", own_store.experiment_name))
    with closing(sqlite3.connect(own_store.uri.removeprefix("sqlite:///"))) as connection:
        connection.execute("ALTER TABLE tags RENAME TO others")
        connection.execute("CREATE VIEW tags AS SELECT * FROM others")  # which takes no rows
        connection.commit()
    with pytest.raises(TrackingError, match="cannot be used"):
        own_store.client.set_tag(run_id, "a", "b")
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("uri", ["sftp://h/x", "ftp://h/x", "s3://b/x", "file:///tmp/x", "x"])
@pytest.mark.parametrize("name", ["report", "deploy", "verdict", "sync", "ui"])
def test_an_address_of_no_store_is_wrong_input(tmp_path, name, uri):
    (tmp_path / "runs").mkdir()
    done = call_beside(tmp_path, name, f"uri={uri}")
    assert (done.code, len(done.errors)) == (2, 1), done.err
    assert "tracking.uri: got " in done.errors[0] and "Traceback" not in done.err
