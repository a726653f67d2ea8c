"""The sweep of 24, one job after the other and two at a time."""

import importlib.util

from benchmarks.equality import same_predictions
from benchmarks.setting import GRID, NO_LATENCY, Record, Setting, find_runs, job_number
from benchmarks.tables import ratios, spread, table

JOBS = 2
LAUNCHER = ("hydra/launcher=joblib", f"hydra.launcher.n_jobs={JOBS}")


def is_available() -> bool:
    """Tell whether the launcher is installed: it is an extra."""
    return importlib.util.find_spec("hydra_plugins.hydra_joblib_launcher") is not None


def measure(setting: Setting) -> Record:
    """Run both in turns, in fresh folders; compare the predictions of the last round."""
    wall_s: dict[str, list[float]] = {"serial": [], "joblib": []}
    folders = {}
    for turn in range(setting.rounds):
        for name, extra in (("serial", ()), ("joblib", LAUNCHER)):
            folders[name] = setting.fresh()
            found = setting.run(folders[name], setting.copy_cache(), GRID, NO_LATENCY, *extra)
            wall_s[name].append(found["usage"]["wall_s"])
            setting.say(
                f"round {turn + 1} of {setting.rounds}: {name}: {wall_s[name][-1]:.1f} s, "
                f"{len(found['runs'])} runs"
            )
    runs = {
        name: {job_number(run): run for run in find_runs(folder)}
        for name, folder in folders.items()
    }
    equal = sum(
        same_predictions(run, runs["joblib"][number])
        for number, run in runs["serial"].items()
        if number in runs["joblib"]
    )
    counts = {name: len(found) for name, found in runs.items()}
    return {"jobs": JOBS, "wall_s": wall_s, "runs": counts, "equal": equal}


def render(found: Record) -> str:
    """Return the section in Markdown."""
    wall_s = found["wall_s"]
    rows = [
        [name, spread(times, 1), spread(ratios(times, wall_s["serial"])), str(found["runs"][name])]
        for name, times in wall_s.items()
    ]
    return "\n\n".join(
        [
            f"`experiment=grid`, cold, latency.enabled=false; `{' '.join(LAUNCHER)}`.",
            table(["launcher", "wall s", "to serial", "measured runs"], rows),
            f"Predictions equal bit for bit: {found['equal']} of {found['runs']['serial']}.",
        ]
    )
