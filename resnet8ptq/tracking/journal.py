"""The journal of a run in its folder, so that no data is lost while the store is unavailable.

`record.json` is written when the run starts and when it ends. Meanwhile the process holds `.lock`,
which distinguishes a running run from a killed one.
"""

import json
import math
import os
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

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
        """Close the journal with a status of `ENDED`, and add `tags`.

        A clock that was set back does not end a run before its start.
        """
        self.status = status
        self.end_ms = max(self.start_ms, int(1000 * time.time()))
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
            loaded._check()
            loaded.points = [(str(k), float(v), int(t), int(s)) for k, v, t, s in loaded.points]
            ids = (loaded.key, loaded.run_id or "0", loaded.parent_id or "0")
            if not all(ID.fullmatch(text) for text in ids):
                raise ValueError("an id would change a query")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise TrackingError(f"{path}: is damaged ({type(error).__name__})") from error
        return loaded

    def _check(self) -> None:
        """Raise `ValueError` or `TypeError` unless each value is one that `save` can have written.

        The folder may come from others; MLflow and numpy would take any value far.
        """
        for item in fields(self):
            if not _fits(getattr(self, item.name), _TYPES[item.name]):
                raise TypeError(item.name)
        times = (self.start_ms, self.end_ms or 0)
        if self.status not in ("RUNNING", *ENDED) or not all(0 <= t < _MAX_MS for t in times):
            raise ValueError("status or time")
        for described in self.datasets:
            kinds = dict(described)
            if not _fits([kinds.pop(key) for key in _DESCRIBED], list[str]):
                raise TypeError("datasets")
            _check_kinds(kinds)
        if self.model is not None:
            _check_model(self.model)


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value of JSON has the type of a field."""
    outer, inner = get_origin(kind), get_args(kind)
    if outer is UnionType:
        return any(_fits(value, part) for part in inner)
    if outer is dict:
        return isinstance(value, dict) and all(_fits(item, inner[1]) for item in value.values())
    if outer is list:
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    if outer is tuple:  # of a point, which `load` converts
        return isinstance(value, list) and len(value) == len(inner)
    return kind is Any or type(value) is kind  # True is no number


def _check_kinds(kinds: Mapping[str, Any]) -> None:
    """Check dtypes and shapes of arrays: numbers only, which fit into an address."""
    for kind in kinds.values():
        if isinstance(kind, dict):
            _check_kinds(kind)
            continue
        dtype, shape = kind
        sizes = [size for size in shape if type(size) is int and size >= 0]
        if not _DTYPE.fullmatch(dtype) or len(sizes) < len(shape) or math.prod(sizes) > _MAX_SIZE:
            raise ValueError("datasets")


def _check_model(model: Mapping[str, Any]) -> None:
    if not all(_fits(model.get(key), kind) for key, kind in _MODEL.items()):
        raise TypeError("model")
    if Path(model["file"]).name != model["file"]:
        raise ValueError("the model is not in the folder")


_TYPES = get_type_hints(Journal)
_DESCRIBED = ("name", "source", "digest", "context")  # texts of a data set
_MODEL = {"file": str, "outputs": dict[str, list[int]], "engine": str | None}
_DTYPE = re.compile(r"[<>=|]?(bool|u?int\d{1,2}|float\d{1,3}|[biuf]\d{1,2})")
_MAX_MS, _MAX_SIZE = 2**53, 2**48


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
