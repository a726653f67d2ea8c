"""Results of recipes, where a recipe is a configuration over several calibration draws.

A verdict in the table is about one file, and another calibration draw gives another file. A verdict
on a recipe therefore needs several draws. The loss of each sample is averaged over the draws, and
the standard error covers both samples and draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.report.families import Cell, Family
from resnet8ptq.report.naming import asked, varied
from resnet8ptq.report.verdicts import Verdict, outcomes
from resnet8ptq.tasks.scoring.statistics import CrossedMean, Margin, crossed_mean


@dataclass
class SeedSpread:
    """The task's metric of one configuration over several seeds, each with another draw.

    Attributes:
        draws: the number of seeds.
        loss: loss against FP32 over samples and draws. None if the task's test states no loss for
            each sample, and for grouped samples that were scored one by one.
        verdict: the verdict on the recipe, corrected for all recipes (Holm), but not for seeds;
            None without `loss`, or if FP32 is in doubt.
    """

    label: str
    draws: int
    mean: float
    standard_deviation: float  # computed with the divisor n - 1
    lowest: float
    highest: float
    loss: CrossedMean | None = None
    verdict: Verdict | None = None


def group_by_configuration(family: Family) -> list[list[Cell]]:
    """Return the measured cells, grouped by all settings that name runs, except the seed."""
    keys = [key for key in varied(family.records) if key != "seed"]
    groups: dict[tuple[object, ...], list[Cell]] = {}
    for cell in family.measured:
        record = cell.record
        groups.setdefault((record.combination, *asked(record, keys)), []).append(cell)
    return list(groups.values())


def measure_spreads(family: Family, limits: ReportConfig) -> list[SeedSpread]:
    """Return the spread of each configuration with more than one seed.

    The list is empty if a run could stop early, see `Family.stopped`, because the runs may have
    scored different samples.
    """
    if family.stopped:
        return []
    # Measure each configuration with several draws
    limit = family.metric.limit(limits)
    spreads: list[SeedSpread] = []
    sound: list[SeedSpread] = []
    margins: list[Margin] = []
    for cells in group_by_configuration(family):
        by_seed = {cell.record.seed: cell for cell in cells}
        if len(by_seed) == 1:  # one draw shows no spread
            continue
        draws = list(by_seed.values())
        spread = _measure(family, draws)
        spreads.append(spread)
        is_doubted = any(cell.record.doubt for cell in draws)
        if spread.loss and not is_doubted:
            sound.append(spread)
            margins.append(spread.loss.margin(limit))

    # A verdict names no sample size, because more samples alone do not decide.
    for spread, outcome in zip(sound, outcomes(margins), strict=True):
        spread.verdict = Verdict(outcome)
    return spreads


def _measure(family: Family, cells: Sequence[Cell]) -> SeedSpread:
    values = np.array([cell.metric(family.metric.name) for cell in cells])
    losses = _losses_by_draw(cells)
    crossed = None
    if losses is not None:
        crossed = crossed_mean(losses)
    return SeedSpread(
        without_seed(cells[0]),
        draws=len(cells),
        mean=float(values.mean()),
        standard_deviation=float(values.std(ddof=1)),
        lowest=float(values.min()),
        highest=float(values.max()),
        loss=crossed,
    )


def _losses_by_draw(cells: Sequence[Cell]) -> NDArray[np.float64] | None:
    """Return the losses [draws, samples]; None where `SeedSpread.loss` is None."""
    losses = []
    for cell in cells:
        assert cell.paired is not None  # every measured cell has values
        loss = cell.paired.losses()
        if loss is None or cell.record.grouped:
            return None
        losses.append(loss)
    return np.stack(losses)


def without_seed(cell: Cell) -> str:
    """Return a cell's label without the seed."""
    return cell.label.replace(f" seed={cell.record.seed}", "")
