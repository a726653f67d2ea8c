"""How far one configuration's result moves with the calibration draw."""

from dataclasses import dataclass

import numpy as np

from resnet8ptq.report.comparison import Cell, Family
from resnet8ptq.report.table import combination, varied


@dataclass(frozen=True)
class Spread:
    """The task's metric of one configuration over several seeds.

    Attributes:
        standard_deviation: of the sample (n - 1).
    """

    label: str
    draws: int
    mean: float
    standard_deviation: float
    lowest: float
    highest: float


def group_by_configuration(family: Family) -> list[list[Cell]]:
    """Return the measured cells, those that differ in nothing but the seed together."""
    keys = [key for key in varied(family.records) if key != "seed"]
    groups: dict[tuple[object, ...], list[Cell]] = {}
    for cell in family.measured:
        params = cell.record.params
        others = (params.get(key) for key in keys)
        groups.setdefault((combination(cell.record), *others), []).append(cell)
    return list(groups.values())


def measure(family: Family) -> list[Spread]:
    """Return the spread of each configuration that was run with more than one seed."""
    name = family.task.metric.name
    return [
        _spread(cells, name)
        for cells in group_by_configuration(family)
        if len({cell.record.params.get("seed") for cell in cells}) > 1
    ]


def _spread(cells: list[Cell], name: str) -> Spread:
    values = np.array([cell.metric(name) for cell in cells])
    return Spread(
        label=cells[0].label.replace(f" seed={cells[0].record.params['seed']}", ""),
        draws=len(cells),
        mean=float(values.mean()),
        standard_deviation=float(values.std(ddof=1)),
        lowest=float(values.min()),
        highest=float(values.max()),
    )
