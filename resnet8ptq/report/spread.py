"""The spread of a configuration's result over several calibration draws."""

from dataclasses import dataclass

import numpy as np

from resnet8ptq.report.comparison import Cell, Family
from resnet8ptq.report.facts import varied


@dataclass(frozen=True)
class Spread:
    """The task's metric of one configuration over several seeds."""

    label: str
    draws: int
    mean: float
    standard_deviation: float  # of the sample (n - 1)
    lowest: float
    highest: float


def group_by_configuration(family: Family) -> list[list[Cell]]:
    """Return groups of measured cells that differ only in the seed."""
    keys = [key for key in varied(family.records) if key != "seed"]
    groups: dict[tuple[object, ...], list[Cell]] = {}
    for cell in family.measured:
        record = cell.record
        groups.setdefault((record.combination, *record.settings(*keys)), []).append(cell)
    return list(groups.values())


def measure(family: Family) -> list[Spread]:
    """Return the spread of each configuration that was run with more than one seed.

    None of runs that stopped at different samples.
    """
    spreads: list[Spread] = []
    if family.stopped:
        return spreads
    for cells in group_by_configuration(family):
        if len({cell.record.seed for cell in cells}) > 1:
            values = np.array([cell.metric(family.metric.name) for cell in cells])
            label, deviation = without_seed(cells[0]), float(values.std(ddof=1))
            ends = float(values.min()), float(values.max())
            spreads.append(Spread(label, len(cells), float(values.mean()), deviation, *ends))
    return spreads


def without_seed(cell: Cell) -> str:
    """Return a cell's label without the seed."""
    return cell.label.replace(f" seed={cell.record.seed}", "")
