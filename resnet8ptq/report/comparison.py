"""A sweep read back from MLflow, and the tests of its differences.

Only runs on the same samples are compared; see `facts.group`. P-values of one kind are corrected
together (Holm, 1979). The kinds are: runs against their FP32 baselines (`facts.adjusted_p`), the
same by class, and runs against the best one (`verdicts.as_good_as`).
"""

import hashlib
import json
import logging
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.core import background, files
from resnet8ptq.core.console import track
from resnet8ptq.core.errors import TrackingError
from resnet8ptq.evaluation.stopped_hits import read_pair
from resnet8ptq.report import equal_files, facts
from resnet8ptq.tasks.classification import metric_names
from resnet8ptq.tasks.scoring.metric import CHOICE, Metric
from resnet8ptq.tasks.scoring.outputs import Array
from resnet8ptq.tasks.scoring.statistics import SIGNIFICANCE, holm
from resnet8ptq.tasks.scoring.values import Paired, PairedTest
from resnet8ptq.tasks.task import Task
from resnet8ptq.tracking import history, ledger, metrics
from resnet8ptq.tracking.ledger import NO_EARLIER_RUNS, EarlierRuns
from resnet8ptq.tracking.mlflow_store.store import Store
from resnet8ptq.tracking.record import RunRecord

log = logging.getLogger(__name__)

MAX_BYTES = 2**30  # of one artifact

T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """One requested combination, with any outcome."""

    record: RunRecord
    label: str  # the combination in words
    paired: Paired | None = None
    worse_classes: tuple[str, ...] = ()  # classes that lost significantly, after correction
    choice: Paired | None = None  # on the selection samples, if any
    lost: bool = False  # measured, but its predictions are missing or damaged
    # `ranges.json`, only for the first run of each backend and calibration, which the figures show.
    ranges: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    @property
    def quantized(self) -> bool:
        """Whether the run was measured and is not the baseline itself."""
        return self.paired is not None and self.record.quantized

    def metric(self, name: str) -> float:
        """Return a metric; NaN if it was not measured."""
        return self.record.metrics.get(name, float("nan"))


@dataclass(frozen=True)
class Family:
    """The cells of one family, scored on the same samples and tested together."""

    cells: tuple[Cell, ...]
    limits: ReportConfig = field(default_factory=ReportConfig)  # see `verdicts.assess`
    earlier_runs: EarlierRuns = NO_EARLIER_RUNS  # on the same samples
    # Samples that no earlier run was scored on, if only some
    added: NDArray[np.bool_] | None = None

    @property
    def records(self) -> list[RunRecord]:
        """The records of the cells."""
        return records_of(self.cells)

    @property
    def measured(self) -> list[Cell]:
        """The quantized cells with predictions."""
        return [cell for cell in self.cells if cell.quantized]

    @property
    def pairs(self) -> list[Paired]:
        """The values of the measured cells beside those of FP32, in their order."""
        pairs = []
        for cell in self.measured:
            assert cell.paired is not None  # of every measured cell
            pairs.append(cell.paired)
        return pairs

    @property
    def sound(self) -> list[Cell]:
        """The measured cells whose FP32 is not in doubt, so that the loss has a meaning."""
        return [cell for cell in self.measured if not cell.record.doubt]

    @cached_property
    def models(self) -> list[Cell]:
        """The measured cells; runs with equal files count as one, with all their names."""
        cells = by_run_id(self.measured)
        keys = facts.varied(self.records)
        models = []
        for members in equal_files.group(records_of(self.measured)):
            cell = cells[members[0].run_id]
            if len(members) > 1:
                cell = replace(cell, label=facts.label(members, keys))
            models.append(cell)
        return models

    @property
    def stopped(self) -> bool:
        """Whether runs stopped when their verdict was decided, after unequal numbers of samples."""
        return any(map(facts.is_stopped, self.records))

    @property
    def planned(self) -> int:
        """The smallest number of models by which verdicts are corrected.

        It is `report.confirmations`. If the file of a model was lost, it is at least the number of
        measured models, so that the others do not pass more easily.
        """
        planned = max((record.confirmations for record in self.records), default=1)
        lost = [cell for cell in self.cells if cell.lost and cell.record.quantized]
        if not lost:
            return planned
        return max(planned, facts.count_models(records_of([*self.measured, *lost])))

    def without_held_out(self) -> "Family":
        """Return the family without the runs on held-out or selection samples."""
        kept = [cell for cell in self.cells if not cell.record.held_out]
        return replace(self, cells=tuple(kept))

    @cached_property
    def task(self) -> Task:
        """The task that scored the runs."""
        return facts.task_of(self.records)

    @property
    def metric(self) -> Metric:
        """The task's primary metric."""
        return self.task.metric

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """Class names in the order of the labels; empty if no run has logged its loss by class."""
        names = self.task.class_names
        keys = set(_loss_keys(names))
        for cell in self.cells:
            if not keys.isdisjoint(cell.record.metrics):
                return names
        return ()

    def class_deltas(self, cell: Cell) -> list[float]:
        """Return a cell's accuracy minus FP32's on each class; NaN if it was not measured."""
        return [-cell.metric(key) for key in _loss_keys(self.class_names)]


def _loss_keys(class_names: Sequence[str]) -> list[str]:
    """Return the key of the metric with the loss of each class."""
    return [f"class/{name}/drop" for name in metric_names(class_names)]


class _WithRecord(Protocol):
    @property
    def record(self) -> RunRecord:
        """The run."""


def records_of(items: Iterable[_WithRecord]) -> list[RunRecord]:
    """Return the records of cells, or of rows of a table, in their order."""
    return [item.record for item in items]


def all_records(families: Iterable[Family]) -> list[RunRecord]:
    """Return the records of all families, in their order."""
    records: list[RunRecord] = []
    for family in families:
        records += family.records
    return records


def with_verdict(cells: Iterable[Cell], outcome: str) -> list[Cell]:
    """Return the cells with this outcome, one of `verdicts.OUTCOMES`, in their order."""
    return [cell for cell in cells if cell.record.verdict == outcome]


def by_run_id(cells: Iterable[Cell]) -> dict[str, Cell]:
    """Return cells by the ids of their runs, in their order."""
    return {cell.record.run_id: cell for cell in cells}


def headings_of(families: Sequence[Family]) -> list[str]:
    """Return the heading of each family, see `facts.headings`."""
    return facts.headings([family.records for family in families])


def class_power(family: Family) -> tuple[float, float] | None:
    """Return the smallest and the largest detectable loss over the classes.

    A loss is detectable if the tests of `compare` have 80% power; for each class, the median over
    the runs counts. None without classes.
    """
    classes = len(family.class_names)
    models = facts.count_models(records_of(family.measured))
    level = SIGNIFICANCE / max(models * classes, 1)
    rows = [paired.found_by_class(classes, level) for paired in family.pairs]
    if not any(rows):
        return None
    by_class = np.median(rows, axis=0)
    return float(by_class.min()), float(by_class.max())


def load_families(store: Store, records: Sequence[RunRecord]) -> list[Family]:
    """Read the predictions and ranges of a sweep's runs from MLflow; test each family of runs.

    If a run's file is missing or damaged, the function warns, and keeps the run as failed.
    """
    return [_load_family(store, family) for family in facts.group(records)]


def without_files(records: Sequence[RunRecord], limits: ReportConfig) -> list[Family]:
    """Return the families of runs whose files are not read, so that none has a verdict."""
    families = []
    for members in facts.group(records):
        cells = map(Cell, members, facts.labels(members))
        families.append(Family(tuple(cells), limits))
    return families


def add_earlier_runs(store: Store, families: Sequence[Family]) -> list[Family]:
    """Return the families with their earlier runs on the same samples, and the added samples."""
    return [_add_earlier(store, family) for family in families]


def _add_earlier(store: Store, family: Family) -> Family:
    ids = _find_samples(family)
    earlier_runs = background.ask(ledger.count_earlier, store, family.records, ids)
    scored_before = earlier_runs.count > len(earlier_runs.others)  # one scored all samples
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
    """Return the ids of the scored samples; None if no run has logged them."""
    for cell in family.measured:
        if cell.paired is not None and cell.paired.samples is not None:
            return cell.paired.samples
    return None


def _read_earlier(store: Store, record: RunRecord) -> Paired | None:
    """Return the values of an earlier run; None, with a warning, if its files are gone."""
    try:
        record = history.complete(store, record)
        return _read_cell(
            store, task=facts.task_of([record]), record=record, label="", kept={}
        ).paired
    except TrackingError as error:
        log.warning("the samples shared with an earlier run cannot be identified: %s", error)
        return None


def _largest_of_each(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the run with the most scored samples of each test set, since runs may stop early."""
    largest: dict[str, RunRecord] = {}
    for record in sorted(records, key=lambda record: record.metrics.get(metrics.SAMPLES, 0)):
        largest[record.samples_digest] = record
    return list(largest.values())


def _load_family(store: Store, records: Sequence[RunRecord]) -> Family:
    labels = facts.labels(records)
    task = facts.task_of(records)
    kept: dict[bytes, Array] = {}
    cells = []
    shown = set()  # backends with their calibration
    pairs = list(zip(records, labels, strict=True))
    for record, label in track(pairs, "Reading the runs", "runs"):
        cell = _load_cell(store, task, record, label=label, kept=kept)
        kind = (record.backend, record.calib)
        if cell.quantized and kind not in shown:
            cell = replace(cell, ranges=_load_ranges(store, record))
            if cell.ranges.get("activations"):
                shown.add(kind)
        cells.append(cell)
    return compare(cells)


def _load_cell(
    store: Store, task: Task, record: RunRecord, label: str, kept: dict[bytes, Array]
) -> Cell:
    """Read a run; if its predictions are missing or damaged, warn, and keep it as failed."""
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
    # A killed run may have logged its metrics but not its files.
    is_scored = record.samples is not None and record.value_of(task.metric) is not None
    if not is_scored or record.status != "ok":
        return Cell(record, label)
    reader = partial(_read_predictions, task.test, kept=kept)
    paired = history.read_artifact(store, record, name="predictions.npz", reader=reader)
    choice = None
    if record.value_of(task.metric, CHOICE) is not None:
        choice = history.read_artifact(store, record, name="choice.npz", reader=reader)
    return Cell(record, label, paired, choice=choice)


def _read_predictions(test: PairedTest, path: Path, kept: dict[bytes, Array]) -> Paired:
    """Read predictions; equal arrays of several runs, such as labels, share memory by `kept`."""
    with zipfile.ZipFile(path) as archive:
        unpacked_bytes = sum(info.file_size for info in archive.infolist())
        if unpacked_bytes > MAX_BYTES:
            raise ValueError(f"it unpacks to more than {MAX_BYTES} bytes")
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


def compare(cells: Sequence[Cell]) -> Family:
    """Return the family of these cells, with each model's significantly worse classes (Holm)."""
    family = Family(tuple(cells))
    names = family.class_names
    measured = family.measured
    by_class = [paired.by_class(len(names)) for paired in family.pairs]
    if not any(by_class):  # no classes, or no test of them
        return family

    def correct(rows: list[list[float]]) -> list[list[float]]:
        corrected = holm(np.ravel(rows).tolist())
        return np.reshape(corrected, (len(rows), len(names))).tolist()

    class_p = facts.by_model(records_of(measured), by_class, correct)
    worse = {}
    for cell, p_values in zip(measured, class_p, strict=True):
        worse[id(cell)] = _find_worse(names, p_values, family.class_deltas(cell))
    tested = []
    for cell in cells:
        tested.append(replace(cell, worse_classes=worse.get(id(cell), ())))
    return Family(tuple(tested))


def _find_worse(
    names: Sequence[str], p_values: Sequence[float], deltas: Sequence[float]
) -> tuple[str, ...]:
    """Return the classes with a significant loss."""
    worse = []
    for name, p, delta in zip(names, p_values, deltas, strict=True):
        if p < SIGNIFICANCE and delta < 0:
            worse.append(name)
    return tuple(worse)
