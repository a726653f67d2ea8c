"""Reads the limits of `report` that runs have logged; requested limits replace them."""

import json
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from resnet8ptq.config.limits import check, require
from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.core.errors import TrackingError
from resnet8ptq.tracking.record import RunRecord

LIMITS = ("max_drop", "min_sqnr_db", "min_accuracy")  # keys of `report`
PREFER = "prefer"  # a key of `report`


def limits_of(records: Sequence[RunRecord], asked: Mapping[str, float | None]) -> ReportConfig:
    """Return each of `LIMITS` as requested, else as the runs have logged it, else its default.

    `prefer` is as logged, or else the default. Other keys have their defaults.

    Args:
        asked: requested limits by key in `LIMITS`; None for the logged limit.

    Raises:
        ConfigError: a limit is out of range, a requested one is not a number, or the logged
            `prefer` is unknown.
        TrackingError: a logged limit is not a number; an untrusted store may hold any text.
    """
    for name, value in asked.items():
        require(name, value, value is None or isinstance(value, numbers.Real), "a number")
    limits: dict[str, Any] = {}
    preferred = _find_preferred(records)
    if preferred:
        limits[PREFER] = preferred

    # Requested limits replace the logged ones
    try:
        for name, text in zip(LIMITS, _find_logged(records), strict=False):
            if text is not None:
                limits[name] = _read(name, text)
        for name, value in asked.items():
            if value is not None:
                limits[name] = value
        config = ReportConfig(**limits)
        check(config)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise TrackingError("report.max_drop: the runs have logged invalid limits") from None
    return config


def _read(name: str, text: str) -> Any:
    value = json.loads(text)
    if value is None and name != "min_accuracy":  # only this limit is optional
        raise ValueError(f"{name} is null")
    return value


def _find_preferred(records: Sequence[RunRecord]) -> str | None:
    """Return the first logged preference; None without one."""
    for record in records:
        [preferred] = record.select(f"report.{PREFER}")
        if preferred:
            return preferred
    return None


def _find_logged(records: Sequence[RunRecord]) -> tuple[str | None, ...]:
    """Return the `LIMITS` of the first run that has logged `max_drop`; empty without such a run."""
    keys = [f"report.{name}" for name in LIMITS]
    for record in records:
        texts = record.select(*keys)
        if texts[0] is not None:
            return texts
    return ()
