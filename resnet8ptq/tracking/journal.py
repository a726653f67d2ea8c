"""What a run has found, kept in its own folder: the store may be unavailable for a time.

`record.json` is written when the run starts and when it ends; `.lock` is held in between, so that
a run whose process was killed differs from one that still runs.
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
SWEEP_FILE = "sweep.json"  # what a sweep tells its jobs
LOCK = ".lock"
MAX_BYTES = 2**26
PARENT_TAG = "mlflow.parentRunId"
Point = tuple[str, float, int, int]  # metric, value, time in ms, step
ENDED = ("FINISHED", "FAILED", "KILLED")  # MLflow's words


@dataclass
class Journal:
    """One run, as MLflow has it or is to have it.

    Attributes:
        key: of this record alone; a tag of the run, by which the store is asked whether it has it.
        run_id: in the store; None as long as the store could not be reached, or has not answered.
        datasets: name, source, digest and context of each, with dtype and shape of its arrays.
        model: the file to log as a model, with `outputs` and `engine`, see `Recorder.log_model`.
        status: RUNNING, or one of `ENDED`.
    """

    name: str
    experiment: str
    parent_id: str | None = None
    run_id: str | None = None
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    start_ms: int = field(default_factory=lambda: int(1000 * time.time()))
    end_ms: int | None = None
    status: str = "RUNNING"
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    datasets: list[dict[str, Any]] = field(default_factory=list)
    model: dict[str, Any] | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.status in ENDED

    @property
    def metrics(self) -> dict[str, float]:
        """Each metric's last value."""
        return {key: value for key, value, *_ in self.points}

    def note(self, metrics: Mapping[str, float], step: int = 0) -> list[Point]:
        """Add metrics at `step`, with the time; return what was added."""
        now = int(1000 * time.time())
        added = [(key, value, now, step) for key, value in metrics.items()]
        self.points += added
        return added

    def end(self, status: str, tags: Mapping[str, str] | None = None) -> None:
        """Close the record as one of `ENDED`, with `tags`."""
        self.status, self.end_ms = status, int(1000 * time.time())
        self.tags |= tags or {}

    def save(self, folder: Path) -> None:
        """Write it, and wait until the disk has it."""
        with files.atomic(folder / FILE) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")
            with temporary.open("rb") as file:
                os.fsync(file.fileno())

    @classmethod
    def load(cls, folder: Path) -> "Journal":
        """Read what `save` left.

        Raises:
            TrackingError: the file is damaged.
        """
        path = folder / FILE
        try:
            loaded = cls(**json.loads(files.read_bytes(path, MAX_BYTES)))
            loaded.points = [(str(k), float(v), int(t), int(s)) for k, v, t, s in loaded.points]
            ids = (loaded.key, loaded.run_id or "0", loaded.parent_id or "0")
            if not all(re.fullmatch(r"\w+", found) for found in ids):
                raise ValueError("an id would change a query")
            if loaded.model and Path(loaded.model["file"]).name != loaded.model["file"]:
                raise ValueError("the model is not in the folder")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise TrackingError(f"{path}: is damaged ({type(error).__name__})") from error
        return loaded


def lock(folder: Path) -> FileLock:
    """Take the lock of a run's folder, for as long as the object lives or until `release`.

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
    """Tell whether a run works in the folder: its process holds the lock, whatever ends it."""
    try:
        if (folder / LOCK).exists():
            FileLock(folder / LOCK).acquire(timeout=wait_s).lock.release()
    except Timeout:
        return True
    except OSError:  # no run works in a folder that cannot be written
        pass
    return False
