"""`result.json`: all settings and metrics of a run that ended as `ok`, in its folder and MLflow.

MLflow shows only some of them, see `params.select` and `metrics.select`.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from resnet8ptq.core import files
from resnet8ptq.core.errors import TrackingError
from resnet8ptq.tracking import metrics, params
from resnet8ptq.tracking.journal import MAX_BYTES, Journal
from resnet8ptq.tracking.record import RunRecord

log = logging.getLogger(__name__)

FILE = "result.json"
# Tags that only the file has, because no query needs them, and 40 tags are too many for a page.
_FILED = ("version.", "cpu_flags", "git_commit", "class_names")


class _Content(BaseModel):
    """The parts that are read from the file, checked because a store is untrusted."""

    model_config = ConfigDict(strict=True)

    params: dict[str, str] = {}
    resolved: dict[str, str] = {}  # files of earlier versions have these
    metrics: dict[str, float] = {}
    tags: dict[str, str] = {}


def write_result(folder: Path, journal: Journal) -> None:
    """Write the file, with those tags that only the file has."""
    tags = {key: value for key, value in journal.tags.items() if _is_filed(key)}
    kept = {
        "status": journal.tags.get("status", ""),
        "reason": journal.tags.get("reason", ""),
        "params": journal.params,
        "metrics": journal.metrics,
        "tags": tags,
    }
    files.write_text(folder / FILE, json.dumps(kept, indent=2))


def shown_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags without those that only the file has."""
    return {key: value for key, value in tags.items() if not _is_filed(key)}


def _is_filed(key: str) -> bool:
    return key.startswith(_FILED)


def add_result(record: RunRecord, path: Path) -> RunRecord:
    """Return the record of a run in MLflow with the content of its file.

    The latencies of `metrics.read_latencies` replace those of the file, because a sweep times its
    best models again.

    Raises:
        TrackingError: the file is missing, unreadable or damaged.
    """
    try:
        kept = _Content.model_validate_json(files.read_bytes(path, MAX_BYTES))
    except (OSError, ValueError) as error:
        reason = f"is damaged ({type(error).__name__})"
        raise TrackingError(f"run {record.run_id}: {FILE} {reason}") from None
    # The right side of each union wins: the exact values of the file, but MLflow's tags
    return record.changed(
        params=params.complete(record.params | kept.params | kept.resolved),
        metrics=kept.metrics | metrics.read_latencies(record.metrics),
        tags=kept.tags | record.tags,
    )
