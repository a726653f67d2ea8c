"""Verdicts on the loss of models against FP32: pass, fail, undecided or void.

A model passes if the one-sided 95% upper bound of its paired loss is within the limit. It fails if
the lower bound is beyond the limit. Both are corrected for all models of a family (Holm, 1979);
runs with equal files count as one model. Otherwise it is undecided: a loss that is not significant
does not prove equality. A verdict is void if FP32 itself is no better than chance, or clearly below
the accuracy that the user expects, because a loss against a broken network has no meaning.

Whatever its loss, a model fails below the metric's own limit, such as `report.min_accuracy`, and if
it has an output that does not depend on the sample.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.report.comparison import Cell, Family
from resnet8ptq.report.facts import by_model
from resnet8ptq.report.table import VOID, Judged
from resnet8ptq.tasks.metric import CHOICE, TOTAL, Metric
from resnet8ptq.tasks.statistics import (
    SIGNIFICANCE,
    UNKNOWN,
    Z95,
    Margin,
    holm,
    round_size,
)

PASS, FAIL, UNDECIDED = "pass", "fail", "undecided"
UNSUPPORTED = "unsupported"  # of a run that was not measured, beside `OUTCOMES`
EXIT_CODES = {PASS: 0, FAIL: 3, UNDECIDED: 4, VOID: 4, UNSUPPORTED: 4}
OUTCOMES = (PASS, FAIL, UNDECIDED, VOID)
MARGIN = 0.5  # of the limit: the non-inferiority margin against the best model
NAMED = 12  # runs that the note on added samples names
ADDED_NOTE = (
    "{seen:,} of these {total:,} samples were scored by earlier runs. If the others were added "
    "because a verdict was undecided, a pass on all of them is too easy: the first look counts "
    "twice. Rely on the {added:,} added samples alone: {alone}."
)
MOST_NEEDED = 1_000_000  # samples: larger sizes are not shown


@dataclass(frozen=True)
class Verdict:
    """Whether a model keeps its limits; if undecided, the sample size that would decide."""

    loss: str  # on the loss alone: `PASS`, `FAIL`, `UNDECIDED` or `VOID`
    # If undecided, the sample size for 80% power at the measured loss; NaN if samples do not vary.
    needed: float = 0.0
    fault: str = ""  # why the model fails whatever its loss, see `find_fault`

    def __str__(self) -> str:
        return self.say()

    @property
    def outcome(self) -> str:
        """The verdict on the model, which every table, page and exit code shows."""
        return FAIL if self.fault and self.loss != VOID else self.loss

    def say(self, after: str = "") -> str:
        """Return the verdict as text; `after` says how many samples decided it."""
        samples = "" if self.samples is None else f" ({self.samples:,} samples)"
        fault = f", {self.fault}" if self.fault and self.loss != VOID else ""
        return f"{self.outcome}{samples}{after}{fault}"

    @property
    def samples(self) -> int | None:
        """The rounded sample size that would decide; None if decided, or beyond `MOST_NEEDED`."""
        if self.outcome != UNDECIDED or not 0 < self.needed <= MOST_NEEDED:
            return None
        return round_size(self.needed)


def in_words(
    families: Sequence[Family],
    limits: ReportConfig,
    judged: Sequence[Mapping[str, Verdict]] | None = None,
) -> Judged:
    """Return the verdicts on the runs of all families as texts; by default those of `judge`."""
    texts = {}
    judged = judged or [judge(family, limits) for family in families]
    for family, verdicts in zip(families, judged, strict=True):
        for cell in family.measured:
            run_id = cell.record.run_id
            texts[run_id] = say(cell, verdicts[run_id])
    looks = {
        record.samples_digest: family.looks for family in families for record in family.records
    }
    added = {
        record.samples_digest: say_added(family, limits)
        for family in families
        if family.added is not None
        for record in family.records
    }
    return Judged(texts, limits, looks, added)


def say(cell: Cell, verdict: Verdict) -> str:
    """Return the verdict as text; for a run that stopped early, with the number of its samples."""
    record = cell.record
    if record.samples_planned is None or record.samples is None:
        return str(verdict)
    return verdict.say(f" after {record.samples:,.0f} of {record.samples_planned:,.0f}")


def find_fault(metric: Metric, cell: Cell, limits: ReportConfig) -> str:
    """Return why a model fails whatever its loss; empty if nothing is known."""
    if cell.record.silent:
        return cell.record.silent
    if reaches_least(metric, cell, limits):
        return ""
    return f"{metric.title} < {metric.show(least_of(metric, limits) or 0)}"


def least_of(metric: Metric, limits: ReportConfig) -> float | None:
    """Return the smallest accepted value of the metric; None without such a limit."""
    return getattr(limits, metric.least) if metric.least else None


def reaches_least(metric: Metric, cell: Cell, limits: ReportConfig) -> bool:
    """Return whether a model reaches its metric's own limit, such as `report.min_accuracy`."""
    least = least_of(metric, limits)
    return least is None or metric.cost(cell.metric(metric.name)) <= metric.cost(least)


def judge(family: Family, limits: ReportConfig) -> dict[str, Verdict]:
    """Return the verdict on each measured quantized model of a family, by run id."""
    metric, drop = family.metric, family.metric.limit(limits)
    verdicts = {cell.record.run_id: Verdict(VOID) for cell in family.measured if cell.record.doubt}
    judged = [cell for cell in family.measured if not cell.record.doubt]
    cells = [cell for cell in judged if cell.paired is not None]
    margins = [(margin_at(metric, cell, drop), int(cell.metric(TOTAL))) for cell in cells]
    records = [cell.record for cell in cells]
    decided = by_model(records, margins, partial(decide, planned=family.planned))
    for cell, verdict in zip(cells, decided, strict=True):
        fault = find_fault(metric, cell, limits)
        verdicts[cell.record.run_id] = replace(verdict, fault=fault)
    return verdicts


def margin_at(metric: Metric, cell: Cell, limit: float) -> Margin:
    """Return how far a loss lies above a limit; unknown of groups that were scored one by one."""
    assert cell.paired is not None  # of every measured cell
    if cell.record.grouped:
        return UNKNOWN
    return cell.paired.margin(metric, limit, int(cell.metric(TOTAL)))


def judge_added(family: Family, limits: ReportConfig) -> list[tuple[Cell, Verdict]]:
    """Return the verdicts on the added samples only, for runs with values kept by sample.

    Samples added after an undecided verdict form an independent test. Their results influence
    neither their number nor the decision to add them.
    """
    metric, rows = family.metric, family.added
    if rows is None:
        return []
    usable = [cell for cell in family.measured if not cell.record.doubt and not cell.record.grouped]
    parts = [(cell, cell.paired.select(rows)) for cell in usable if cell.paired is not None]
    kept = [(cell, paired) for cell, paired in parts if paired is not None]
    total, drop = int(rows.sum()), metric.limit(limits)
    cells = [cell for cell, _ in kept]
    margins = [(paired.margin(metric, drop, total), total) for _, paired in kept]
    records = [cell.record for cell in cells]
    decided = by_model(records, margins, partial(decide, planned=family.planned))
    return list(zip(cells, decided, strict=True))


def say_added(family: Family, limits: ReportConfig) -> str:
    """Return the note about samples that were added to those of earlier runs."""
    assert family.added is not None
    added, total = int(family.added.sum()), len(family.added)
    judged = judge_added(family, limits)
    verdicts = "; ".join(f"{cell.label}: {verdict}" for cell, verdict in judged[:NAMED])
    if len(judged) > NAMED:
        verdicts += f"; and {len(judged) - NAMED} more"
    alone = verdicts or "score them in a run of their own"
    return ADDED_NOTE.format(seen=total - added, total=total, added=added, alone=alone)


def decide(margins: Sequence[tuple[Margin, int]], planned: int = 1) -> list[Verdict]:
    """Return the verdicts on models that are judged together.

    Args:
        margins: for each model, how far its loss lies above the limit, and its number of samples.
        planned: see `Family.planned`.
    """
    decided = outcomes([(margin.p_within, margin.p_beyond) for margin, _ in margins], planned)
    level = SIGNIFICANCE / max(len(margins), planned)
    return [
        _undecided(margin, total, level) if outcome == UNDECIDED else Verdict(outcome)
        for outcome, (margin, total) in zip(decided, margins, strict=True)
    ]


def outcomes(p_values: Sequence[tuple[float, float]], planned: int = 1) -> list[str]:
    """Return the outcomes of models that are judged together (Holm).

    Args:
        p_values: for each model, the p-values of a loss at the limit or above, and at the limit or
            below.
        planned: see `Family.planned`.
    """
    within, beyond = (holm([pair[side] for pair in p_values], planned) for side in (0, 1))
    return [
        PASS if low <= SIGNIFICANCE else FAIL if high <= SIGNIFICANCE else UNDECIDED
        for low, high in zip(within, beyond, strict=True)
    ]


def margin_of(metric: Metric, limits: ReportConfig) -> float:
    """Return the non-inferiority margin to the best model for "as good as the best"."""
    return MARGIN * metric.limit(limits)


def as_good_as(
    best: Cell, others: Sequence[Cell], metric: Metric, limits: ReportConfig
) -> tuple[list[Cell], list[Cell]]:
    """Return those of `others` proven to be as good as `best`, and those that may be.

    A model is as good if its loss against `best` is below `margin_of`. This is proven by the
    one-sided 95% upper bound of its paired loss, corrected for the number of others (Holm). If only
    the lower bound is below the margin, the samples do not decide. A test without a margin would
    list models that are truly worse, because they often do not differ significantly.
    """
    margin, tested = margin_of(metric, limits), [cell for cell in others if cell.paired]
    margins = [_margin_over(best, cell, metric, margin) for cell in tested]
    decided = by_model([cell.record for cell in tested], margins, decide)
    pairs = list(zip(tested, decided, strict=True))
    shown = [cell for cell, verdict in pairs if verdict.outcome == PASS]
    return shown, [cell for cell, verdict in pairs if verdict.outcome == UNDECIDED]


def _margin_over(best: Cell, cell: Cell, metric: Metric, margin: float) -> tuple[Margin, int]:
    """Return how far a loss against the best model lies above a margin, and the sample size."""
    assert best.paired is not None and cell.paired is not None  # of every measured cell
    total = int(cell.metric(TOTAL))
    if best.record.grouped or cell.record.grouped:
        return UNKNOWN, total
    return cell.paired.margin_over(best.paired, metric, margin, total), total


def is_near(best: Cell, cell: Cell, metric: Metric, errors: float) -> bool:
    """Return whether a model is within `errors` standard errors of the best one.

    Both are measured on the selection samples. The comparison is paired if the samples are the
    same. With another calibration draw they may differ; then the intervals of both runs give the
    error.
    """
    assert best.choice is not None and cell.choice is not None
    if best.choice.same_samples(cell.choice):
        total = int(cell.metric(f"{CHOICE}{TOTAL}"))
        return cell.choice.margin_over(best.choice, metric, 0.0, total).z <= errors
    ends = [chosen.model.interval for chosen in (best.choice, cell.choice)]
    error = math.hypot(*(high - low for low, high in ends)) / (2 * Z95)
    values = [chosen.metric(CHOICE + metric.name) for chosen in (best, cell)]
    return metric.cost(values[1]) - metric.cost(values[0]) <= errors * error


def passes_to_choose(metric: Metric, cell: Cell, limits: ReportConfig) -> bool:
    """Return whether a model passes individually on the selection samples."""
    if cell.choice is None:
        return False
    total = int(cell.metric(f"{CHOICE}{TOTAL}"))
    return cell.choice.margin(metric, metric.limit(limits), total).p_within <= SIGNIFICANCE


def _undecided(margin: Margin, total: int, level: float) -> Verdict:
    needed = margin.items_needed(total, level)
    # The present size has not decided.
    return Verdict(UNDECIDED, total + 1.0 if needed <= total else needed)
