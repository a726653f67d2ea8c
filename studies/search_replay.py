"""Samplers on the recorded grid: a sampler proposes, and the record answers."""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from matplotlib.figure import Figure

from benchmarks.setting import REPO
from benchmarks.tables import table
from resnet8ptq.core import figures, files
from resnet8ptq.report import pareto
from studies.search_grid import NEAR, Grid, Run, runs_to_best, runs_to_front

FIGURE = REPO / "studies" / "search.png"
SEEDS = range(100)
TRIALS = 250  # as the search has it


def replay(grid: Grid, sampler: optuna.samplers.BaseSampler) -> list[Run]:
    """Let a sampler search the grid, told what Hydra's sweeper would tell it; return its runs."""
    study = optuna.create_study(sampler=sampler, directions=grid.directions)
    seen: dict[Run, None] = {}
    for _ in range(TRIALS):
        trial = study.ask()
        params = {name: trial.suggest_categorical(name, v) for name, v in grid.space.items()}
        run = grid.run_of(params)
        seen[run] = None
        if (found := grid.found[run]) is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, found)
    return list(seen)


def shuffle(grid: Grid, seed: int) -> list[Run]:
    """Return the grid in random order: random search that proposes nothing twice."""
    runs = sorted(grid.found)
    order = np.random.default_rng(seed).permutation(len(runs))
    return [runs[place] for place in order]


def _sampled(grid: Grid, seed: int, make: Callable[..., Any], **options: Any) -> list[Run]:
    return replay(grid, make(seed=seed, **options))


# As `hydra/sweeper/sampler` has them; TPE's time grows fast with the trials.
SAMPLERS: dict[str, tuple[Callable[[Grid, int], list[Run]], range]] = {
    "the grid in random order": (shuffle, SEEDS),
    "random": (functools.partial(_sampled, make=optuna.samplers.RandomSampler), SEEDS),
    "genetic (NSGA-II, population 20)": (
        functools.partial(_sampled, make=optuna.samplers.NSGAIISampler, population_size=20),
        SEEDS,
    ),
    "tpe": (functools.partial(_sampled, make=optuna.samplers.TPESampler), SEEDS[:10]),
    "tpe, multivariate": (
        functools.partial(
            _sampled,
            make=optuna.samplers.TPESampler,
            multivariate=True,
            warn_independent_sampling=False,
        ),
        SEEDS[:10],
    ),
}


def describe(grid: Grid, title: str, replays: Sequence[list[Run]]) -> list[str]:
    """Return a sampler's row: runs until the best and until the front, and how often in half."""
    half = len(grid.found) / 2
    cells = [title, str(len(replays))]
    for measure in (runs_to_best, runs_to_front):
        needed = np.sort([measure(grid, found) for found in replays])
        low, middle, high = (needed[int(share * (len(needed) - 1))] for share in (0.1, 0.5, 0.9))
        cells += [f"{middle:.0f} ({low:.0f} to {high:.0f})", f"{np.mean(needed < half):.0%}"]
    distinct = np.median([len(found) for found in replays])
    return [*cells, f"{distinct:.0f}"]


HEADINGS = (
    *("proposals", "seeds", "runs until the best accuracy", "in under half"),
    *(f"runs until {NEAR:.0%} of the front", "in under half", "runs in all"),
)


def compare(grid: Grid, draw: bool) -> str:
    """Replay every sampler; return the table, and draw the figure."""
    rows, curves = [], {}
    for title, (propose, seeds) in SAMPLERS.items():
        replays = [propose(grid, seed) for seed in seeds]
        rows.append(describe(grid, title, replays))
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
        curves[title] = [runs_to_front(grid, found) for found in replays]
    if draw:
        _draw(curves, len(grid.found))
    on_front = int(pareto.mask(grid.costs(grid.found)).sum())
    text = (
        f"{len(grid.found)} configurations, {list(grid.found.values()).count(None)} of them "
        f"unsupported; {len(grid.best)} share the best accuracy, {on_front} are on the front. "
        "Median (and the 10th to the 90th percentile of the seeds; inf: not reached)."
    )
    return f"{text}\n\n{table(HEADINGS, rows)}"


def _draw(curves: Mapping[str, list[float]], total: int) -> None:
    """Draw the share of seeds that have the front against the runs that it took."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for title, needed in curves.items():
        axes.ecdf([min(n, total + 1) for n in needed], label=title)
    axes.axvline(total / 2, color="0.6", lw=1, ls=":")
    axes.set(xlabel=f"runs, of {total}", xlim=(0, total), ylim=(0, 1))
    axes.set_ylabel(f"seeds with {NEAR:.0%} of the front")
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    with files.atomic(FIGURE) as temporary:
        temporary.write_bytes(figures.to_png(figure))
