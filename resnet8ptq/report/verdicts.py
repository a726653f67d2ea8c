"""Verdicts on the loss of models against FP32: pass, fail, undecided or void.

A model passes if the one-sided 95% upper bound of its paired loss is within the limit. The model
fails if the lower bound is beyond the limit. Both are corrected for the models that are assessed
together, usually those of a family (Holm, 1979). Runs with equal files count as one model. A model
that neither passes nor fails is undecided, because a loss that is not significant does not prove
equality. A verdict is void if FP32 itself is not shown to be better than chance, or is clearly
below the accuracy that the user expects. A loss against a broken network has no meaning.

Unless the verdict is void, a model also fails if its metric is below the smallest accepted value,
such as `report.min_accuracy`. It also fails if a scored output, or a part of one, is the same for
every sample, although FP32's is not, see `Scope.find_silent`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.core.text import printable
from resnet8ptq.report import equal_files
from resnet8ptq.report.equal_files import adjusted_p, by_model
from resnet8ptq.report.families import Cell, Family, by_run_id, records_of
from resnet8ptq.report.naming import varied
from resnet8ptq.report.table import VOID
from resnet8ptq.tasks.scoring.metric import BASELINE, CHOICE, TOTAL, Metric
from resnet8ptq.tasks.scoring.statistics import (
    SIGNIFICANCE,
    UNKNOWN,
    Z95,
    Margin,
    holm,
    round_size,
)
from resnet8ptq.tracking.record import RunRecord

PASS = "pass"
FAIL = "fail"
UNDECIDED = "undecided"
UNSUPPORTED = "unsupported"  # for a run that was not measured, in addition to `OUTCOMES`
EXIT_CODES = {PASS: 0, FAIL: 3, UNDECIDED: 4, VOID: 4, UNSUPPORTED: 4}
OUTCOMES = (PASS, FAIL, UNDECIDED, VOID)
MARGIN = 0.5  # share of the limit that is the non-inferiority margin against the best model
NAMED = 12  # most models that the note on added samples names
ADDED_NOTE = (
    "{seen:,} of these {total:,} samples were scored by earlier runs. If the others were added "
    "because a verdict was undecided, a pass on all of them is too easy: the first look counts "
    "twice. Rely on the {added:,} added samples alone: {alone}."
)
MOST_NEEDED = 1_000_000  # largest number of samples that is shown


@dataclass(frozen=True)
class Verdict:
    """The verdict on a model: its parts, its text, and the sample size that would decide."""

    loss: str  # the verdict on the loss alone: `PASS`, `FAIL`, `UNDECIDED` or `VOID`
    # If undecided, the sample size that would decide, see `Margin.items_needed`; else 0
    needed: float = 0.0
    fault: str = ""  # why the model fails independently of the loss, see `find_fault`

    def __str__(self) -> str:
        return self.say()

    @property
    def outcome(self) -> str:
        """The verdict on the model, on which tables, pages and exit codes agree."""
        if self._is_at_fault:
            return FAIL
        return self.loss

    @property
    def _is_at_fault(self) -> bool:
        """Whether the model fails for a reason other than its loss; a void verdict stays void."""
        return bool(self.fault) and self.loss != VOID

    def say(self, after: str = "") -> str:
        """Return the verdict as text: outcome, sample size, `after` and fault, in this order."""
        text = self.outcome
        if self.samples is not None:
            text += f" (needs {self.samples:,} samples)"
        text += after
        if self._is_at_fault:
            text += f", {self.fault}"
        return text

    @property
    def samples(self) -> int | None:
        """The rounded sample size that would decide; None if it is unknown or not needed.

        A size beyond `MOST_NEEDED` counts as unknown.
        """
        if self.outcome != UNDECIDED or not 0 < self.needed <= MOST_NEEDED:
            return None
        return round_size(self.needed)


def assess(family: Family, limits: ReportConfig) -> Family:
    """Return the family with records that hold verdicts, and the values and limits behind them.

    An unsupported run has the verdict `UNSUPPORTED`. FP32 and failed runs have no verdict. Tables,
    pages, recommendations, programs and deployments read these records, so that they agree. Call
    this once for each family, after `loading.load_families` and, if the models were timed in turns,
    `timing.put_in`.
    """
    metric = family.metric
    adjusted = adjusted_p(family.records)
    keys = varied(family.records)
    equal = _find_equal_runs(family.records)

    # Keep the limits with the verdicts, because readers of a record have no config
    cells = []
    for cell in family.cells:
        record = cell.record
        settings = {}
        for key in keys:
            settings[printable(key)] = printable(record.params.get(key, ""))
        verdict = None
        if record.status == UNSUPPORTED:
            verdict = UNSUPPORTED

        # `assess_losses` gives measured runs a verdict
        known = record.changed(
            label=cell.label,
            settings=settings,
            metric=metric,
            value=record.value_of(metric),
            fp32_value=record.value_of(metric, BASELINE),
            least=least_of(metric, limits),
            limit=metric.limit(limits),
            p_value=adjusted.get(record.run_id),
            equal_runs=equal[record.run_id],
            verdict=verdict,
        )
        cells.append(replace(cell, record=known))
    return assess_losses(replace(family, cells=tuple(cells), limits=limits))


def assess_losses(family: Family) -> Family:
    """Return a family of assessed runs with verdicts that are corrected for these runs only.

    Models that other samples chose need no correction for the models that were not chosen.
    """
    metric = family.metric
    limits = family.limits

    # Test the losses against a sound FP32
    margins = []
    for cell in family.sound:
        margin = margin_at(metric, cell, metric.limit(limits))
        margins.append((margin, int(cell.metric(TOTAL))))
    decided = _decide_by_model(family, family.sound, margins)

    # The other verdicts are void
    losses = dict.fromkeys(by_run_id(family.measured), Verdict(VOID))
    for cell, loss in zip(family.sound, decided, strict=True):
        losses[cell.record.run_id] = loss
    assessed = [_with_verdict(cell, metric, limits, losses=losses) for cell in family.cells]
    return replace(family, cells=tuple(assessed))


def _with_verdict(
    cell: Cell, metric: Metric, limits: ReportConfig, losses: Mapping[str, Verdict]
) -> Cell:
    """Return the cell with its verdict; unchanged if `losses` has none for it."""
    record = cell.record
    verdict = losses.get(record.run_id)
    if verdict is None:
        return cell
    verdict = replace(verdict, fault=find_fault(metric, record, limits))

    # Say after how many samples a run that stopped early was decided
    after = ""
    if record.samples_planned is not None and record.samples is not None:
        after = f" after {record.samples:,} of {record.samples_planned:,}"
    decided = {
        "verdict": verdict.outcome,
        "loss_verdict": verdict.loss,
        "fault": verdict.fault,
        "verdict_text": printable(verdict.say(after)),
        "samples_needed": verdict.samples,
    }
    return replace(cell, record=record.model_copy(update=decided))


def _decide_by_model(
    family: Family, cells: Sequence[Cell], margins: Sequence[tuple[Margin, int]]
) -> list[Verdict]:
    """Return a verdict on the loss for each cell.

    It is corrected for the models of these cells, or for `Family.planned` if that is more.

    Args:
        margins: see `decide`.
    """
    test = partial(decide, planned=family.planned)
    return by_model(records_of(cells), margins, test, worst=find_worst)


def find_worst(margins: Sequence[tuple[Margin, int]]) -> tuple[Margin, int]:
    """Return the margin that is farthest from a pass, with its number of samples."""
    return max(margins, key=lambda item: (item[0].p_within, -item[0].p_beyond, -item[1]))


def _find_equal_runs(records: Sequence[RunRecord]) -> dict[str, tuple[str, ...]]:
    """Return the ids of the other runs in a run's group of `equal_files`, by run id."""
    others = {}
    for members in equal_files.group(records):
        for record in members:
            ids = [member.run_id for member in members if member is not record]
            others[record.run_id] = tuple(ids)
    return others


def find_fault(metric: Metric, record: RunRecord, limits: ReportConfig) -> str:
    """Return why a model fails independently of its loss; empty without such a reason."""
    if record.silent:
        return record.silent
    least = least_of(metric, limits)
    value = record.value_of(metric)
    if least is None or (value is not None and metric.cost(value) <= metric.cost(least)):
        return ""
    return f"{metric.title} < {metric.show(least)}"


def least_of(metric: Metric, limits: ReportConfig) -> float | None:
    """Return the smallest accepted value of the metric; None without such a limit."""
    return getattr(limits, metric.least) if metric.least else None


def margin_at(metric: Metric, cell: Cell, limit: float) -> Margin:
    """Return how far a loss exceeds a limit; `UNKNOWN` if grouped samples count as independent."""
    assert cell.paired is not None  # every measured cell has values
    if cell.record.grouped:
        return UNKNOWN
    return cell.paired.margin(metric, limit, int(cell.metric(TOTAL)))


def assess_added(family: Family) -> list[tuple[Cell, Verdict]]:
    """Return the cells with their verdicts by the samples in `Family.added` alone.

    The list is empty without such samples. Runs with a doubtful FP32, with grouped samples, or
    with values that cannot be split by sample are left out.

    Samples added after an undecided verdict form an independent test, because their results
    influence neither their number nor the decision to add them.
    """
    metric = family.metric
    rows = family.added
    if rows is None:
        return []
    total = int(rows.sum())
    limit = metric.limit(family.limits)

    # Only values of single samples can be split into old and added ones
    cells = []
    margins = []
    for cell in family.sound:
        if cell.record.grouped or cell.paired is None:
            continue
        paired = cell.paired.select(rows)
        if paired is not None:
            cells.append(cell)
            margins.append((paired.margin(metric, limit, total), total))
    decided = _decide_by_model(family, cells, margins)
    return list(zip(cells, decided, strict=True))


def say_added(family: Family) -> str:
    """Return the note about samples added to those of earlier runs, see `assess_added`."""
    assert family.added is not None
    added = int(family.added.sum())
    total = len(family.added)

    # List the verdicts by the added samples
    assessed = assess_added(family)
    verdicts = "; ".join(f"{cell.label}: {verdict}" for cell, verdict in assessed[:NAMED])
    if len(assessed) > NAMED:
        verdicts += f"; and {len(assessed) - NAMED} more"
    alone = verdicts or "score them in a separate run"
    return ADDED_NOTE.format(seen=total - added, total=total, added=added, alone=alone)


def decide(margins: Sequence[tuple[Margin, int]], planned: int = 1) -> list[Verdict]:
    """Return the verdicts on models that are assessed together.

    Args:
        margins: for each model, how far its loss lies above the limit, and its sample size.
        planned: see `Family.planned`.
    """
    results = outcomes([margin for margin, _ in margins], planned)
    # The sample size is for the strictest of Holm's levels, as the others depend on which models
    # pass.
    level = SIGNIFICANCE / max(len(margins), planned)
    decided = []
    for outcome, (margin, total) in zip(results, margins, strict=True):
        verdict = Verdict(outcome)
        if outcome == UNDECIDED:
            verdict = _undecided(margin, total, level)
        decided.append(verdict)
    return decided


def outcomes(margins: Sequence[Margin], planned: int = 1) -> list[str]:
    """Return PASS, FAIL or UNDECIDED for models that are assessed together (Holm).

    >>> outcomes([Margin(z=-5.0), Margin(z=0.5), Margin(z=5.0)])
    ['pass', 'undecided', 'fail']

    Args:
        margins: how far the loss of each model lies above its limit.
        planned: see `Family.planned`.
    """
    within = holm([margin.p_within for margin in margins], planned)
    beyond = holm([margin.p_beyond for margin in margins], planned)
    decided = []
    for p_within, p_beyond in zip(within, beyond, strict=True):
        if p_within <= SIGNIFICANCE:
            decided.append(PASS)
        elif p_beyond <= SIGNIFICANCE:
            decided.append(FAIL)
        else:
            decided.append(UNDECIDED)
    return decided


def margin_of(metric: Metric, limits: ReportConfig) -> float:
    """Return the non-inferiority margin against the best model, in the unit of the loss."""
    return MARGIN * metric.limit(limits)


def as_good_as(
    best: Cell, others: Sequence[Cell], metric: Metric, limits: ReportConfig
) -> tuple[list[Cell], list[Cell]]:
    """Return the models of `others` proven to be as good as `best`, and the undecided ones.

    A model is as good if its loss against `best` is below `margin_of`. The proof is the one-sided
    95% upper bound of the paired loss, corrected for the number of other models (Holm). If only the
    lower bound is below the margin, the samples do not decide. A test without a margin would list
    models that are truly worse, because they often do not differ significantly.
    """
    margin = margin_of(metric, limits)
    tested = []
    margins = []
    for cell in others:
        if cell.paired:
            tested.append(cell)
            margins.append(_margin_over(best, cell, metric=metric, margin=margin))

    # A pass proves that the model is as good; an undecided test leaves it possible
    decided = by_model(records_of(tested), margins, test=decide, worst=find_worst)
    proven = []
    possible = []
    for cell, verdict in zip(tested, decided, strict=True):
        if verdict.outcome == PASS:
            proven.append(cell)
        elif verdict.outcome == UNDECIDED:
            possible.append(cell)
    return proven, possible


def _margin_over(best: Cell, cell: Cell, metric: Metric, margin: float) -> tuple[Margin, int]:
    """Return how far a loss against the best model lies above a margin, and the sample size."""
    assert best.paired is not None and cell.paired is not None  # measured cells have values
    total = int(cell.metric(TOTAL))
    if best.record.grouped or cell.record.grouped:
        return UNKNOWN, total
    excess = cell.paired.margin_over(best.paired, metric, limit=margin, items=total)
    return excess, total


def is_near(best: Cell, cell: Cell, metric: Metric, errors: float) -> bool:
    """Return whether a model is at most `errors` standard errors worse than the best one.

    Both models were scored on selection samples. If these are the same, the comparison is paired.
    With another calibration draw, the samples may differ. The intervals of both runs then give the
    standard error of the difference.
    """
    assert best.choice is not None and cell.choice is not None
    if best.choice.same_samples(cell.choice):
        total = int(cell.metric(f"{CHOICE}{TOTAL}"))
        margin = cell.choice.margin_over(best.choice, metric, limit=0.0, items=total)
        return margin.z <= errors

    # Otherwise estimate the error from the intervals of both runs
    best_low, best_high = best.choice.model.interval
    low, high = cell.choice.model.interval
    error = math.hypot(best_high - best_low, high - low) / (2 * Z95)
    name = CHOICE + metric.name
    loss = metric.cost(cell.metric(name)) - metric.cost(best.metric(name))
    return loss <= errors * error


def passes_to_choose(metric: Metric, cell: Cell, limits: ReportConfig) -> bool:
    """Return whether a model passes on its selection samples, without a correction for others."""
    if cell.choice is None:
        return False
    total = int(cell.metric(f"{CHOICE}{TOTAL}"))
    return cell.choice.margin(metric, metric.limit(limits), total).p_within <= SIGNIFICANCE


def _undecided(margin: Margin, total: int, level: float) -> Verdict:
    """Return the verdict undecided, with the sample size that would decide, above `total`."""
    needed = margin.items_needed(total, level)
    if needed <= total:  # the present sample size has not decided
        needed = total + 1.0
    return Verdict(UNDECIDED, needed)
