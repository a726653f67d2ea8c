"""The Pareto front of a search: no other run is as good on every objective and better on one."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import OBJECTIVES
from resnet8ptq.core import invocation
from resnet8ptq.report.comparison import Cell, Family

SAME_SIZE = 0.005  # names and padding change file sizes by this much
SAME_SPEED = 0.05  # latencies of one file differ by this much between runs


def mask(costs: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Tell which points [n, objectives] are on the front [n]; lower costs are better.

    A point is dominated by one that is nowhere worse and somewhere better; equal points are not.
    """
    dominated = [
        ((costs <= point).all(axis=1) & (costs < point).any(axis=1)).any()
        for point in costs  # one by one: all pairs would take n * n of memory
    ]
    return ~np.array(dominated, dtype=bool)


def thin(costs: NDArray[np.float64], tolerances: Sequence[float]) -> NDArray[np.bool_]:
    """Tell which points of a front [n, objectives] stay in a short list [n].

    A point goes if another is as good on every objective within the tolerances. Without this, the
    front would list every model that is a few bytes smaller. The point that is better on objectives
    without tolerance stays. Equal points stay together.

    Args:
        tolerances: for each objective, the fraction of a value within which others count as equal.
    """
    slack = np.abs(costs) * tolerances
    exact = np.array(tolerances) == 0
    order = np.lexsort((*costs[:, ~exact].T[::-1], *costs[:, exact].T[::-1]))
    kept: list[int] = []
    for point in order:
        better = costs[point] + slack[point] < costs[kept]
        equal = (costs[point] == costs[kept]).all(axis=1)
        if (better.any(axis=1) | equal).all():
            kept.append(point)
    return np.isin(np.arange(len(costs)), kept)


@dataclass(frozen=True)
class Front:
    """The members, the best first, with the objectives of the search."""

    objectives: tuple[str, ...]
    members: tuple[Cell, ...]
    candidates: int  # runs with all of these metrics

    @property
    def headings(self) -> list[str]:
        """The columns of `rows`."""
        return ["configuration", *map(_heading, self.objectives)]

    @property
    def rows(self) -> list[list[str]]:
        """One row of cells for each member."""
        return [
            [cell.label, *(_text(name, cell.metric(name)) for name in self.objectives)]
            for cell in self.members
        ]

    @property
    def on_training_images(self) -> bool:
        """Whether accuracies are those of held-out training images."""
        return any(cell.record.held_out for cell in self.members)

    @property
    def commands(self) -> list[str]:
        """The commands that evaluate each member on the test images."""
        lines = [cell.record.job_overrides for cell in self.members]
        return [_command(shlex.split(line)) for line in lines if _is_line(line)]


def find(family: Family) -> Front | None:
    """Return the front of a search; None without a search or without measured runs."""
    objectives = _objectives(family)
    cells = [
        cell
        for cell in family.measured
        if not cell.record.doubt and all(name in cell.record.metrics for name in objectives)
    ]
    if not objectives or not cells:
        return None
    signs = np.array([1 if OBJECTIVES[name] == "minimize" else -1 for name in objectives])
    costs = signs * np.array([[cell.metric(name) for name in objectives] for cell in cells])
    front = np.flatnonzero(mask(costs))
    front = front[thin(costs[front], [_tolerance(name) for name in objectives])]
    on_front = [(tuple(costs[index]), cells[index]) for index in front]
    on_front.sort(key=lambda pair: pair[0])
    return Front(objectives, tuple(cell for _, cell in on_front), len(cells))


def _tolerance(name: str) -> float:
    """Return the fraction within which values of an objective count as equal."""
    if name.endswith("_bytes"):
        return SAME_SIZE
    return SAME_SPEED if name.startswith(("latency", "speedup")) else 0.0


def _objectives(family: Family) -> tuple[str, ...]:
    """Return the objectives of the search, which all of its runs have."""
    for record in family.records:
        if names := json.loads(record.objectives):
            return tuple(name for name in names if name in OBJECTIVES)
    return ()


def _is_line(text: str) -> bool:
    """Return whether a tag is a single line of shell words, the form that jobs write."""
    try:
        return text.isprintable() and bool(shlex.split(text))
    except ValueError:  # an open quote
        return False


def _command(overrides: Sequence[str]) -> str:
    kept = [word for word in overrides if not word.startswith(("evaluate.split=", "hydra."))]
    return invocation.command("run", *kept, "evaluate.split=test", "hydra.mode=RUN")


def _heading(name: str) -> str:
    if name == "size_bytes":
        return "size kB"
    return name.removesuffix("_ms").replace("_", " ") + (" ms" if name.endswith("_ms") else "")


def _text(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return f"{value / 1000:.1f}"
    percent = name.endswith(("accuracy", "agreement", "relative_error"))
    return f"{value:.2%}" if percent else f"{value:.3g}"
