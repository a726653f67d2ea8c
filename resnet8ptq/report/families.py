"""Families of runs that were scored in the same way on the same samples.

Only runs of one family are ranked and tested together. Tests of one kind are corrected together
(Holm, 1979): differences by class in `make_family`, other differences from FP32 in
`equal_files.adjusted_p`, losses in `verdicts`. `loading` makes the families.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.report import equal_files, naming
from resnet8ptq.tasks import registry
from resnet8ptq.tasks.classification import metric_names
from resnet8ptq.tasks.scoring.metric import CHOICE, Metric
from resnet8ptq.tasks.scoring.statistics import SIGNIFICANCE, holm
from resnet8ptq.tasks.scoring.values import Paired
from resnet8ptq.tasks.task import Task
from resnet8ptq.tracking.ledger import NO_EARLIER_RUNS, EarlierRuns
from resnet8ptq.tracking.record import RunRecord


@dataclass(frozen=True)
class Cell:
    """A run of a family, with any status, and its values of each sample if they were read."""

    record: RunRecord
    label: str  # the combination in words, and the settings that vary
    paired: Paired | None = None
    worse_classes: tuple[str, ...] = ()  # classes that lost significantly, after correction
    choice: Paired | None = None  # values on the selection samples, if any
    lost: bool = False  # the run was measured, but files of its result are missing or damaged
    # `ranges.json` for figures; empty if an earlier run of this backend and calibration has it
    ranges: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    @property
    def quantized(self) -> bool:
        """Whether the values of the run were read, and its network is not FP32 itself."""
        return self.paired is not None and self.record.quantized

    def metric(self, name: str) -> float:
        """Return a metric; NaN if it was not measured."""
        return self.record.metrics.get(name, float("nan"))


@dataclass(frozen=True)
class Family:
    """The cells of one family, whose measured runs are ranked and tested together."""

    cells: tuple[Cell, ...]
    limits: ReportConfig = field(default_factory=ReportConfig)  # see `verdicts.assess`
    earlier_runs: EarlierRuns = NO_EARLIER_RUNS
    # A mask of the samples that no earlier run scored; None if these are all, none or unknown
    added: NDArray[np.bool_] | None = None
    in_turns: bool = False  # whether latencies come from one timing in turns, see `timing`

    @property
    def records(self) -> list[RunRecord]:
        """The records of the cells."""
        return records_of(self.cells)

    @property
    def measured(self) -> list[Cell]:
        """The cells that were measured and quantized."""
        return [cell for cell in self.cells if cell.quantized]

    @property
    def pairs(self) -> list[Paired]:
        """The values of the measured cells, each with those of FP32, in the order of the cells."""
        pairs = []
        for cell in self.measured:
            assert cell.paired is not None  # every measured cell has values
            pairs.append(cell.paired)
        return pairs

    @property
    def sound(self) -> list[Cell]:
        """The measured cells whose FP32 is not in doubt, so that the loss has a meaning."""
        return [cell for cell in self.measured if not cell.record.doubt]

    @cached_property
    def models(self) -> list[Cell]:
        """The first of each group of measured cells with equal files, with a label for the group.

        See `equal_files.group`.
        """
        cells = by_run_id(self.measured)
        keys = naming.varied(self.records)
        models = []
        for members in equal_files.group(records_of(self.measured)):
            cell = cells[members[0].run_id]
            if len(members) > 1:
                cell = replace(cell, label=naming.label(members, keys))
            models.append(cell)
        return models

    @property
    def reported(self) -> list[Cell]:
        """The measured cells without the steps of a search.

        Without separate selection samples, a search scores its steps on the reported samples. A
        family may then have both steps and confirmed models. Verdicts are corrected for the steps,
        but the steps are not recommended.
        """
        return [cell for cell in self.measured if cell.record.split != "choice"]

    @property
    def stopped(self) -> bool:
        """Whether a run could stop early (`evaluate.stop=decided`); sample sizes may differ."""
        return any(record.stopped_early for record in self.records)

    @property
    def planned(self) -> int:
        """The least number of models for which Holm's method corrects the verdicts.

        The number is the largest `report.confirmations` of the runs. If results are lost (see
        `Cell.lost`), it is at least the number of measured and lost models. If only the measured
        models counted, they would pass more easily.
        """
        planned = max((record.confirmations for record in self.records), default=1)
        lost = [cell for cell in self.cells if cell.lost and cell.record.quantized]
        if not lost:
            return planned
        return max(planned, equal_files.count_models(records_of([*self.measured, *lost])))

    @property
    def corrected(self) -> int:
        """The number of models for which Holm's method corrects the verdicts."""
        return max(equal_files.count_models(records_of(self.sound)), self.planned)

    def without_held_out(self) -> "Family":
        """Return the family without the runs on held-out or selection samples."""
        kept = [cell for cell in self.cells if not cell.record.held_out]
        return replace(self, cells=tuple(kept))

    @cached_property
    def task(self) -> Task:
        """The task that scored the runs, see `task_of`."""
        return task_of(self.records)

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
        """Return a cell's accuracy minus FP32's, by class; NaN where it was not measured."""
        return [-cell.metric(key) for key in _loss_keys(self.class_names)]


def _loss_keys(class_names: Sequence[str]) -> list[str]:
    """Return the name of the metric with the loss, for each class."""
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
    """Return the heading of each family, see `naming.headings`."""
    return naming.headings([family.records for family in families])


def class_power(family: Family) -> tuple[float, float] | None:
    """Return the smallest and the largest detectable loss over the classes.

    A loss is detectable if a test of `make_family` has 80% power at the strictest level of Holm's
    correction. The detectable loss of a class is the median over the runs. Returns None if the
    tests state no detectable loss, as with task=binary.
    """
    classes = len(family.class_names)
    models = equal_files.count_models(records_of(family.measured))
    level = SIGNIFICANCE / max(models * classes, 1)
    rows = [paired.found_by_class(classes, level) for paired in family.pairs]
    if not any(rows):
        return None
    by_class = np.median(rows, axis=0)
    return float(by_class.min()), float(by_class.max())


def make_family(cells: Sequence[Cell]) -> Family:
    """Return the family of these cells, with each model's significantly worse classes (Holm)."""
    family = Family(tuple(cells))
    names = family.class_names
    measured = family.measured
    by_class = [paired.by_class(len(names)) for paired in family.pairs]
    if not any(by_class):  # there are no classes, or no tests by class
        return family

    # Holm's correction covers all classes of all models, because the report names them together
    def correct(rows: list[list[float]]) -> list[list[float]]:
        corrected = holm(np.ravel(rows).tolist())
        return np.reshape(corrected, (len(rows), len(names))).tolist()

    def find_worst(rows: list[list[float]]) -> list[float]:
        return [max(of_class) for of_class in zip(*rows, strict=True)]

    class_p = equal_files.by_model(records_of(measured), by_class, test=correct, worst=find_worst)

    # Give each cell its worse classes; cells without a measurement have none
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
    """Return the classes whose accuracy is significantly below FP32's.

    Args:
        p_values: the corrected p-value of each class.
        deltas: accuracy minus FP32's, by class.
    """
    worse = []
    for name, p, delta in zip(names, p_values, deltas, strict=True):
        if p < SIGNIFICANCE and delta < 0:
            worse.append(name)
    return tuple(worse)


def group_by_samples(records: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Return the runs in families, each scored in the same way on the same samples.

    Families with steps of a search come last, because most of them recommend nothing. A run without
    samples (`_has_samples`) joins a family with the same settings of data and task, or else the
    family of the first run with samples. Without runs, the result is one empty family.
    """
    by_settings: dict[tuple[str | None, ...], tuple[str | None, ...]] = {}
    for record in records:
        if _has_samples(record):
            by_settings.setdefault(_asked(record), _scored(record))
    first = next(iter(by_settings.values()), ())

    # Runs without samples join a family by their settings
    families: dict[tuple[str | None, ...], list[RunRecord]] = {}
    for record in records:
        scored = by_settings.get(_asked(record), first)
        if _has_samples(record):
            scored = _scored(record)
        families.setdefault(scored, []).append(record)

    # Reported samples first; the sort keeps the order of the families otherwise
    def is_last(family: list[RunRecord]) -> bool:
        return naming.samples_of(family) == "selection"

    return sorted(families.values(), key=is_last) or [[]]


def _has_samples(record: RunRecord) -> bool:
    """Return whether a run has drawn samples, and has not ended without a result."""
    ended_before = record.status in ("unsupported", "failed", "killed")
    return bool(record.samples_digest) and not ended_before


def _scored(record: RunRecord) -> tuple[str | None, ...]:
    scored_by = record.select("scored_as", "metric", "evaluate.stop")
    return (record.samples_digest, *scored_by, *registry.find_changed(record.params))


def _asked(record: RunRecord) -> tuple[str | None, ...]:
    """Return the settings of the samples and of the task: first the keys, then their values."""
    keys = ["data", "evaluate.split", "evaluate.stop", "task"]
    keys += sorted(key for key in record.params if key.startswith("task."))
    if record.held_out:
        keys.append("held_out_images")
    return (*keys, *record.select(*keys))


def task_of(records: Sequence[RunRecord]) -> Task:
    """Return the task of the first measured run, or else of the first run that logged its task.

    If no run has logged one, the task is classification.
    """
    for record in records:
        if record.samples is not None:
            return record.task
    for record in records:
        if "scored_as" in record.params:
            return record.task
    return registry.recall({})


def best_first(records: Sequence[RunRecord]) -> list[int]:
    """Return the indices of the runs by the metric, the best first, runs without a value last.

    If a run could stop early, see `Family.stopped`, the metric on the selection samples decides,
    because the reported samples may differ.
    """
    metric = task_of(records).metric
    prefix = ""  # for the reported values, which the table shows
    if any(record.stopped_early for record in records):
        prefix = CHOICE

    def cost(index: int) -> float:
        value = records[index].value_of(metric, prefix)
        if value is None or math.isnan(value):
            return math.inf
        return metric.cost(value)

    return sorted(range(len(records)), key=cost)
