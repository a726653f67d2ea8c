"""The tracking server: what it refuses at once, and several processes on a real one."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

from resnet8ptq.config.schema import TrackingConfig
from resnet8ptq.core import command
from resnet8ptq.core.errors import ConfigError, PtqError
from resnet8ptq.server import access, server
from resnet8ptq.server.server import Arguments
from resnet8ptq.tracking import history
from resnet8ptq.tracking.record import RunRecord
from resnet8ptq.tracking.run import start_parent
from resnet8ptq.tracking.store import Store, open_store
from studies import tracking_load
from tests.helpers.calling import REPO, clean_environment
from tests.helpers.stores import new_store

PROCESSES, RUNS = 4, 2  # runs of each


@pytest.fixture(scope="module")
def postgres() -> Iterator[None]:
    """A PostgreSQL for the tests here, which libpq finds by the environment."""
    if shutil.which("pg_virtualenv") is None:
        pytest.skip("needs PostgreSQL (apt-get install postgresql)")
    process = subprocess.Popen(
        ["pg_virtualenv", "-t", "sh", "-c", "echo; env; echo; exec cat"],
        env={**os.environ, "PGPORT": str(free_port())},
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        assert process.stdout is not None
        list(iter(process.stdout.readline, "\n"))
        for line in iter(process.stdout.readline, "\n"):
            name, _, value = line.rstrip("\n").partition("=")
            if name.startswith("PG"):
                patch.setenv(name, value)
        yield
    process.communicate()  # closes its stdin, at which it goes


def sql(database: str, query: str) -> str:
    done = ["psql", "-qAt", "-d", database, "-c", query]
    return subprocess.run(done, capture_output=True, text=True, check=True, timeout=60).stdout


@dataclass(frozen=True)
class Served:
    """A running server, its folder, and its process."""

    uri: str
    folder: Path
    process: "subprocess.Popen[str]"

    def get(self, path: str, **headers: str) -> requests.Response:
        return requests.get(f"{self.uri}/api/2.0/mlflow/{path}", headers=headers, timeout=30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serve(folder: Path, database: str, *words: str) -> Iterator[Served]:
    """Start a server as `make server` does, on a new database; end it as Ctrl-C does."""
    sql("postgres", f"CREATE DATABASE {database}")
    words = (f"folder={folder}", f"port={free_port()}", "workers=2", *words)
    uri = f"database=postgresql:///{database}"
    process = subprocess.Popen(
        [sys.executable, "-m", "resnet8ptq", "server", uri, *words],
        cwd=REPO,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith("export MLFLOW_TRACKING_URI=http://127.0.0.1:")
        yield Served(first.strip().partition("=")[2], folder, process)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


TABLES = "SELECT oid, relname FROM pg_class WHERE relkind IN ('r', 'i') ORDER BY oid"


@pytest.mark.usefixtures("postgres")
@pytest.mark.slow
def test_several_processes_lose_nothing(tmp_path):
    with serve(tmp_path / "server", "load") as served:
        made = sql("load", TABLES)
        check_refusals(served)
        with tracking_load.start_processes(PROCESSES) as pool:
            config = TrackingConfig(uri=served.uri)
            stores = set(pool.map(tracking_load.open_at_once, [config] * PROCESSES))
            (store,) = stores  # one experiment, whoever was first
            (tmp_path / "parent").mkdir()
            parent_id = start_parent(store, "load", tmp_path / "parent", {})
            tasks = [
                (store, parent_id, tmp_path, range(first, first + RUNS))
                for first in range(0, PROCESSES * RUNS, RUNS)
            ]
            list(pool.map(tracking_load.log_at_once, tasks))
        names = [found.name for found in store.client.search_experiments()]
        assert sorted(names) == ["Default", "resnet8ptq"]
        records = history.load_children(store, parent_id)
        check_runs(records, tmp_path)
        check_artifacts(records, served.folder / "artifacts", tmp_path)
        check_datasets(store, parent_id)
        assert "experiments" in made
        assert sql("load", TABLES) == made  # whole before it answered
    assert served.process.returncode == 130


def check_refusals(served: Served) -> None:
    """A page that calls the server by a name of its own gets nothing; nor does a second server."""
    assert served.get("experiments/get?experiment_id=0").ok
    assert served.get("experiments/get?experiment_id=0", Host="evil.example").status_code == 403
    with pytest.raises(PtqError, match=f"^folder: another server runs in {served.folder}"):
        server.serve(Arguments("postgresql:///load", folder=str(served.folder), port=free_port()))
    port = served.uri.rpartition(":")[2]
    with pytest.raises(ConfigError, match=f"^port: got {port}, which cannot be used on 127.0.0.1"):
        server.serve(Arguments("postgresql:///load", port=int(port)))


def check_runs(records: list[RunRecord], folder: Path) -> None:
    """All that was logged is what one run logs to an SQLite file."""
    alone = new_store(folder / "mlruns")
    run_id = tracking_load.log_run(alone, None, folder / "alone", 0)
    expected = history.load_named(alone, "run_id", run_id)
    assert len(expected.params) > 60
    assert len(expected.metrics) > 55
    numbers = [int(record.tags["job_number"]) for record in records]
    assert numbers == list(range(PROCESSES * RUNS))
    for number, record in zip(numbers, records, strict=True):
        assert record.params == expected.params
        assert record.metrics == {**expected.metrics, "number": number}
        own = {"job_number", "folder", "record", "mlflow.parentRunId", "mlflow.runName"}
        # Of the file that was called, pytest's or ours, and of the folder it was called in.
        program = {f"mlflow.source.git.{what}" for what in ("commit", "branch", "repoURL")}
        program.add("project_commit")
        kept = {*expected.tags, "mlflow.parentRunId"} - program
        assert record.tags.keys() - program == kept
        same = record.tags.keys() - own - program
        assert {key: record.tags[key] for key in same} == {key: expected.tags[key] for key in same}
        assert record.tags["status"] == "ok"


def check_artifacts(records: list[RunRecord], root: Path, folder: Path) -> None:
    for record in records:
        (found,) = root.glob(f"*/{record.run_id}/artifacts")
        sent = folder / record.tags["job_number"]
        assert {path.name for path in found.iterdir()} == set(tracking_load.FILES)
        for name in tracking_load.FILES:
            assert (found / name).read_bytes() == (sent / name).read_bytes()


def check_datasets(store: Store, parent_id: str) -> None:
    wanted = f"tags.`mlflow.parentRunId` = '{parent_id}'"
    runs = store.client.search_runs([store.experiment_id], wanted, max_results=1000)
    assert [run.info.status for run in runs] == ["FINISHED"] * PROCESSES * RUNS
    assert {len(run.inputs.dataset_inputs) for run in runs} == {2}


@pytest.mark.usefixtures("postgres")
@pytest.mark.slow
def test_server_with_users_takes_nobody_else(tmp_path, monkeypatch):
    pytest.importorskip("flask_wtf", reason="needs the extra server")
    with serve(tmp_path / "server", "users", "auth=true", "workers=1") as served:
        assert served.get("experiments/search?max_results=9").status_code == 401
        config = TrackingConfig(uri=served.uri)
        with pytest.raises(PtqError, match=r"^tracking\.uri: .* cannot be used .*401"):
            open_store(config)
        password = (served.folder / "admin_password").read_text()
        for name in ("admin_password", "secret_key", "auth.ini"):
            assert (served.folder / name).stat().st_mode & 0o077 == 0
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)
        store = open_store(config)
        run_id = tracking_load.log_run(store, None, tmp_path, 1)
        record = history.load_run(store, run_id)
        assert record.tags["status"] == "ok"
        with history.artifact(store, record, "ranges.json") as path:
            assert path.read_bytes() == (tmp_path / "1" / "ranges.json").read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["port=0"], "port: got 0, expected 1 to 65535"),
        (["workers=0"], "workers: got 0, expected an integer >= 1"),
        (
            ["host=no.such.invalid", "database=postgresql:///x"],
            "host: got 'no.such.invalid', expected an address of this machine",
        ),
        (["database=mysql://host/name"], "database: got mysql://host/name, expected postgresql://"),
        (["database=nonsense"], "database: got nonsense, expected postgresql://"),
        (["database=postgresql://me:hunter2@host/name"], "database: holds a password"),
        (["database=postgresql://host/name?password=hunter2"], "database: holds a password"),
        ([], "database: got none, expected postgresql://"),
        (["datbase=x"], "expected database= | host= | port="),
    ],
)
def test_wrong_setting_is_named_in_one_line(words, message, tmp_path, capsys):
    words = words or [f"port={free_port()}"]
    assert command.main(lambda: server.main([f"folder={tmp_path}/new", *words])) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert "hunter2" not in err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("variable", [False, True])
def test_database_that_does_not_answer_is_named_without_its_password(
    variable, tmp_path, monkeypatch
):
    pytest.importorskip("psycopg2", reason="needs the extra server")
    uri = f"postgresql://me@127.0.0.1:{free_port()}/runs"
    if variable:
        monkeypatch.setenv("MLFLOW_BACKEND_STORE_URI", uri.replace("@", ":hunter2@"))
    given = Arguments(None if variable else uri, folder=str(tmp_path), port=free_port())
    with pytest.raises(
        PtqError, match=r"^database: postgresql://me@127\.0\.0\.1:\d+/runs cannot be used .*refused"
    ) as caught:
        server.serve(given)
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "auth", "words"),
    [
        ("127.0.0.1", False, []),
        ("0.0.0.0", False, ["WARNING", "can read, change and delete every run"]),
        ("0.0.0.0", True, ["WARNING", "unencrypted"]),
    ],
)
def test_server_open_to_others_warns(host, auth, words, capsys):
    access.warn(host, "http://name:5000", auth)
    err = capsys.readouterr().err
    assert all(word in err for word in words)
    assert bool(err) == bool(words)


def test_password_is_in_the_servers_environment_alone(monkeypatch):
    given = Arguments(host="10.1.2.3", hosts="lab.example, other:8080")
    found = server.environment(given, server.make_url("postgresql+psycopg2://me:hunter2@h/d"))
    assert found["MLFLOW_BACKEND_STORE_URI"] == "postgresql+psycopg2://me:hunter2@h/d"
    allowed = found["MLFLOW_SERVER_ALLOWED_HOSTS"].split(",")
    assert {"10.1.2.3:5000", "lab.example", "other:8080"} <= set(allowed)
    assert "*" not in "".join(allowed)
    assert "https://lab.example" in found["MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"].split(",")
    assert os.environ.get("MLFLOW_BACKEND_STORE_URI") is None
