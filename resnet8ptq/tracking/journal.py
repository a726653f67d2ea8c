"""A run's journal: its data in its own folder, so that an ended run is kept without the store.

`record.json` is written when the run starts and when it ends. In between, the process of the run
holds `.lock`, which distinguishes a running run from a killed one.
"""

import json
import math
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from filelock import FileLock, Timeout
from pydantic import AfterValidator, AliasChoices, ConfigDict, Field, TypeAdapter

from resnet8ptq.core import files
from resnet8ptq.core.errors import TrackingError

FILE = "record.json"
LOCK = ".lock"
MAX_BYTES = 2**26
NOTE_TAG = "mlflow.note.content"  # the description of a run in MLflow's UI, in Markdown
PARENT_TAG = "mlflow.parentRunId"
EXIT_CODE_TAG = "exit_code"  # the exit code of a failed run: 2 for a wrong input, else 1
CARRIED_TAG = "target/machine"  # the machine that measured the file by hand after the run
Point = tuple[str, float, int, int]  # metric, value, time in ms, step
ENDED = ("FINISHED", "FAILED", "KILLED")  # MLflow's statuses of a run that has ended


def _check_shape(shape: list[int]) -> list[int]:
    if math.prod(shape) > _MAX_SIZE:
        raise ValueError("larger than an address")
    return shape


def _check_name(file: str) -> str:
    if Path(file).name != file:
        raise ValueError("not in the folder")
    return file


_MAX_MS = 2**53
_MAX_SIZE = 2**48
# The folder may come from other people, and MLflow and numpy do not check these values. Ids are
# parts of queries, and dtypes must be numeric.
Id = Annotated[str, Field(pattern=r"^\w+$")]
Time = Annotated[int, Field(ge=0, lt=_MAX_MS)]
Dtype = Annotated[str, Field(pattern=r"^[<>=|]?(bool|u?int\d{1,2}|float\d{1,3}|[biuf]\d{1,2})$")]
Shape = Annotated[list[Annotated[int, Field(ge=0)]], AfterValidator(_check_shape)]
Kind = tuple[Dtype, Shape]  # dtype and shape of an array
_SAMPLES = AliasChoices("samples", "images")  # journals of earlier versions have the second


_STRICT = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True)
class DataSet:
    """A set of samples, described by the dtype and the shape of its arrays.

    Attributes:
        context: `calibration` or `test`, as MLflow shows it.
        samples: dtype and shape of the stored samples; for structured samples, those of each input
            by name.
        targets: dtype and shape of the labels; None without numeric labels.
    """

    __pydantic_config__ = _STRICT

    name: str
    source: str
    digest: str
    context: str
    samples: Annotated[Kind | dict[str, Kind], Field(validation_alias=_SAMPLES)]
    targets: Kind | None = None


@dataclass(frozen=True)
class LoggedModel:
    """The run's artifact, a file of its folder, for MLflow; see `Recorder.log_model`."""

    __pydantic_config__ = _STRICT

    file: Annotated[str, AfterValidator(_check_name)]
    outputs: dict[str, list[int]]
    engine: str | None


@dataclass
class Journal:
    """The data of one run, from which `mlflow_store` logs the run to MLflow."""

    __pydantic_config__ = _STRICT

    name: str
    experiment: str
    parent_id: Id | None = None
    run_id: Id | None = None  # the id in the store; None until the store has answered
    key: Id = field(default_factory=lambda: uuid.uuid4().hex)  # a tag by which the store finds it
    start_ms: Time = field(default_factory=lambda: int(1000 * time.time()))
    end_ms: Time | None = None
    status: Annotated[str, Field(pattern=f"^(RUNNING|{'|'.join(ENDED)})$")] = "RUNNING"
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    datasets: list[DataSet] = field(default_factory=list)
    model: LoggedModel | None = None

    @property
    def ended(self) -> bool:
        """Whether the status is finished, failed or killed."""
        return self.status in ENDED

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric."""
        return {key: value for key, value, *_ in self.points}

    def note(self, metrics: Mapping[str, float], step: int = 0) -> list[Point]:
        """Add metrics at `step`, with the time; return the added points."""
        now = int(1000 * time.time())
        added = [(key, value, now, step) for key, value in metrics.items()]
        self.points += added
        return added

    def end(self, status: str, tags: Mapping[str, str] | None = None) -> None:
        """Close the journal with a status of `ENDED`, and add `tags`.

        If the clock was set back to before the start, the run ends at its start.
        """
        self.status = status
        self.end_ms = max(self.start_ms, int(1000 * time.time()))
        self.tags |= tags or {}

    def save(self, folder: Path) -> None:
        """Write the journal; its content is on disk before it replaces the earlier file."""
        with files.atomic(folder / FILE) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")
            with temporary.open("rb") as file:
                os.fsync(file.fileno())

    @classmethod
    def load(cls, folder: Path) -> "Journal":
        """Read the journal of a folder.

        Raises:
            TrackingError: the file is missing, unreadable or damaged.
        """
        path = folder / FILE
        try:
            return _ADAPTER.validate_json(files.read_bytes(path, MAX_BYTES))
        except (OSError, ValueError) as error:
            raise TrackingError(f"{path}: is damaged ({type(error).__name__})") from error


_ADAPTER = TypeAdapter(Journal)


def lock(folder: Path) -> FileLock:
    """Lock a run's folder until the result is released or deleted.

    Raises:
        TrackingError: another run works in the folder.
    """
    held = FileLock(folder / LOCK)
    try:
        held.acquire(timeout=0)
    except Timeout:
        raise TrackingError(f"{folder}: another run works here") from None
    return held


def is_alive(folder: Path, wait_s: float = 0) -> bool:
    """Return whether a process still holds the lock of a run's folder after `wait_s` seconds.

    The result is also False if this process may not open the lock.
    """
    try:
        if (folder / LOCK).exists():
            FileLock(folder / LOCK).acquire(timeout=wait_s).lock.release()
    except Timeout:
        return True
    except OSError:  # no run works in a folder that cannot be written
        pass
    return False
