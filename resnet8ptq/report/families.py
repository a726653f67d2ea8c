"""Runs that were scored on the same images: only those are ranked, tested and drawn together."""

from collections.abc import Sequence

from resnet8ptq.tracking.history import Record


def group(records: Sequence[Record]) -> list[list[Record]]:
    """Return the runs by the images they were scored on, in the order of the first of each.

    A run that came to no images stands with those that were told to use the same ones; where there
    are none, with the first. Without any run there is one family, an empty one.
    """
    told: dict[tuple[str | None, ...], str] = {}
    for record in records:
        if scored := digest(record):
            told.setdefault(_told(record), scored)
    first = next(iter(told.values()), "")
    families: dict[str, list[Record]] = {}
    for record in records:
        scored = digest(record) or told.get(_told(record), first)
        families.setdefault(scored, []).append(record)
    return list(families.values()) or [[]]


def digest(record: Record) -> str:
    """Return the digest of the images that a run was scored on; empty where it came to none."""
    return record.tags.get("test_digest", "")


def _told(record: Record) -> tuple[str | None, ...]:
    """Return the settings that say which images are scored."""
    keys = ["data", "evaluate.split"]
    if record.params.get("evaluate.split") == "held_out":
        keys.append("held_out_images")
    return tuple(record.params.get(key) for key in keys)
