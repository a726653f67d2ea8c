"""`mlflow` in a process of its own, forked from one that has imported it (`forked.py`).

`mlflow server` and `mlflow models serve` import MLflow twice: themselves, and in the process that
they start and that answers.
"""

import os
import shlex
import socket
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

from tests.helpers.calling import NO_SERVER_JOBS, clean_environment
from tests.helpers.forked import enter, start_server


class Server:
    """A real MLflow server on SQLite, which can be killed and started again at its port."""

    def __init__(self, folder: Path, database: Path) -> None:
        """Let it run in `folder`, where its log and artifacts go."""
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder, self.database = folder, database
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: Any = None

    def __enter__(self) -> "Server":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def start(self) -> None:
        """Start it; return when it answers."""
        self.kill()
        words = ["server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        words += ["--backend-store-uri", f"sqlite:///{self.database}"]
        words += ["--artifacts-destination", f"{self.folder}/artifacts"]
        log = self.folder / "server.log"
        self._process = start(words, self.folder, log, clean_environment(**NO_SERVER_JOBS))
        patient = Retry(total=150, backoff_factor=0.2, backoff_max=2)  # refused until it listens
        with requests.Session() as session:
            session.mount("http://", HTTPAdapter(max_retries=patient))
            assert session.get(f"{self.uri}/health", timeout=30).ok

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()


def start(words: list[str], folder: Path, log: Path, env: dict[str, str]) -> Any:
    """Call `mlflow` with these words; return its process."""
    process = start_server().Process(target=_call, args=(words, folder, log, env))
    process.start()
    return process


def _call(words: list[str], folder: Path, log: Path, env: dict[str, str]) -> None:
    import mlflow.cli
    import mlflow.pyfunc.backend
    import mlflow.server
    import uvicorn

    enter(folder, env)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)

    def serve(command: list[str], extra_env: dict[str, str], **_: object) -> None:
        """Run the server in this process, and not in one below it."""
        os.environ.update(extra_env)
        uvicorn.main(command[command.index("uvicorn") + 1 :])

    def serve_model(command: list[str], env: dict[str, str], **_: object) -> None:
        serve(shlex.split(command[-1]), env)  # of a shell

    mlflow.server._exec_cmd = serve
    mlflow.pyfunc.backend.subprocess = SimpleNamespace(Popen=serve_model)
    mlflow.cli.cli(words)
