"""The journal of a run in its folder, so that no data is lost while the store is unavailable.

`record.json` is written when the run starts and when it ends. Meanwhile the process holds `.lock`,
which distinguishes a running run from a killed one.
"""

import json
import os
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from resnet8ptq.core import files
from resnet8ptq.core.errors import TrackingError

FILE = "record.json"
SWEEP_FILE = "sweep.json"  # see `sweep_file`
LOCK = ".lock"
MAX_BYTES = 2**26
NOTE_TAG = "mlflow.note.content"  # the description of a run in MLflow's UI, in Markdown
PARENT_TAG = "mlflow.parentRunId"
Point = tuple[str, float, int, int]  # metric, value, time in ms, step
ID = re.compile(r"\w+")  # of a run; other characters would change a query or a command
ENDED = ("FINISHED", "FAILED", "KILLED")  # MLflow's words


def check_id(text: str, key: str = "run_id") -> str:
    """Return an id from an untrusted store if it is plain: it gets into queries and commands.

    Raises:
        TrackingError: it holds other characters than letters, digits and `_`.
    """
    if not ID.fullmatch(text):
        raise TrackingError(f"{key}: got {text[:100]!r}, expected letters, digits and _")
    return text


@dataclass
class Journal:
    """The data of one run for MLflow."""

    name: str
    experiment: str
    parent_id: str | None = None
    run_id: str | None = None  # in the store; None until the store has answered
    key: str = field(default_factory=lambda: uuid.uuid4().hex)  # a tag by which the store finds it
    start_ms: int = field(default_factory=lambda: int(1000 * time.time()))
    end_ms: int | None = None
    status: str = "RUNNING"  # or one of `ENDED`
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    # Name, source, digest and context, with dtype and shape of the arrays.
    datasets: list[dict[str, Any]] = field(default_factory=list)
    model: dict[str, Any] | None = None  # `file`, `outputs`, `engine`; see `Recorder.log_model`

    @property
    def ended(self) -> bool:
        """Whether the run has ended."""
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
        """Close the journal with a status of `ENDED`, and add `tags`."""
        self.status, self.end_ms = status, int(1000 * time.time())
        self.tags |= tags or {}

    def save(self, folder: Path) -> None:
        """Write the journal, and wait until it is on disk."""
        with files.atomic(folder / FILE) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")
            with temporary.open("rb") as file:
                os.fsync(file.fileno())

    @classmethod
    def load(cls, folder: Path) -> "Journal":
        """Read the journal of a folder.

        Raises:
            TrackingError: the file is damaged.
        """
        path = folder / FILE
        try:
            loaded = cls(**json.loads(files.read_bytes(path, MAX_BYTES)))
            loaded.points = [(str(k), float(v), int(t), int(s)) for k, v, t, s in loaded.points]
            ids = (loaded.key, loaded.run_id or "0", loaded.parent_id or "0")
            if not all(ID.fullmatch(text) for text in ids):
                raise ValueError("an id would change a query")
            if loaded.model and Path(loaded.model["file"]).name != loaded.model["file"]:
                raise ValueError("the model is not in the folder")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise TrackingError(f"{path}: is damaged ({type(error).__name__})") from error
        return loaded


def lock(folder: Path) -> FileLock:
    """Lock a run's folder until `release` is called or the object is deleted.

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
    """Return whether a process still holds the lock of a run's folder."""
    try:
        if (folder / LOCK).exists():
            FileLock(folder / LOCK).acquire(timeout=wait_s).lock.release()
    except Timeout:
        return True
    except OSError:  # no run works in a folder that cannot be written
        pass
    return False
