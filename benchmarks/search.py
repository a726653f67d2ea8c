"""Does `experiment=search` find what its whole grid holds, and in how many runs?

    python -m benchmarks.search grid       run the whole grid: benchmarks/search.csv (minutes)
    python -m benchmarks.search replay     samplers on the recorded grid: tables, a figure
    python -m benchmarks.search searches   real searches, several seeds (minutes)

`replay` runs no network: a sampler proposes, and the record answers. Runs are distinct
configurations: one that is proposed again costs nothing, as with `sweep.resume=true`.
"""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import optuna
from numpy.typing import NDArray
from omegaconf import OmegaConf
from optuna._hypervolume.wfg import WFG

from benchmarks.setting import REPO, Setting
from resnet8ptq import files, pareto
from resnet8ptq.config import OBJECTIVES

RECORD = REPO / "benchmarks" / "search.csv"
FIGURE = REPO / "docs" / "images" / "search.png"
SEEDS = 100
TRIALS = 300  # of a replay; the search itself stops earlier
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
        """Return the volume that the runs' front dominates, up to 1.1 times the worst."""
        costs = self.costs(runs)
        if not len(costs):
            return 0.0
        front = np.unique(costs[pareto.mask(costs)], axis=0)
        return float(WFG().compute(front, np.full(costs.shape[1], 1.1)))

    @cached_property
    def best(self) -> set[Run]:
        """The runs with the highest accuracy, ties and all."""
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


def record_grid(setting: Setting) -> None:
    """Run every distinct configuration, torch's and ONNX Runtime's, and write the record."""
    space, objectives = settings()
    whole = ["experiment=search", "hydra/sweeper/sampler=grid", "hydra.sweeper.n_trials=10000"]
    fixed = [f"{name}={values[0]}" for name, values in space.items() if name.startswith(PREFIX)]
    rows = []
    for backend in space["backend"]:
        setting.say(f"the grid of {backend}")
        folder = setting.fresh()
        rest = [] if backend == "onnx" else fixed
        setting.call(folder, None, *whole, f"backend={backend}", *rest)
        (path,) = (folder / "runs" / "sweeps").rglob("runs.csv")
        with path.open(newline="") as file:
            rows += list(csv.DictReader(file))
    grid = Grid(space, objectives, {})
    lines = [
        [
            *grid.run_of(row),
            row["status"],
            *(row[name] and f"{float(row[name]):.6g}" for name in objectives),
        ]
        for row in rows
    ]
    files.write_text(RECORD, files.to_csv([[*space, "status", *objectives], *sorted(lines)]))
    setting.say(f"{len(lines)} runs: {RECORD}")


@dataclass(frozen=True)
class Replay:
    """What one sampler proposed: distinct runs in order, and the trials it took to get to each."""

    runs: list[Run]
    trials: list[int]


def replay(grid: Grid, sampler: optuna.samplers.BaseSampler, trials: int = TRIALS) -> Replay:
    """Let a sampler search the recorded grid, told what Hydra's sweeper would tell it."""
    study = optuna.create_study(sampler=sampler, directions=grid.directions)
    seen: dict[Run, int] = {}
    for number in range(1, trials + 1):
        trial = study.ask()
        params = {name: trial.suggest_categorical(name, v) for name, v in grid.space.items()}
        run = grid.run_of(params)
        seen.setdefault(run, number)
        if (found := grid.found[run]) is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, found)
    return Replay(list(seen), list(seen.values()))


def shuffle(grid: Grid, seed: int) -> Replay:
    """Return the grid in random order: random search that proposes nothing twice."""
    runs = sorted(grid.found)
    order = np.random.default_rng(seed).permutation(len(runs))
    return Replay([runs[place] for place in order], list(range(1, len(runs) + 1)))


def runs_to_best(grid: Grid, found: Replay) -> float:
    """Return after how many distinct runs the grid's highest accuracy was there; inf: never."""
    return next((n for n, run in enumerate(found.runs, 1) if run in grid.best), np.inf)


def runs_to_front(grid: Grid, found: Replay) -> float:
    """Return after how many distinct runs the hypervolume was within NEAR of the grid's."""
    wanted = NEAR * grid.hypervolume(grid.found)
    low, high = 0, len(found.runs)  # it only grows: bisect
    if grid.hypervolume(found.runs) < wanted:
        return np.inf
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (low, middle) if grid.hypervolume(found.runs[:middle]) >= wanted else (middle, high)
        )
    return high
