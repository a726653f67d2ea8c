"""Runs a tracking server for a team: `mlflow server` on PostgreSQL, which also serves artifacts.

    resnet8ptq server database=postgresql://user@host/name

The server listens on `host=127.0.0.1` and `port=5000`. `hosts=name,name:port` adds host names for
clients. `auth=true` asks for a password. `workers=4` sets the number of processes,
`folder=mlruns/server` the folder of the artifacts. Put the database's password into ~/.pgpass or
PGPASSWORD. MLFLOW_BACKEND_STORE_URI may replace `database`. Ctrl-C ends the server. See
docs/server.md.
"""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import requests
from filelock import FileLock, Timeout
from sqlalchemy import create_engine
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from resnet8ptq.config.limits import require
from resnet8ptq.core import command, console, invocation
from resnet8ptq.core.errors import ConfigError, TrackingError
from resnet8ptq.core.text import redact
from resnet8ptq.server import access
from resnet8ptq.tracking import address

START_S = 120  # the first start creates all tables; every worker imports MLflow
STOP_S = 15
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # listens on all -> address from here

# A worker answers up to 40 requests at once. Each needs a connection for milliseconds, and waits up
# to 30 s for a free one. MLflow keeps a pool for the runs and, with auth, one for the users:
# 4 workers * 2 pools * (5 + 5) = 80 connections, below PostgreSQL's default of 100.
POOL = {"MLFLOW_SQLALCHEMYSTORE_POOL_SIZE": "5", "MLFLOW_SQLALCHEMYSTORE_MAX_OVERFLOW": "5"}


@dataclass
class Arguments:
    """The settings of `resnet8ptq server`, as key=value."""

    database: str | None = None
    host: str = "127.0.0.1"
    port: int = 5000
    hosts: str | None = None
    auth: bool = False
    workers: int = 4
    folder: str = "mlruns/server"


@contextmanager
def run(asked: Arguments) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Run the server during the block, which starts when the server answers; yield URL and process.

    Raises:
        ConfigError: a setting is wrong, or the port is taken.
        TrackingError: the folder is in use, the database does not answer, or the server does not
            start.
    """
    check_port(asked.host, asked.port)
    require("workers", asked.workers, asked.workers >= 1, "an integer >= 1")
    url = find_database(asked.database)
    _check_database(url)
    folder = Path(asked.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder / ".lock").acquire(timeout=0)
    except Timeout:
        raise TrackingError(
            f"folder: another server runs in {folder}; try folder=ANOTHER"
        ) from None
    with lock, _mlflow(asked, folder, url) as process:
        host = socket.gethostname() if asked.host in EVERYWHERE else asked.host
        yield access.to_url(host, asked.port), process


def find_database(setting: str | None) -> URL:
    """Return the URL of the database in the setting or the environment.

    Raises:
        ConfigError: there is none, it is not PostgreSQL, or the setting holds a password.
    """
    named = setting or os.environ.get("MLFLOW_BACKEND_STORE_URI")
    takes = "postgresql://user@host/name"
    if not named:
        raise ConfigError(f"database: got none, expected {takes} (docs/server.md)")
    try:
        url = make_url(named)
    except ArgumentError:
        url = None
    if url is None or url.drivername not in ("postgresql", "postgresql+psycopg2"):
        raise ConfigError(f"database: got {redact(named)}, expected {takes}")
    if setting and (url.password is not None or not address.PARAMETERS.issuperset(url.query)):
        raise ConfigError(
            "database: holds a password, which `ps` shows to everybody; expected a URI without: "
            "put it into ~/.pgpass or PGPASSWORD, or the whole URI into MLFLOW_BACKEND_STORE_URI"
        )
    # Later versions of SQLAlchemy take `postgresql` as psycopg 3.
    return url.set(drivername="postgresql+psycopg2")


def check_port(host: str, port: int, mend: str = "") -> None:
    """Check that an address is free, because another process there would answer instead.

    Args:
        mend: the advice in the error for a port in use.

    Raises:
        ConfigError: the port is out of range or in use, or the host is not of this machine.
    """
    require("port", port, 1 <= port <= 65535, "1 to 65535")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server will
        try:
            probe.bind((host, port))
        except socket.gaierror as error:
            raise ConfigError(f"host: got {host!r}, expected an address of this machine") from error
        except OSError as error:
            reason = f"which cannot be used on {host} ({error.strerror})"
            raise ConfigError(f"port: got {port}, {reason}, expected a free one{mend}") from error


def _check_database(url: URL) -> None:
    try:
        with create_engine(url, poolclass=NullPool, connect_args={"connect_timeout": 10}).connect():
            return
    except ModuleNotFoundError as error:
        mend = invocation.install("server")
        raise TrackingError(f"{error.name} is not installed: {mend}") from error
    except SQLAlchemyError as error:
        shown = url.set(drivername="postgresql").difference_update_query(["password"])
        reason = " ".join(str(getattr(error, "orig", None) or error).split())[:300]
        raise TrackingError(
            f"database: {shown._replace(password=None)} cannot be used ({redact(reason)})"
        ) from error


@contextmanager
def _mlflow(asked: Arguments, folder: Path, url: URL) -> Iterator["subprocess.Popen[bytes]"]:
    """Run `mlflow server` during the block, which starts when the server answers."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", asked.host]
    command += ["--port", str(asked.port), "--workers", str(asked.workers), "--serve-artifacts"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    # Only warnings: a line for every request would fill the disk.
    command += ["--uvicorn-opts", f"--log-level warning --timeout-graceful-shutdown {STOP_S - 5}"]
    variables = environment(asked, url)
    if asked.auth:
        command += ["--app-name", "basic-auth"]
        variables |= access.user_variables(folder, variables["MLFLOW_BACKEND_STORE_URI"])
    log = folder / "server.log"
    with log.open("ab") as output, start(command, variables, output) as server:
        _wait(asked, server, log)
        yield server


@contextmanager
def start(
    words: list[str], variables: dict[str, str], output: IO[bytes] | None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a process during the block; its output goes to `output`, or to this process's output."""
    process = subprocess.Popen(
        words,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        process_group=0,  # Ctrl-C reaches this process, which ends the other
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def environment(asked: Arguments, url: URL) -> dict[str, str]:
    """Return the environment of `mlflow server`."""
    ours = {
        # Not on the command line, which `ps` shows.
        "MLFLOW_BACKEND_STORE_URI": url.render_as_string(hide_password=False),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # processes that grade language models
        **access.name_variables(asked.host, asked.port, asked.hosts),
    }
    return {**POOL, **os.environ, **ours}


def _wait(asked: Arguments, server: "subprocess.Popen[bytes]", log: Path) -> None:
    url = f"{access.to_url(EVERYWHERE.get(asked.host, asked.host), asked.port)}/health"
    if answers(url, server, START_S):
        return
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    raise TrackingError(f"the server did not start ({redact(lines[-1])[:300]}): {log}")


def answers(url: str, process: "subprocess.Popen[bytes]", within_s: float = math.inf) -> bool:
    """Wait until the server answers; return False if it ends before or takes too long."""
    end = time.monotonic() + within_s
    while process.poll() is None and time.monotonic() < end:
        try:
            if requests.get(url, timeout=5).ok:
                return True
        except requests.RequestException:
            time.sleep(0.2)
    return False


def main(words: list[str]) -> None:
    """Serve until Ctrl-C, SIGTERM, or the end of the terminal."""
    asked = command.parse_words(words, Arguments, __doc__)
    heed_signals()
    serve(asked)


def heed_signals() -> None:
    """End this program on Ctrl-C, even as a background job, and when its terminal closes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))


def serve(asked: Arguments) -> None:
    """Run a server until it is interrupted, and print the settings for clients.

    Raises:
        TrackingError: the server ended without an interruption.
    """
    folder = Path(asked.folder).absolute()
    with run(asked) as (address, process):
        access.warn(asked.host, address, asked.auth)
        print(invocation.shell("export", f"MLFLOW_TRACKING_URI={address}"))
        if asked.auth:
            named = "MLFLOW_AUTH_ADMIN_PASSWORD" in os.environ
            where = "MLFLOW_AUTH_ADMIN_PASSWORD" if named else folder / "admin_password"
            print(f"export MLFLOW_TRACKING_USERNAME=admin  # the password: {where}")
        log = folder / "server.log"
        print(f"files: {folder / 'artifacts'}; log: {log}; Ctrl-C ends", flush=True)
        console.never_silent(between="")  # it serves without a word
        code = process.wait()
        raise TrackingError(f"the server has ended with code {code}: {log}")
