"""`resnet8ptq ui`: MLflow's pages of the store of this folder."""

import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest
import requests

from resnet8ptq.server import ui
from resnet8ptq.tracking.mlflow_store import view
from tests.helpers.calling import REPO, call_beside, clean_environment
from tests.helpers.stores import new_store

OWN = ("127.0.0.1:5000", "localhost", "localhost:8080")
FOREIGN = ("example.com", "10.example.com", "192.168.example.com:5000", "127.0.0.1.example.com")


def ask_as(host: str, port: int) -> int:
    """Return the status for a page under a host name that its owner lets resolve to here."""
    url = f"http://127.0.0.1:{port}/api/2.0/mlflow/experiments/search?max_results=1"
    return requests.get(url, headers={"Host": host}, timeout=60).status_code


def find_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_without_a_store_the_mend_is_a_run(tmp_path):
    done = call_beside(tmp_path, "ui")
    assert (done.code, len(done.errors)) == (2, 1)
    assert "expected a folder with mlflow.db; try resnet8ptq run first, or root=FOLDER" in done.err
    assert not (tmp_path / "mlruns").exists()


def test_a_port_in_use_is_one_line_with_a_mend(tmp_path):
    new_store(tmp_path / "my runs")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = call_beside(tmp_path, "ui", "root=my runs", f"port={port}")
    assert (done.code, len(done.errors)) == (2, 1)
    assert done.errors[0].startswith(
        f"error: port: got {port}, which cannot be used on 127.0.0.1 ("
    )
    assert done.errors[0].endswith(f"; try resnet8ptq ui 'root=my runs' port={port % 65535 + 1}")


def test_a_server_is_named_and_not_started(tmp_path):
    done = call_beside(tmp_path, "ui", MLFLOW_TRACKING_URI="http://ada:secret@host:5000")
    assert done.code == 0
    assert done.out == "http://host:5000\n"


def test_a_password_is_refused(tmp_path):
    done = call_beside(tmp_path, "ui", "uri=postgresql://ada:secret@host/name")
    assert done.code == 2
    assert "secret" not in done.err


@pytest.mark.parametrize(
    ("words", "variable", "uri"),
    [
        ({}, "", "sqlite:///HERE/mlruns/mlflow.db"),
        ({"root": "other"}, "", "sqlite:///HERE/other/mlflow.db"),
        ({"uri": "sqlite:////x.db"}, "sqlite:////y.db", "sqlite:////x.db"),
        ({}, "postgresql://ada:secret@host/name", "postgresql://ada:secret@host/name"),
    ],
)
def test_the_store_is_the_one_that_runs_take(tmp_path, monkeypatch, words, variable, uri):
    monkeypatch.chdir(tmp_path)
    for name in ("mlruns", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mlflow.db").touch()
    if variable:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", variable)
    assert ui.find_store(ui.Arguments(**words)) == (uri.replace("HERE", str(tmp_path)), view.HOME)


@pytest.mark.slow
def test_it_serves_the_experiment_until_it_is_interrupted(tmp_path):
    store, port = new_store(tmp_path / "mlruns"), find_port()
    with subprocess.Popen(
        [sys.executable, "-m", "resnet8ptq", "ui", f"port={port}"],
        cwd=tmp_path,
        env=clean_environment(PYTHONPATH=str(REPO)),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()  # printed once it answers
            assert line.startswith(f"http://127.0.0.1:{port}/#/experiments/{store.experiment_id}/")
            result = requests.get(
                f"http://127.0.0.1:{port}/api/2.0/mlflow/experiments/get",
                params={"experiment_id": store.experiment_id},
                timeout=60,
            )
            assert result.json()["experiment"]["name"] == "resnet8ptq"
            answers = {name: ask_as(name, port) for name in (*OWN, *FOREIGN)}
            assert answers == {**dict.fromkeys(OWN, 200), **dict.fromkeys(FOREIGN, 403)}
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.terminate()  # not killed: it ends MLflow first
    with pytest.raises(requests.ConnectionError):
        requests.get(f"http://127.0.0.1:{port}/health", timeout=5)


def test_one_worker_and_no_jobs_of_mlflow(monkeypatch):
    started: dict[str, object] = {}

    class EndedError(Exception):
        pass

    def start(words: list[str], **options: object) -> None:
        started.update(words=words, **options)
        raise EndedError

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(EndedError):
        ui.serve("postgresql://ada:secret@host/name", 5000, "/")
    words, env = started["words"], started["env"]
    assert isinstance(words, list) and isinstance(env, dict)
    assert words[words.index("--workers") + 1] == "1"
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert env["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"
    assert "secret" not in " ".join(words)  # which `ps` shows


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_takes_torch_from_another_index():
    index = "https://download.pytorch.org/whl/cpu"
    made = ["make", "-n", "-B", "sweep", f"TORCH_INDEX={index}"]
    shown = subprocess.run(made, cwd=REPO, capture_output=True, text=True, timeout=60, check=True)
    assert f"--extra-index-url '{index}' -e ." in shown.stdout
    plain = subprocess.run(made[:-1], cwd=REPO, capture_output=True, text=True, env={**os.environ})
    assert "index-url" not in plain.stdout
