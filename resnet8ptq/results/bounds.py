"""One-sided 95% bounds of the loss against FP32, by inverting the tests of `report.verdicts`.

A test asks whether the loss lies below a limit. The upper bound is the smallest limit for which the
same test passes, at the level that Holm's correction leaves to the model. A model therefore passes
exactly if its upper bound is at most the limit, and fails exactly if its lower bound is at least
the limit.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from resnet8ptq.report.equal_files import by_model
from resnet8ptq.report.families import Cell, Family, records_of
from resnet8ptq.report.verdicts import margin_at
from resnet8ptq.tasks.scoring.metric import Metric
from resnet8ptq.tasks.scoring.statistics import SIGNIFICANCE

FARTHEST = 2.0**20  # the largest loss that the search tries, as a fraction of FP32's value
STEPS = 50  # halvings of an interval


def add_bounds(family: Family) -> Family:
    """Return an assessed family with the bounds of each model in its record.

    A model has no bound if its samples have no spread, if grouped samples count as independent,
    or if FP32 is broken. The unit is that of `RunRecord.loss`.
    """
    metric = family.metric
    limit = metric.limit(family.limits)
    p_within = []
    p_beyond = []
    sound = family.sound
    for cell in sound:
        margin = margin_at(metric, cell, limit)
        p_within.append(margin.p_within)
        p_beyond.append(margin.p_beyond)

    # Find the level of each model's bounds
    records = records_of(sound)
    test = partial(levels, planned=family.planned)
    uppers = by_model(records, p_within, test)
    lowers = by_model(records, p_beyond, test)
    bounded = {}
    for cell, upper, lower in zip(sound, uppers, lowers, strict=True):
        bounds = {
            "loss_upper_bound": _upper(metric, cell, upper),
            "loss_lower_bound": _lower(metric, cell, lower),
        }
        record = cell.record.model_copy(update=bounds)
        bounded[cell.record.run_id] = replace(cell, record=record)
    cells = [bounded.get(cell.record.run_id, cell) for cell in family.cells]
    return replace(family, cells=tuple(cells))


def levels(p_values: Sequence[float], planned: int = 0) -> list[float]:
    """Return Holm's level (1979) for each p-value, in the same order.

    m is the number of p-values, at least `planned`. The k-th smallest is tested at 0.05 / (m - k),
    k = 0, 1, ... The first p-value that is not rejected ends the procedure, and its level holds for
    all larger ones.

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
        bounded: whether losses lie between -1 and 1; otherwise the search goes up to `FARTHEST`.
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

    # Halve the interval between never and always
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
