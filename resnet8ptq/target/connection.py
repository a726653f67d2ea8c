"""A connection to a Python interpreter on another machine, over its standard input and output."""

import json
import os
import re
import select
import shlex
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.core import invocation
from resnet8ptq.core.errors import ConfigError, PtqError, UnsupportedError

Array = NDArray[Any]

PROGRAM = Path(__file__).with_name("measure.py")
# Programs that pass their arguments to a shell on the other machine.
SHELLS = ("ssh", "adb", "plink", "sshpass")
AT_ONCE = 2**20  # bytes written or read in one step
LAST = 400  # characters of the target's messages that an error shows
PACKAGES = {"ai_edge_litert": "ai-edge-litert"}


class ConnectionLostError(PtqError):
    """The command ended, answered with other text, or exceeded the time limit."""


@dataclass(frozen=True)
class Reply:
    """The answer to a request: its fields, and its arrays."""

    fields: Mapping[str, Any]
    arrays: Sequence[Array]

    @classmethod
    def of(cls, fields: Mapping[str, Any], content: bytes) -> "Reply":
        """Return an answer from the fields of its line and the bytes after the line.

        Raises:
            UnsupportedError: the answer is an error, such as a missing runtime.
        """
        error = fields.get("error")
        if error:
            message = f"target.command: on the target, {error}"
            missing = fields.get("missing")
            if missing:
                message += f"; try: pip install {PACKAGES.get(missing, missing)}"
            raise UnsupportedError(message)

        # The arrays follow each other without gaps
        arrays = []
        start = 0
        for dtype, shape in fields["arrays"]:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            arrays.append(np.frombuffer(content[start : start + size], dtype).reshape(shape))
            start += size
        return cls(fields, arrays)


class Connection:
    """A running interpreter, in which the program `measure.py` answers requests."""

    def __init__(self, command: str, timeout_s: float) -> None:
        """Start the command, and send it the program.

        Args:
            command: starts a Python interpreter, such as `ssh pi@board python3`.
            timeout_s: the longest time for an answer.

        Raises:
            ConfigError: the command is empty, has an open quote, or cannot be started.
            ConnectionLostError: the command ends, or does not read the program in time.
        """
        self._command = command
        self._timeout_s = timeout_s
        program = PROGRAM.read_bytes()
        loader = f"import sys;exec(sys.stdin.buffer.read({len(program)}))"

        # Start the interpreter, which reads the program from its standard input
        words = _split(command)
        if Path(words[0]).name in SHELLS:  # quoted, as a shell there splits the loader
            loader = invocation.shell(loader)
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the command)
        try:
            self._process = subprocess.Popen(
                [*words, "-u", "-c", loader],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._messages,
                start_new_session=True,  # Ctrl-C is for this program, which ends the command
            )
        except OSError as error:
            self._messages.close()
            raise ConfigError(
                f"target.command: got {command!r}, which cannot be started ({error.strerror}); "
                "expected a command that starts Python, such as 'ssh pi@board python3'"
            ) from None

        # Writing must not block, because the command may end without reading
        self._read_end = _end_of(self._process.stdout)
        self._write_end = _end_of(self._process.stdin)
        os.set_blocking(self._write_end, False)
        self._buffer = b""
        self._deadline = time.monotonic() + timeout_s
        self._write(program)

    def ask(self, request: Mapping[str, Any], payload: bytes = b"") -> Reply:
        """Send a request, and return its answer.

        Raises:
            ConnectionLostError: the command ends, answers with other text, or is too slow.
            UnsupportedError: the target answers with an error, such as a missing runtime.
        """
        self._deadline = time.monotonic() + self._timeout_s
        self._write(json.dumps({**request, "bytes": len(payload)}).encode() + b"\n")
        self._write(payload)
        fields = self._read_fields()
        return Reply.of(fields, self._read(int(fields["bytes"])))

    def close(self) -> None:
        """End the command."""
        self._process.kill()
        self._process.wait()
        for end in (self._process.stdin, self._process.stdout, self._messages):
            if end is not None:
                end.close()

    def _write(self, content: bytes) -> None:
        # In steps, because the command may read slowly or end
        view = memoryview(content)
        while view:
            self._await([], [self._write_end])
            try:
                written = os.write(self._write_end, view[:AT_ONCE])
            except BlockingIOError:
                continue
            except OSError:  # the command has ended, perhaps after a message
                self._read_fields()
                raise self._lost("ended") from None
            view = view[written:]

    def _read_fields(self) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            self._fill()
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            fields = json.loads(line)
        except ValueError:
            fields = None
        # An answer of the program always has both fields
        if not isinstance(fields, dict) or not isinstance(fields.get("bytes"), int):
            raise self._lost("answered with other text")
        if not isinstance(fields.get("arrays"), list):
            raise self._lost("answered with other text")
        return fields

    def _read(self, count: int) -> bytes:
        while len(self._buffer) < count:
            self._fill()
        content = self._buffer[:count]
        self._buffer = self._buffer[count:]
        return content

    def _fill(self) -> None:
        self._await([self._read_end], [])
        content = os.read(self._read_end, AT_ONCE)
        if not content:
            raise self._lost("ended")
        self._buffer += content

    def _await(self, reads: list[int], writes: list[int]) -> None:
        left = self._deadline - time.monotonic()
        ready = select.select(reads, writes, [], max(0.0, left))
        if not any(ready):
            raise self._lost(f"answered nothing for {self._timeout_s:g} s (target.timeout_s)")

    def _lost(self, how: str) -> ConnectionLostError:
        """End the command, and return the error with the last line of its messages."""
        self._messages.seek(0)
        text = self._messages.read()[-AT_ONCE:].decode(errors="replace")
        self.close()
        _, _, last = text.strip().rpartition("\n")
        last = last.strip() or "no message"
        message = f"target.command: {self._command!r} {how}; its last line: {last[-LAST:]}"
        missing = re.search(r"No module named '(\w+)'", last)
        if missing:
            message += f"; try on the target: pip install {missing[1]}"
        return ConnectionLostError(message)


def _split(command: str) -> list[str]:
    """Return the words of a command; raise `ConfigError` for no word or an open quote."""
    words: list[str] = []
    with suppress(ValueError):  # a quote is open
        words = shlex.split(command)
    if not words:
        raise ConfigError(
            f"target.command: got {command!r}, expected a command that starts Python, such as "
            "'ssh pi@board python3'"
        )
    return words


def _end_of(stream: Any) -> int:
    end: int = stream.fileno()
    return end
