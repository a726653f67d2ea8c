"""Several processes log to MLflow's server on PostgreSQL, started as in docs/server.md."""

import filecmp
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from resnet8ptq.config.schema import TrackingConfig
from resnet8ptq.server import ui
from resnet8ptq.tracking import history
from resnet8ptq.tracking.mlflow_store.store import Store
from resnet8ptq.tracking.record import RunRecord
from resnet8ptq.tracking.run import start_parent
from studies import tracking_load
from tests.helpers.calling import NO_SERVER_JOBS, clean_environment
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serve(folder: Path, database: str) -> Iterator[str]:
    """Start the server on a new database; yield its address."""
    sql("postgres", f"CREATE DATABASE {database}")
    address, port = "127.0.0.1", str(free_port())
    own = {"MLFLOW_BACKEND_STORE_URI": f"postgresql+psycopg2:///{database}"}
    words = ["--port", port, "--workers", "2", "--artifacts-destination", str(folder)]
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", *words],
        env=clean_environment(**own, **NO_SERVER_JOBS),
        stderr=subprocess.DEVNULL,
    )
    try:
        assert ui.answers(f"http://{address}:{port}/health", process)
        yield f"http://{address}:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


@pytest.mark.usefixtures("postgres")
@pytest.mark.slow
def test_several_processes_lose_nothing(tmp_path):
    with serve(tmp_path / "server", "load") as address:
        with tracking_load.start_processes(PROCESSES) as pool:
            config = TrackingConfig(uri=address)
            stores = set(pool.map(tracking_load.open_at_once, [config] * PROCESSES))
            (store,) = stores  # one experiment, whoever was first
            (tmp_path / "parent").mkdir()
            parent_id = start_parent(store, "load", tmp_path / "parent", {})
            tasks = [
                (store, parent_id, tmp_path, range(first, first + RUNS))
                for first in range(0, PROCESSES * RUNS, RUNS)
            ]
            list(pool.map(tracking_load.log_at_once, tasks))
        names = [experiment.name for experiment in store.client.search_experiments()]
        assert sorted(names) == ["Default", "resnet8ptq"]
        records = history.load_children(store, parent_id)
        check_runs(records, tmp_path)
        check_artifacts(records, tmp_path / "server", tmp_path)
        check_datasets(store, parent_id)


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
        (result,) = root.glob(f"*/{record.run_id}/artifacts")
        sent = folder / record.tags["job_number"]
        assert {path.name for path in result.iterdir()} == set(tracking_load.FILES)
        for name in tracking_load.FILES:
            assert filecmp.cmp(result / name, sent / name, shallow=False)


def check_datasets(store: Store, parent_id: str) -> None:
    wanted = f"tags.`mlflow.parentRunId` = '{parent_id}'"
    runs = store.client.search_runs([store.experiment_id], wanted, max_results=1000)
    assert [run.info.status for run in runs] == ["FINISHED"] * PROCESSES * RUNS
    assert {len(run.inputs.dataset_inputs) for run in runs} == {2}
