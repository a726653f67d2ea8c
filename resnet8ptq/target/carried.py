"""A target without a connection: the user carries requests there in a file, and answers back.

The job file holds the requests that a connection would send, and the result file holds the answers.
A run that writes a job, and a run that reads a result, therefore use the code of a connected
target.
"""

import hashlib
import json
import shutil
import uuid
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from resnet8ptq.core import files
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.target.connection import PROGRAM, Reply
from resnet8ptq.target.measure import JOB
from resnet8ptq.target.target import Target

Size = Annotated[int, Field(ge=0, lt=2**48)]
Name = Annotated[str, Field(max_length=200)]  # short enough for a run's tag


class _Request(BaseModel):
    """The request that an answer repeats, with the hash of the payload."""

    do: Literal["describe", "load", "run", "time", "nodes"]
    run_id: str
    sha256: str
    key: str = ""


class _Answer(BaseModel):
    """The fields of every answer; untrusted, because anyone may have written the result."""

    model_config = ConfigDict(strict=True)

    request: _Request
    bytes: NonNegativeInt
    arrays: list[tuple[str, list[Size]]]


class _About(_Answer):
    machine: Name
    cpu: Name
    cores: PositiveInt
    versions: dict[str, Name]


class _Loaded(_Answer):
    names: list[str]


class _Ran(_Answer):
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Counted(_Answer):
    nodes: dict[str, dict[str, PositiveInt]]


_KINDS: dict[str, type[_Answer]] = {
    "describe": _About,
    "load": _Loaded,
    "run": _Ran,
    "time": _Ran,
    "nodes": _Counted,
}


class JobWriter(Target):
    """Writes each request into a job, and answers it on this machine, except for times.

    Attributes:
        run_id: the id of the run that writes the job; the result repeats the id.
    """

    def __init__(self, folder: Path, python: str, run_id: str, timeout_s: float) -> None:
        """Write the program and an empty job into `folder`.

        Args:
            python: a command that starts a Python interpreter here.
        """
        super().__init__(python, timeout_s)
        self.run_id = run_id
        shutil.copyfile(PROGRAM, folder / PROGRAM.name)
        self._name = uuid.uuid4().hex
        self._job: IO[bytes] = (folder / JOB).open("wb")
        self._payloads: dict[bytes, int] = {}  # positions in the job, by hash

    def describe(self) -> dict[str, Any]:
        """Return this machine under a unique name, so that no outputs are taken from the cache."""
        return {**super().describe(), "job": self._name}

    def ask(self, request: Mapping[str, Any], payload: bytes = b"") -> Reply:
        """Write a request into the job, and answer it here; a `time` request gets a placeholder."""
        self._write({**request, "run_id": self.run_id}, payload)
        if request["do"] == "time":
            return Reply({"seconds": 1.0}, [])  # a placeholder, which the recorder drops
        return super().ask(request, payload)

    def close(self) -> None:
        """Close the job's file."""
        self._job.close()

    def _write(self, request: Mapping[str, Any], payload: bytes) -> None:
        """Append a request to the job; an equal payload is written only the first time."""
        # A payload that the job holds is named by its position
        digest = hashlib.sha256(payload).digest()
        start = self._payloads.get(digest)
        fields = {**request, "bytes": len(payload)}
        if start is not None:
            fields = {**request, "bytes": 0, "at": start, "size": len(payload)}
        self._job.write(json.dumps(fields).encode() + b"\n")
        if start is None:
            self._payloads[digest] = self._job.tell()
            self._job.write(payload)


class Carried(Target):
    """Answers requests from a result file, without a connection.

    Attributes:
        run_id: the id of the run that wrote the job.
    """

    def __init__(self, path: Path) -> None:
        """Read a result.

        Raises:
            ConfigError: the file is not a result, or ends within an answer.
            UnsupportedError: the target failed, or lacks a package.
        """
        super().__init__(str(path), 0.0)
        self._answers: dict[tuple[str, str, str], deque[Reply]] = {}
        for reply in _read(path):
            asked = reply.fields["request"]
            self.run_id: str = asked["run_id"]  # the same in all answers
            key = _key(asked, asked["sha256"])
            self._answers.setdefault(key, deque()).append(reply)
        self._sha256 = files.sha256(path)

    def describe(self) -> dict[str, Any]:
        """Return the machine with the hash of the result, so that the cache keeps results apart."""
        return {**super().describe(), "result": self._sha256}

    def ask(self, request: Mapping[str, Any], payload: bytes = b"") -> Reply:
        """Return the answer to a request; each answer to a `time` request is returned once.

        Raises:
            ConfigError: the result lacks the answer, or has no further time.
        """
        key = _key(request, hashlib.sha256(payload).hexdigest())
        answers = self._answers.get(key)
        if not answers:
            raise ConfigError(
                f"result: got {self.command}, which lacks the answer to {key[0]!r}; expected the "
                "complete output of measure.py, for this run's file and samples"
            )
        if request["do"] == "time":
            return answers.popleft()
        return answers[0]


def _key(request: Mapping[str, Any], sha256: str) -> tuple[str, str, str]:
    """Return the identity of a request: its kind, the file's key, and the payload's hash.

    The last word of the file's key, the number of threads, is left out.
    """
    return str(request["do"]), str(request.get("key", "")).rpartition(" ")[0], sha256


def _read(path: Path) -> list[Reply]:
    """Return the answers of a result file; see `Carried` for the errors."""
    wrong = ConfigError(f"result: got {path}, expected the output of python measure.py > result")

    # An answer is a line, then its bytes; an error has no other fields, so it is raised first
    replies = []
    try:
        with path.open("rb") as file:
            while line := file.readline():
                answer = _Answer.model_validate_json(line)
                content = file.read(answer.bytes)
                if len(content) < answer.bytes:
                    raise wrong
                replies.append(Reply.of(json.loads(line), content))  # raises the target's error
                _KINDS[answer.request.do].model_validate_json(line)
    except (OSError, ValueError, TypeError):
        raise wrong from None

    # All answers belong to one run, and hold numbers only
    runs = {reply.fields["request"]["run_id"] for reply in replies}
    if len(runs) != 1 or not all(map(_has_numbers, replies)):
        raise wrong
    return replies


def _has_numbers(reply: Reply) -> bool:
    """Return whether an answer has arrays of numbers only: no texts, objects or dates."""
    return all(array.dtype.kind in "biuf" for array in reply.arrays)
