"""The sweep of 24, one job after the other, and at once by every launcher of this machine."""

import importlib.util

from benchmarks.equality import same_predictions
from benchmarks.setting import GRID, NO_LATENCY, Record, Setting, find_runs, job_number
from benchmarks.tables import ratios, spread, table
from resnet8ptq.core import machine

PLUGINS = ("hydra_joblib_launcher", "hydra_ray_launcher")
LAUNCHERS = {  # each with a job for each core
    "serial": (),
    "joblib": ("hydra/launcher=joblib",),
    "processes": ("hydra/launcher=processes",),
    "ray_local": ("hydra/launcher=ray_local",),
}


def is_available() -> bool:
    """Return whether the launchers are installed: they are extras."""
    return all(importlib.util.find_spec(f"hydra_plugins.{name}") for name in PLUGINS)


def measure(setting: Setting) -> Record:
    """Run all in turns, in fresh folders; compare the predictions of the last round."""
    wall_s: dict[str, list[float]] = {name: [] for name in LAUNCHERS}
    folders = {}
    for turn in range(setting.rounds):
        for name, extra in LAUNCHERS.items():
            folders[name] = setting.fresh()
            swept = setting.run(folders[name], setting.copy_cache(), GRID, NO_LATENCY, *extra)
            wall_s[name].append(swept["usage"]["wall_s"])
            setting.say(
                f"round {turn + 1} of {setting.rounds}: {name}: {wall_s[name][-1]:.1f} s, "
                f"{len(swept['runs'])} runs"
            )
    runs = {
        name: {job_number(run): run for run in find_runs(folder)}
        for name, folder in folders.items()
    }
    equal = sum(
        all(number in others and same_predictions(run, others[number]) for others in runs.values())
        for number, run in runs["serial"].items()
    )
    counts = {name: len(job_runs) for name, job_runs in runs.items()}
    return {"jobs": machine.threads(None), "wall_s": wall_s, "runs": counts, "equal": equal}


def render(record: Record) -> str:
    """Return the section in Markdown."""
    wall_s = record["wall_s"]
    rows = [
        [name, spread(times, 1), spread(ratios(times, wall_s["serial"])), str(record["runs"][name])]
        for name, times in wall_s.items()
    ]
    return "\n\n".join(
        [
            f"`experiment=grid`, cold, latency.enabled=false, with {record['jobs']} jobs at once, "
            "by `hydra/launcher`.",
            table(["launcher", "wall s", "to serial", "measured runs"], rows),
            "Runs with the same predictions, bit for bit, in all launchers: "
            f"{record['equal']} of {record['runs']['serial']}.",
        ]
    )
