"""Results of recipes; a recipe is a configuration over several calibration draws.

A verdict of the table is about one file, and another calibration draw gives another file. A verdict
on the recipe needs several draws: the loss of each sample is averaged over the draws, and the
standard error includes both samples and draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.report.comparison import Cell, Family
from resnet8ptq.report.facts import asked, varied
from resnet8ptq.report.verdicts import Verdict, outcomes
from resnet8ptq.tasks.scoring.statistics import CrossedMean, crossed_mean


@dataclass
class SeedSpread:
    """The task's metric of one configuration over several seeds.

    Attributes:
        loss: loss against FP32 over samples and draws; None if the metric is not a mean over
            samples.
        verdict: the verdict on the recipe, corrected for all recipes (Holm), but not for seeds.
    """

    label: str
    draws: int
    mean: float
    standard_deviation: float  # of the sample (n - 1)
    lowest: float
    highest: float
    loss: CrossedMean | None = None
    verdict: Verdict | None = None


def group_by_configuration(family: Family) -> list[list[Cell]]:
    """Return groups of measured cells that differ only in the seed."""
    keys = [key for key in varied(family.records) if key != "seed"]
    groups: dict[tuple[object, ...], list[Cell]] = {}
    for cell in family.measured:
        record = cell.record
        groups.setdefault((record.combination, *asked(record, keys)), []).append(cell)
    return list(groups.values())


def measure(family: Family, limits: ReportConfig) -> list[SeedSpread]:
    """Return the spread of each configuration with more than one seed.

    Empty if the runs stopped at different samples.
    """
    if family.stopped:
        return []
    limit = family.metric.limit(limits)
    spreads: list[SeedSpread] = []
    sound: list[SeedSpread] = []
    p_values: list[tuple[float, float]] = []
    for cells in group_by_configuration(family):
        by_seed = {cell.record.seed: cell for cell in cells}
        if len(by_seed) == 1:
            continue
        draws = list(by_seed.values())
        spread = _measure(family, draws)
        spreads.append(spread)
        is_doubted = any(cell.record.doubt for cell in draws)
        if spread.loss and not is_doubted:
            margin = spread.loss.margin(limit)
            sound.append(spread)
            p_values.append((margin.p_within, margin.p_beyond))

    # More samples alone do not decide: there is no sample size to name.
    for spread, outcome in zip(sound, outcomes(p_values), strict=True):
        spread.verdict = Verdict(outcome)
    return spreads


def _measure(family: Family, cells: Sequence[Cell]) -> SeedSpread:
    values = np.array([cell.metric(family.metric.name) for cell in cells])
    label = without_seed(cells[0])
    losses = [cell.paired.losses() for cell in cells if cell.paired]
    known = [loss for loss in losses if loss is not None]
    is_grouped = any(cell.record.grouped for cell in cells)
    crossed = None
    if len(known) == len(losses) and not is_grouped:
        crossed = crossed_mean(np.stack(known))
    return SeedSpread(
        label,
        draws=len(cells),
        mean=float(values.mean()),
        standard_deviation=float(values.std(ddof=1)),
        lowest=float(values.min()),
        highest=float(values.max()),
        loss=crossed,
    )


def without_seed(cell: Cell) -> str:
    """Return a cell's label without the seed."""
    return cell.label.replace(f" seed={cell.record.seed}", "")
