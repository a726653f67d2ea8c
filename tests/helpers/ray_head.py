"""A Ray cluster of one node, on this machine's loopback alone, started in a folder of its own."""

import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

CPUS = 2
SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # everything on 127.0.0.1
}
STARTED = "Ray runtime started."


@contextmanager
def run() -> Iterator[None]:
    """Start one, which Ray finds by the environment, and end it with all that it started."""
    pytest.importorskip("ray")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with (
        TemporaryDirectory() as name,  # Ray's sockets need a short path
        (Path(name) / "log").open("w+") as log,
        pytest.MonkeyPatch.context() as patch,
    ):
        for key, value in {**SETTINGS, "RAY_AUTH_TOKEN": secrets.token_hex(32)}.items():
            patch.setenv(key, value)
        ray = str(Path(sys.executable).with_name("ray"))
        command = [ray, "start", "--head", "--block", "--include-dashboard=false"]
        command += [f"--num-cpus={CPUS}", f"--port={address.rpartition(':')[2]}"]
        command += ["--node-ip-address=127.0.0.1", f"--temp-dir={name}"]
        with subprocess.Popen(
            command, cwd=name, text=True, stdout=subprocess.PIPE, stderr=log
        ) as head:
            try:
                assert head.stdout is not None
                if not any(STARTED in line for line in head.stdout):
                    log.seek(0)
                    pytest.fail(log.read())
                patch.setenv("RAY_ADDRESS", address)
                yield
            finally:
                head.terminate()  # its processes end with it
