"""Checks that a sweep predicts the same as each of its configurations in its own process."""

from pathlib import Path

import numpy as np

from benchmarks.setting import GRID, NO_LATENCY, Record, Setting, find_runs, job_number, read_run
from benchmarks.tables import table

KEYS = ("backend", "dtype", "calib", "per_channel")


def measure(setting: Setting) -> Record:
    """Run the grid as one sweep, and each of its configurations alone with an empty cache."""
    folder = setting.fresh()
    setting.say("equality: one sweep of 24")
    setting.run(folder, setting.copy_cache(), GRID, NO_LATENCY)
    runs = []
    for shared in sorted(find_runs(folder), key=job_number):
        run = {key: read_run(shared)[key] for key in KEYS}
        overrides = [f"{key}={str(value).lower()}" for key, value in run.items()]
        alone = setting.fresh()
        setting.run(alone, setting.copy_cache(), *overrides, NO_LATENCY)
        run["equal"] = same_predictions(shared, next(find_runs(alone)))
        runs.append(run)
        said = "equal" if run["equal"] else "DIFFERENT"
        setting.say(f"equality: {' '.join(overrides)}: {said}")
    return {"runs": runs}


def same_predictions(folder: Path, other: Path) -> bool:
    """Return whether two runs have the same arrays in `predictions.npz`, bit for bit."""
    with np.load(folder / "predictions.npz") as first, np.load(other / "predictions.npz") as second:
        return set(first) == set(second) and all(
            first[name].dtype == second[name].dtype
            and first[name].shape == second[name].shape
            and first[name].tobytes() == second[name].tobytes()
            for name in first
        )


def render(record: Record) -> str:
    """Return the section in Markdown."""
    runs = record["runs"]
    equal = sum(run["equal"] for run in runs)
    said = (
        f"Predictions of {equal} of {len(runs)} configurations are equal bit for bit "
        "(probabilities of every test image): in one sweep of `experiment=grid`, and alone in a "
        "new process with only the converted network cached."
    )
    different = [[str(run[key]) for key in KEYS] for run in runs if not run["equal"]]
    return "\n\n".join([said, *([table(KEYS, different)] if different else [])])
