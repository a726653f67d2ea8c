"""Does `experiment=search` find what its whole grid holds, and in how many runs?

    python -m studies.search grid       run the whole grid: studies/search.csv (minutes)
    python -m studies.search replay     samplers on the recorded grid: tables and a figure
    python -m studies.search searches   three real searches beside the record (minutes)

`replay` runs no network: a sampler proposes, and the record answers. Runs are distinct
configurations: a search runs none twice, so that a repeated proposal costs next to nothing.
"""

import csv
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

import optuna

from benchmarks.setting import Setting
from benchmarks.tables import table
from resnet8ptq.core import files
from studies import search_replay
from studies.search_grid import (
    NEAR,
    PREFIX,
    RECORD,
    Grid,
    read_grid,
    runs_to_best,
    runs_to_front,
    settings,
)


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
        rows += _read_runs(folder)
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


def search(setting: Setting, grid: Grid, seeds: Iterable[int]) -> str:
    """Search for real with each seed; return what it found in the record's terms."""
    rows = []
    for seed in seeds:
        folder = setting.fresh()
        setting.say(f"search, seed {seed}")
        done = setting.call(folder, None, "experiment=search", f"hydra.sweeper.sampler.seed={seed}")
        records = _read_runs(folder)  # in the order of their jobs
        found = [grid.run_of(row) for row in records]
        best = max(float(row["accuracy"]) for row in records if row["accuracy"])
        share = grid.hypervolume(found) / grid.hypervolume(grid.found)
        needed = [f"{measure(grid, found):.0f}" for measure in (runs_to_best, runs_to_front)]
        wall_s = f"{done.usage.wall_s:.0f}"
        rows.append([str(seed), str(len(records)), f"{best:.2%}", *needed, f"{share:.1%}", wall_s])
    head = ["seed", "runs", "best accuracy", "found after", f"{NEAR:.0%} of the front after"]
    return table([*head, "of the front in all", "wall s"], rows)


def _read_runs(folder: Path) -> list[dict[str, str]]:
    (path,) = (folder / "runs" / "sweeps").rglob("runs.csv")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def main(words: list[str]) -> int:
    """Do one part; return the exit code."""
    optuna.logging.set_verbosity(logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    if words not in (["grid"], ["replay"], ["searches"]):
        print(__doc__, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="studies-") as scratch:
        setting = Setting(Path(scratch), 1)
        if words == ["grid"]:
            record_grid(setting)
        elif words == ["searches"]:
            print(search(setting, read_grid(), seeds=(1, 2, 3)))
        else:
            grid = read_grid()
            print(
                search_replay.compare(grid, draw=True),
                "",
                search_replay.compare(grid.only("onnx"), draw=False),
                sep="\n",
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
