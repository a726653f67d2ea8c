"""Assesses families of runs, which have just ended or ended earlier.

This module does not import the figures, because `resnet8ptq verdict` runs without matplotlib.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.core import files
from resnet8ptq.evaluation.paired_latency import FILE, PairedLatency
from resnet8ptq.report import timing, verdicts
from resnet8ptq.report.families import Family
from resnet8ptq.report.loading import MAX_BYTES, load_families
from resnet8ptq.report.recommend import ModelSelection
from resnet8ptq.tracking import history
from resnet8ptq.tracking.mlflow_store.store import Store
from resnet8ptq.tracking.record import RunRecord


def select(
    families: Sequence[Family],
    limits: ReportConfig,
    timings: Sequence[PairedLatency | None] | None = None,
) -> list[ModelSelection]:
    """Return a selection for each family, assessed and with the latencies of its timing.

    Args:
        timings: the timing of each family, or None; without the list, no family was timed.
    """
    result = []
    for family, timed in zip(families, timings or [None] * len(families), strict=True):
        assessed = verdicts.assess(timing.put_in(family, timed), limits)
        result.append(ModelSelection(assessed, timing.without_carried(family, timed)))
    return result


def load_selections(
    store: Store, parent: RunRecord, records: Sequence[RunRecord], limits: ReportConfig
) -> list[ModelSelection]:
    """Return a selection for each family of a sweep's runs, with the sweep's timings, if any."""
    families = load_families(store, records)
    return select(families, limits, _load_timings(store, parent, len(families)))


def _load_timings(store: Store, parent: RunRecord, families: int) -> list[PairedLatency | None]:
    """Return the timing of each family; None for a family that was not timed.

    All are None if the sweep's file is missing, damaged, or of another number of families.
    """
    lacks = "the report leaves out the timing of the best models"
    timings = history.read_if_sound(
        store, record=parent, name=FILE, reader=_read_timings, lacks=lacks, optional=True
    )
    if timings is None or len(timings) != families:
        return [None] * families
    return timings


def _read_timings(path: Path) -> list[PairedLatency | None]:
    timings: list[PairedLatency | None] = []
    for kept in json.loads(files.read_bytes(path, MAX_BYTES)):
        timed = None
        if kept is not None:
            timed = PairedLatency.of(kept)
            timing.check(timed)
        timings.append(timed)
    return timings
