"""Finds settings that are known to be fast on this CPU, and that a sweep has not tried."""

from collections.abc import Mapping, Sequence

from resnet8ptq.config import words
from resnet8ptq.core import invocation, machine
from resnet8ptq.core.descriptor import find_backends
from resnet8ptq.tracking import origin
from resnet8ptq.tracking.record import RunRecord

# Settings that the command does not repeat. Settings of a backend or method, and formats of files,
# would not fit another one.
_DROPPED = (
    "experiment",
    "evaluate.choice",  # `judge` sets it
    "hydra",
    "latency.",
    "sweep.",
    "tracking.",
    "backend.",
    "format",
    "slim",
    "method",
    "weight_only.",
)


def find_untried(records: Sequence[RunRecord]) -> str:
    """Return the command with the first fast settings of `advise` that no run here had; else empty.

    The backend must need no extra package. Only runs on this CPU count. The text is also empty if
    `origin.find_overrides` finds no settings of such a run.
    """
    # Imported here, because a verdict reads runs without ONNX Runtime and the backends
    from resnet8ptq.backends.advice import TRY
    from resnet8ptq.exploration.search import candidates

    cpu, flags = machine.cpu()
    measured = [record for record in records if record.cpu == cpu]
    repeated = next(filter(None, map(origin.find_overrides, measured)), None)
    if repeated is None:
        return ""

    # Find the first settings that are fast, new, and installed without an extra
    backends = find_backends().values()
    without_extra = [backend.name for backend in backends if not backend.extra]
    for candidate in candidates.advise(flags):
        words = candidate.settings.split()
        wanted = _parse(words)
        is_fast = candidate.verdict == TRY and wanted.get("backend") in without_extra
        was_tried = any(_has(record, wanted) for record in measured)
        if is_fast and not was_tried:
            kept = [word for word in repeated if not _is_left_out(word, wanted)]
            return invocation.command("run", *kept, *words)
    return ""


def _parse(words: Sequence[str]) -> dict[str, str]:
    """Return settings such as `dtype=int8` by their keys."""
    settings = {}
    for word in words:
        key, value = word.split("=", 1)
        settings[key] = value
    return settings


def _has(record: RunRecord, wanted: Mapping[str, str]) -> bool:
    """Return whether a run had these settings, with any `per_channel`."""
    for key, value in wanted.items():
        if key != "per_channel" and record.params.get(key) != value:
            return False
    return True


def _is_left_out(word: str, wanted: Mapping[str, str]) -> bool:
    key = words.key_of(word)
    return key in wanted or key.startswith(_DROPPED)
