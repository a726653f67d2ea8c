"""MLflow's pages of the runs, on 127.0.0.1.

    resnet8ptq ui                  the store of this folder: mlruns/
    resnet8ptq ui root=FOLDER      another folder with a store
    resnet8ptq ui uri=sqlite:///PATH/mlflow.db
    resnet8ptq ui port=5001        5000 if it is not set

`experiment=NAME` opens another experiment of a local store. `uri=`, or else MLFLOW_TRACKING_URI if
it is set, names a database or a tracking server; `root=` and `experiment=` then have no effect. For
a tracking server, the command only prints its address. Otherwise, Ctrl-C ends the command.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import requests

from resnet8ptq.config.limits import require
from resnet8ptq.core import command, invocation
from resnet8ptq.core.console import never_silent, waiting
from resnet8ptq.core.errors import ConfigError, TrackingError
from resnet8ptq.core.text import redact
from resnet8ptq.tracking.mlflow_store import address, store, view

HOST = "127.0.0.1"
STOP_S = 15  # seconds after which a server that was asked to end is killed
_CLIENT = "MLFLOW_TRACKING_"  # prefix of a client's settings, such as user name, password and token
# By default, MLflow starts processes that grade language models. With these and four workers, it
# took 2.0 GB and 44 s of CPU time until it answered; with the settings below, 0.4 GB and 8 s
# (2026-11-25).
LIGHT = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}

# By default, MLflow also answers to names that begin like a private address, such as
# 10.example.com. A web page could make such a name resolve to this machine, and read the runs. `:*`
# allows any port of `ssh -L`.
OWN_NAMES = {"MLFLOW_SERVER_ALLOWED_HOSTS": "127.0.0.1,127.0.0.1:*,localhost,localhost:*"}


@dataclass
class Arguments(store.StoreArguments):
    """The settings of `ui`, as key=value."""

    port: int = 5000


def main(words: list[str]) -> None:
    """Show the runs until Ctrl-C; for a tracking server, only print its address.

    Raises:
        ConfigError: a setting is wrong, the store does not exist, or the port cannot be used.
        TrackingError: MLflow does not start, or stops without being interrupted.
    """
    asked = command.parse_words(words, Arguments, __doc__)
    named = asked.uri or os.environ.get(address.VARIABLE) or ""
    if named.startswith(("http://", "https://")):
        address.check(named, written=bool(asked.uri))
        print(redact(named))
        return

    # Advise the next port if another process has this one
    others = [word for word in words if not word.startswith("port=")]
    again = invocation.command("ui", *others, f"port={asked.port % 65535 + 1}")
    check_port(asked.port, again)
    uri, page = find_store(asked)
    heed_signals()
    with suppress(KeyboardInterrupt):
        serve(uri, asked.port, page)


def find_store(asked: Arguments) -> tuple[str, str]:
    """Return the address of the store, and the path of the first page.

    The first page is that of the experiment if `store.find_store` finds it, else `view.HOME`.

    Raises:
        ConfigError: the folder holds no store, or the address is refused, see `address.check`.
    """
    if uri := asked.uri or os.environ.get(address.VARIABLE):
        address.check(uri, written=bool(asked.uri))
        return uri, view.HOME

    # Without an address, the store lies in a local folder
    database = Path(asked.root).absolute() / store.DATABASE
    if not database.is_file():
        run = invocation.command("run")
        raise ConfigError(
            f"root: got {asked.root}, expected a folder with {database.name}; try {run} first, or "
            "root=FOLDER"
        )
    page = view.HOME
    local = store.find_store(asked.tracking)
    if local is not None:
        page = view.path(local.experiment_id)
    return f"sqlite:///{database}", page


def serve(uri: str, port: int, page: str) -> None:
    """Run MLflow until it is interrupted, and print the address once it answers.

    Args:
        page: path of the first page.

    Raises:
        TrackingError: MLflow stopped without being interrupted.
    """
    words = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port)]
    words += ["--workers", "1", "--uvicorn-opts", "--log-level warning"]
    # Pass the address in the environment, where `ps` does not show a database's password.
    addresses = dict.fromkeys(("MLFLOW_BACKEND_STORE_URI", "MLFLOW_REGISTRY_STORE_URI"), uri)
    # MLflow's pages open artifacts at any address in the store; those hosts must not get a
    # password.
    kept = {key: text for key, text in os.environ.items() if not key.startswith(_CLIENT)}
    # MLflow's imports emit deprecation warnings that users cannot fix.
    variables = {"PYTHONWARNINGS": "ignore", **OWN_NAMES, **kept, **LIGHT, **addresses}

    # The block ends MLflow, also after Ctrl-C
    with start(words, variables) as process:
        with waiting("Starting MLflow"):
            is_ready = answers(f"http://{HOST}:{port}/health", process)
        if is_ready:
            print(f"http://{HOST}:{port}{page}  Ctrl-C ends", flush=True)
        never_silent(between="")  # MLflow prints nothing while it serves pages
        raise TrackingError(f"MLflow has ended with code {process.wait()}; its output is above")


def check_port(port: int, mend: str) -> None:
    """Check that a port is free, because another process there would answer instead.

    Args:
        mend: the advice in the error for a port that cannot be used.

    Raises:
        ConfigError: the port is out of range, in use, or not permitted.
    """
    require("port", port, 1 <= port <= 65535, "1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # MLflow sets this too
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ConfigError(
                f"port: got {port}, which cannot be used on {HOST} ({error.strerror}), expected a "
                f"free one; try {mend}"
            ) from error


@contextmanager
def start(words: list[str], variables: dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a server during the block; end it and its workers afterwards."""
    process = subprocess.Popen(
        words,
        env=variables,
        stdin=subprocess.DEVNULL,
        process_group=0,  # Ctrl-C reaches only this process, which ends MLflow
    )

    # MLflow ends its own workers; after a while, they are killed with it
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answers(url: str, process: "subprocess.Popen[bytes]") -> bool:
    """Wait until the server answers; return False if the server ends before."""
    while process.poll() is None:
        try:
            if requests.get(url, timeout=5).ok:
                return True
        except requests.RequestException:
            time.sleep(0.2)
    return False


def heed_signals() -> None:
    """End this program on Ctrl-C, even as a background job, and when its terminal closes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
