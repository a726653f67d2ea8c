"""The grid of `experiment=search`, from studies/search.csv, and what a search finds of it."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import OmegaConf

from benchmarks.setting import REPO
from resnet8ptq.config.schema import OBJECTIVES
from resnet8ptq.report import pareto

RECORD = REPO / "studies" / "search.csv"
NEAR = 0.99  # of the whole front's hypervolume
PREFIX = "per_backend.onnx."  # what only ONNX Runtime's runs vary

Run = tuple[str, ...]  # the values of all dimensions


@dataclass(frozen=True)
class Grid:
    """Every distinct configuration of a search, and what came of it.

    Attributes:
        space: the values of each dimension, as conf/experiment/search.yaml has them.
        found: objectives of each run that was measured; None for an unsupported one.
    """

    space: dict[str, list[str]]
    objectives: tuple[str, ...]
    found: dict[Run, tuple[float, ...] | None]

    def run_of(self, params: Mapping[str, Any]) -> Run:
        """Return the run that a proposal comes to: torch has none of ONNX Runtime's dimensions."""
        other = params["backend"] != "onnx"
        return tuple(
            "" if other and name.startswith(PREFIX) else params[name] for name in self.space
        )

    def only(self, backend: str) -> "Grid":
        """Return the part of one backend."""
        found = {run: found for run, found in self.found.items() if run[0] == backend}
        return Grid({**self.space, "backend": [backend]}, self.objectives, found)

    @property
    def directions(self) -> list[str]:
        """Where each objective is to go."""
        return [OBJECTIVES[name] for name in self.objectives]

    def costs(self, runs: Iterable[Run]) -> NDArray[np.float64]:
        """Return objectives of measured runs [n, objectives]: 0 the grid's best, 1 its worst."""
        signs = np.array([1 if way == "minimize" else -1 for way in self.directions])
        everything = signs * np.array([v for v in self.found.values() if v is not None])
        low, high = everything.min(axis=0), everything.max(axis=0)
        measured = [v for run in runs if (v := self.found[run]) is not None]
        return (signs * np.array(measured).reshape(-1, len(signs)) - low) / (high - low)

    def hypervolume(self, runs: Iterable[Run]) -> float:
        """Return the volume that the runs dominate, up to 1.1 times the worst of the grid."""
        costs = self.costs(runs)
        front = np.unique(costs[pareto.mask(costs)], axis=0)
        # The front's coordinates cut the box into cells, which a point dominates whole or not.
        edges = [np.unique([*column, 1.1]) for column in front.T]
        corners = np.meshgrid(*(edge[:-1] for edge in edges), indexing="ij")
        volumes = np.prod(np.meshgrid(*map(np.diff, edges), indexing="ij"), axis=0)
        dominated = np.zeros(volumes.shape, dtype=bool)
        for point in front:
            dominated |= np.all([c >= p for c, p in zip(corners, point, strict=True)], axis=0)
        return float(volumes[dominated].sum())

    @cached_property
    def best(self) -> set[Run]:
        """The runs with the highest accuracy, including ties."""
        accuracy = {run: found[0] for run, found in self.found.items() if found is not None}
        return {run for run, value in accuracy.items() if value == max(accuracy.values())}


def settings() -> tuple[dict[str, list[str]], tuple[str, ...]]:
    """Read the search's dimensions and objectives."""
    config = OmegaConf.load(REPO / "conf" / "experiment" / "search.yaml")
    params = config.hydra.sweeper.params
    return {key: str(params[key]).split(",") for key in params}, tuple(config.objectives)


def read_grid() -> Grid:
    """Read the recorded grid.

    Raises:
        ValueError: it is not that of conf/experiment/search.yaml.
    """
    space, objectives = settings()
    with RECORD.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = {
        tuple(row[name] for name in space): None
        if row["status"] == "unsupported"
        else tuple(float(row[name]) for name in objectives)
        for row in rows
    }
    grid = Grid(space, objectives, found)
    wanted = {grid.run_of(dict(zip(space, v, strict=True))) for v in product(*space.values())}
    if wanted != set(found):
        raise ValueError(f"{RECORD.name}: not the grid of the search; run `grid` again")
    return grid


def runs_to_best(grid: Grid, runs: Sequence[Run]) -> float:
    """Return after how many distinct runs the grid's highest accuracy was there; inf: never."""
    return next((n for n, run in enumerate(runs, 1) if run in grid.best), np.inf)


def runs_to_front(grid: Grid, runs: Sequence[Run]) -> float:
    """Return after how many distinct runs the hypervolume was within NEAR of the grid's."""
    wanted = NEAR * grid.hypervolume(grid.found)
    low, high = 0, len(runs)  # it only grows: bisect
    if grid.hypervolume(runs) < wanted:
        return np.inf
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if grid.hypervolume(runs[:middle]) >= wanted else (middle, high)
    return high
