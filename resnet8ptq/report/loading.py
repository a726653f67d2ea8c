"""Makes families of runs: reads the values of each sample, and the ranges of some runs."""

import hashlib
import json
import logging
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.core import background, files
from resnet8ptq.core.console import track
from resnet8ptq.core.errors import TrackingError
from resnet8ptq.evaluation.stopped_hits import read_pair
from resnet8ptq.report.families import Cell, Family, group_by_samples, make_family, task_of
from resnet8ptq.report.naming import labels
from resnet8ptq.tasks.scoring.metric import CHOICE
from resnet8ptq.tasks.scoring.outputs import Array
from resnet8ptq.tasks.scoring.values import Paired, PairedTest
from resnet8ptq.tasks.task import Task
from resnet8ptq.tracking import history, ledger, metrics
from resnet8ptq.tracking.mlflow_store.store import Store
from resnet8ptq.tracking.record import RunRecord

log = logging.getLogger(__name__)
MAX_BYTES = 2**30  # largest artifact


def load_families(store: Store, records: Sequence[RunRecord]) -> list[Family]:
    """Return the families of the runs, with the values of each sample and some ranges.

    A file that is missing or damaged causes a warning. A measured run that lacks its values is kept
    as failed.
    """
    return [_load_family(store, family) for family in group_by_samples(records)]


def without_files(records: Sequence[RunRecord], limits: ReportConfig) -> list[Family]:
    """Return the families of runs without reading files, so that no cell counts as measured."""
    families = []
    for members in group_by_samples(records):
        cells = map(Cell, members, labels(members))
        families.append(Family(tuple(cells), limits))
    return families


def _load_family(store: Store, records: Sequence[RunRecord]) -> Family:
    names = labels(records)
    task = task_of(records)
    kept: dict[bytes, Array] = {}
    cells = []
    shown = set()  # backends and calibrations whose ranges are loaded
    pairs = list(zip(records, names, strict=True))
    for record, label in track(pairs, "Reading the runs", "runs"):
        cell = _load_cell(store, task, record, label=label, kept=kept)
        # Runs with one calibration have the same ranges
        kind = (record.backend, record.calib)
        if cell.quantized and kind not in shown:
            cell = replace(cell, ranges=_load_ranges(store, record))
            if cell.ranges.get("activations"):
                shown.add(kind)
        cells.append(cell)
    return make_family(cells)


def _load_cell(
    store: Store, task: Task, record: RunRecord, label: str, kept: dict[bytes, Array]
) -> Cell:
    """Read the values of a run; if they are missing or damaged, warn, and keep it as failed."""
    try:
        return _read_cell(store, task, record, label=label, kept=kept)
    except TrackingError as error:
        log.warning("%s; the run stays without a verdict", error)
        return Cell(record.as_failed(str(error)), label, lost=True)


def _load_ranges(store: Store, record: RunRecord) -> dict[str, Any]:
    lacks = "the figures leave out the ranges"
    return (
        history.read_if_sound(store, record, name="ranges.json", reader=_read_ranges, lacks=lacks)
        or {}
    )


def _read_cell(
    store: Store, task: Task, record: RunRecord, label: str, kept: dict[bytes, Array]
) -> Cell:
    if record.unread:
        raise TrackingError(record.unread)
    # A killed run may have logged metrics but no files.
    is_scored = record.samples is not None and record.value_of(task.metric) is not None
    if not is_scored or record.status != "ok":
        return Cell(record, label)

    # Read the reported samples, and the selection samples if they were scored
    reader = partial(_read_predictions, task.test, kept=kept)
    paired = history.read_artifact(store, record, name="predictions.npz", reader=reader)
    choice = None
    if record.value_of(task.metric, CHOICE) is not None:
        choice = history.read_artifact(store, record, name="choice.npz", reader=reader)
    return Cell(record, label, paired, choice=choice)


def _read_predictions(test: PairedTest, path: Path, kept: dict[bytes, Array]) -> Paired:
    """Read the values of each sample, of a run and of FP32.

    Arrays that are equal in several runs, such as labels, are stored once, in `kept`.
    """
    # An untrusted file may unpack to any size
    with zipfile.ZipFile(path) as archive:
        unpacked_bytes = sum(info.file_size for info in archive.infolist())
        if unpacked_bytes > MAX_BYTES:
            raise ValueError(f"it unpacks to more than {MAX_BYTES} bytes")

    # Read the arrays, and keep equal ones of several runs once
    shared = {}
    with np.load(path, allow_pickle=False) as arrays:
        for name in arrays:
            shared[name] = _keep(arrays[name], kept)
        return read_pair(test, shared)


def _keep(array: Array, kept: dict[bytes, Array]) -> Array:
    content = f"{array.dtype} {array.shape} ".encode() + array.tobytes()
    return kept.setdefault(hashlib.sha256(content).digest(), array)


def _read_ranges(path: Path) -> dict[str, Any]:
    ranges = json.loads(files.read_bytes(path, MAX_BYTES))
    for kind in ("activations", "weights"):
        for low, high in ranges[kind].values():
            if not float(low) <= float(high):
                raise ValueError("a range with low > high")
    return dict(ranges)


def add_earlier_runs(store: Store, families: Sequence[Family]) -> list[Family]:
    """Return the families with the attributes `earlier_runs` and `added` filled in."""
    return [_add_earlier(store, family) for family in families]


def _add_earlier(store: Store, family: Family) -> Family:
    ids = _find_samples(family)
    earlier_runs = background.ask(ledger.count_earlier, store, family.records, ids)
    scored_before = earlier_runs.count > len(earlier_runs.others)  # an earlier run had all
    if ids is None or scored_before:
        return replace(family, earlier_runs=earlier_runs)

    # Mark the samples of the earlier runs
    seen = np.zeros(len(ids), bool)
    for record in _largest_of_each(earlier_runs.others):
        earlier = _read_earlier(store, record)
        if earlier is None or earlier.samples is None:
            return replace(family, earlier_runs=earlier_runs)
        seen |= np.isin(ids, earlier.samples)
    added = None
    if seen.any() and not seen.all():
        added = ~seen
    return replace(family, earlier_runs=earlier_runs, added=added)


def _find_samples(family: Family) -> Array | None:
    """Return the sample ids of the first measured run that has them; None without such a run."""
    for cell in family.measured:
        if cell.paired is not None and cell.paired.samples is not None:
            return cell.paired.samples
    return None


def _read_earlier(store: Store, record: RunRecord) -> Paired | None:
    """Return the values of an earlier run; None if it has none.

    If its files cannot be read, a warning is logged, and the result is None.
    """
    try:
        record = history.complete(store, record)
        return _read_cell(store, task=task_of([record]), record=record, label="", kept={}).paired
    except TrackingError as error:
        log.warning("the samples shared with an earlier run cannot be identified: %s", error)
        return None


def _largest_of_each(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Return, for each digest of samples, the run that scored most of them; runs may stop early."""
    largest: dict[str, RunRecord] = {}
    for record in sorted(records, key=lambda record: record.metrics.get(metrics.SAMPLES, 0)):
        largest[record.samples_digest] = record
    return list(largest.values())
