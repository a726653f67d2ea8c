"""Runs that were scored alike on the same images: only those are ranked, tested, drawn together."""

from collections.abc import Sequence

from resnet8ptq.tracking.record import RunRecord


def group(records: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Return the runs by the images they were scored on, and how, in the order of the first.

    A run that came to no images stands with those that were told to use the same ones; where there
    are none, with the first. Without any run there is one family, an empty one.
    """
    told: dict[tuple[str | None, ...], tuple[str | None, ...]] = {}
    for record in records:
        if digest(record):
            told.setdefault(_told(record), _scored(record))
    first = next(iter(told.values()), ())
    families: dict[tuple[str | None, ...], list[RunRecord]] = {}
    for record in records:
        scored = _scored(record) if digest(record) else told.get(_told(record), first)
        families.setdefault(scored, []).append(record)
    return list(families.values()) or [[]]


def digest(record: RunRecord) -> str:
    """Return the digest of the images that a run was scored on; empty where it came to none."""
    return record.tags.get("test_digest", "")


def _scored(record: RunRecord) -> tuple[str | None, ...]:
    keys = ("scored_as", "metric", "task.metric._target_")
    return (digest(record), *(record.params.get(key) for key in keys))


def _told(record: RunRecord) -> tuple[str | None, ...]:
    """Return the settings that say which images are scored."""
    keys = ["data", "evaluate.split", "task"]
    if record.params.get("evaluate.split") == "held_out":
        keys.append("held_out_images")
    return tuple(record.params.get(key) for key in keys)
