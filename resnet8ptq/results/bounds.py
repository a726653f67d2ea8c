"""One-sided 95% bounds of the loss against FP32, by inverting the tests of `report.verdicts`.

A test asks whether the loss lies below a limit. The upper bound is the smallest limit for which the
same test passes, at the level that Holm's correction leaves to the model. By its loss, a model
therefore passes exactly if its upper bound is at most the limit. It fails exactly if its lower
bound is above the limit.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from resnet8ptq.report.equal_files import by_model
from resnet8ptq.report.families import Cell, Family, records_of
from resnet8ptq.report.verdicts import find_worst, margin_at
from resnet8ptq.tasks.scoring.metric import Metric
from resnet8ptq.tasks.scoring.statistics import SIGNIFICANCE, Margin

FARTHEST = 2.0**20  # the largest loss that the search tries, as a fraction of FP32's value
STEPS = 50  # halvings of an interval


def add_bounds(family: Family) -> Family:
    """Return an assessed family with the bounds of the losses in the records of measured runs.

    A bound is None if `_edge` finds none, as for grouped samples that count as independent, or if
    FP32 is in doubt. The unit is that of `RunRecord.loss`.
    """
    metric = family.metric
    limit = metric.limit(family.limits)
    sound = family.sound
    measured = []
    for cell in sound:
        measured.append((margin_at(metric, cell, limit), cell))

    # Runs with equal files get the same bounds, as they get the same verdict
    find = partial(_find_bounds, metric, family.planned)
    bounds = by_model(records_of(sound), measured, test=find, worst=_find_worst)

    # Put the bounds into the records
    bounded = {}
    for cell, (lower, upper) in zip(sound, bounds, strict=True):
        known = {"loss_upper_bound": upper, "loss_lower_bound": lower}
        record = cell.record.model_copy(update=known)
        bounded[cell.record.run_id] = replace(cell, record=record)
    cells = [bounded.get(cell.record.run_id, cell) for cell in family.cells]
    return replace(family, cells=tuple(cells))


def _find_worst(measured: Sequence[tuple[Margin, Cell]]) -> tuple[Margin, Cell]:
    """Return, with its margin, the run that decides the verdict on its model."""
    worst, _ = find_worst([(margin, 0) for margin, _ in measured])
    return next(item for item in measured if item[0] is worst)


def _find_bounds(
    metric: Metric, planned: int, measured: Sequence[tuple[Margin, Cell]]
) -> list[tuple[float | None, float | None]]:
    """Return the lower and the upper bound of each model, at the levels of `levels`."""
    uppers = levels([margin.p_within for margin, _ in measured], planned)
    lowers = levels([margin.p_beyond for margin, _ in measured], planned)
    bounds = []
    for (_, cell), upper, lower in zip(measured, uppers, lowers, strict=True):
        bounds.append((_lower(metric, cell, lower), _upper(metric, cell, upper)))
    return bounds


def levels(p_values: Sequence[float], planned: int = 0) -> list[float]:
    """Return Holm's level (1979) for each p-value, in the same order.

    The smallest p-value is tested at 0.05 / m, the second smallest at 0.05 / (m - 1), and so on. m
    is the number of p-values, but at least `planned`. The first p-value above its level ends the
    procedure, and its level holds for all larger ones.

    >>> [round(level, 4) for level in levels([0.5, 0.001, 0.9])]
    [0.025, 0.0167, 0.025]
    """
    count = len(p_values)
    order = np.argsort(p_values, kind="stable")
    by_rank = SIGNIFICANCE / (max(count, planned) - np.arange(count))
    kept = np.flatnonzero(np.asarray(p_values)[order] > by_rank)
    if len(kept):
        by_rank[kept[0] :] = by_rank[kept[0]]
    result = np.empty(count)
    result[order] = by_rank
    return result.tolist()


def _upper(metric: Metric, cell: Cell, level: float) -> float | None:
    return _edge(lambda limit: margin_at(metric, cell, limit).p_within <= level, metric.bounded)


def _lower(metric: Metric, cell: Cell, level: float) -> float | None:
    return _edge(lambda limit: margin_at(metric, cell, limit).p_beyond > level, metric.bounded)


def _edge(holds: Callable[[float], bool], bounded: bool) -> float | None:
    """Return the smallest limit at which a condition holds; None if it holds always or never.

    Args:
        holds: a condition that also holds for every limit above one for which it holds.
        bounded: whether losses lie between -1 and 1; otherwise, the search goes from `-FARTHEST` to
            `FARTHEST`.
    """
    # Double the interval until the condition changes in it
    low = -1.0
    high = 1.0
    while not bounded and high < FARTHEST and not holds(high):
        low = high
        high = 2 * high
    while not bounded and low > -FARTHEST and holds(low):
        high = low
        low = 2 * low

    # Halve the interval in which the condition changes
    lowest = low
    highest = high
    for _ in range(STEPS):
        middle = (low + high) / 2
        if holds(middle):
            high = middle
        else:
            low = middle
    if low == lowest or high == highest:
        return None
    return high
