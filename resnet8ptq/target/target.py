"""Loads files on another machine, runs samples there, and measures the time there."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.core import files
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.core.records import feed
from resnet8ptq.target.connection import Connection, ConnectionLostError, Reply
from resnet8ptq.target.measure import CPU, F32, RUNTIMES

log = logging.getLogger(__name__)

TRIES = 3  # connections for one request, as a network may fail for a moment


@dataclass
class Target:
    """Another machine, reached by a command that starts Python there.

    Attributes:
        command: the command, such as `ssh pi@board python3`.
        timeout_s: the longest time for one answer.
        provider: the execution provider of ONNX Runtime there.
    """

    command: str
    timeout_s: float
    provider: str = CPU
    _connection: Connection | None = field(default=None, init=False, repr=False)
    _loaded: dict[str, "RemoteFile"] = field(default_factory=dict, init=False, repr=False)
    _lock: Lock = field(default_factory=Lock, init=False, repr=False)
    _about: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def describe(self) -> dict[str, Any]:
        """Return the answer to a `describe` request, with the provider unless it is the CPU's.

        Raises:
            UnsupportedError: the machine lacks the provider; see also `ask`.
        """
        if not self._about:
            reply = self.ask({"do": "describe", **self._asked})
            self._about.update({**reply.fields, **self._asked})
        return self._about

    @property
    def cores(self) -> int:
        """The number of logical cores of the machine."""
        return int(self.describe()["cores"])

    @property
    def _asked(self) -> dict[str, str]:
        """The field of a request that names the provider; empty for the CPU's."""
        if self.provider == CPU:
            return {}
        return {"provider": self.provider}

    def say(self, runtime: str) -> str:
        """Return the CPU, the machine and the version of a runtime there, in one line.

        The line ends with the provider, unless it is the CPU's.
        """
        about = self.describe()
        version = about["versions"].get(runtime, "version unknown")
        line = f"{about['cpu']} ({about['machine']}), {runtime} {version}"
        if self.provider != CPU:
            line += f", {self.provider}"
        return line

    def load(self, path: Path, runtime: str, threads: int, precision: str = F32) -> "RemoteFile":
        """Load a file on the target, unless it is loaded already.

        Args:
            precision: the float type in which OpenVINO computes.

        Raises:
            UnsupportedError: `measure` does not run this runtime, or the target cannot load the
                file with it; see also `ask`.
        """
        if runtime not in RUNTIMES:
            raise UnsupportedError(
                f"target.command: {runtime} is not measured on another machine; expected a backend "
                f"that runs in {' | '.join(RUNTIMES)}"
            )

        # Files are known by their content and their settings
        options = {**self._asked}
        if precision != F32:
            options["precision"] = precision
        key = " ".join((files.sha256(path), runtime, *options.values(), str(threads)))
        if key not in self._loaded:
            request = {"do": "load", "key": key, "runtime": runtime, "threads": threads, **options}
            file = RemoteFile(self, key, request, path.read_bytes())
            file.names = self.ask(request, file.content).fields["names"]
            self._loaded[key] = file
        return self._loaded[key]

    def ask(self, request: Mapping[str, Any], payload: bytes = b"") -> Reply:
        """Send a request; after a lost connection, connect, load the files, and send it again.

        Raises:
            ConnectionLostError: the connection was lost `TRIES` times.
            UnsupportedError: the target answers with an error.
            ConfigError: the command cannot be started, see `Connection`.
        """
        with self._lock:
            for number in range(TRIES):
                try:
                    return self._connect().ask(request, payload)
                except ConnectionLostError as error:
                    self._connection = None
                    if number == TRIES - 1:
                        raise
                    log.warning("%s; connecting again", error)
        raise AssertionError  # the last try returns or raises

    def _connect(self) -> Connection:
        if self._connection is None:
            self._connection = Connection(self.command, self.timeout_s)
            for file in self._loaded.values():
                self._connection.ask(file.request, file.content)
        return self._connection


@dataclass
class RemoteFile:
    """A file that is loaded on the target.

    Attributes:
        key: the file's name in requests.
        request: the request that loads the file.
        content: the bytes of the file, which are sent again after a lost connection.
        names: the names of the inputs, in the file's order.
    """

    target: Target
    key: str
    request: Mapping[str, Any]
    content: bytes
    names: list[str] = field(default_factory=list)

    def run(self, batch: NDArray[Any]) -> tuple[list[NDArray[np.float32]], float]:
        """Return the outputs for network inputs [n, ...], and the target's seconds."""
        reply = self._ask("run", batch)
        return list(reply.arrays), float(reply.fields["seconds"])

    def time(self, batch: NDArray[Any]) -> float:
        """Return the seconds of a batch on the target; its outputs are not sent back."""
        return float(self._ask("time", batch).fields["seconds"])

    def find_nodes(self, batch: NDArray[Any]) -> Mapping[str, Mapping[str, int]]:
        """Return the number of nodes that ran on the target, by provider and operator."""
        nodes: Mapping[str, Mapping[str, int]] = self._ask("nodes", batch).fields["nodes"]
        return nodes

    def _ask(self, what: str, batch: NDArray[Any]) -> Reply:
        arrays = []
        contents = []
        for values in feed(batch, self.names).values():
            arrays.append([values.dtype.str, values.shape])
            contents.append(values.tobytes())  # bytes are in C order
        request = {"do": what, "key": self.key, "arrays": arrays}
        return self.target.ask(request, b"".join(contents))


@cache
def connect(command: str, timeout_s: float, provider: str = CPU) -> Target:
    """Return the target of a command, the same object for equal arguments.

    The connection opens with the first request.
    """
    return Target(command, timeout_s, provider)
