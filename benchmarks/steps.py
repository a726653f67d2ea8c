"""Time of a sweep by step: a sampling profile summed by the package's modules."""

from collections import defaultdict
from pathlib import Path

from benchmarks.setting import FOUR, GRID, NO_LATENCY, Record, Setting
from benchmarks.tables import table

CACHED = "1 run, cached"
PROFILED = {CACHED: ("backend=onnx", NO_LATENCY), "4 runs, warm": FOUR, "24 runs, warm": (GRID,)}
INTERVAL_S = 0.002

# Step -> packages and modules, by how their paths begin.
MODULES = {
    "data": ("data/",),
    "model": ("models/", "graph/"),
    "calibration": ("calibration/",),
    "quantize": ("backends/", "corrections/", "experiment/preparation"),
    "evaluate": ("evaluation/inference", "evaluation/batching", "tasks/"),
    "latency": ("evaluation/latency",),
    "outputs": ("experiment/outputs", "experiment/plots", "evaluation/result"),
    "tracking": ("tracking/",),
    "report": ("report/",),
}
WAITING = "waiting for the process that draws and uploads"
STEPS = ("imports", *MODULES, WAITING, "other")


def measure(setting: Setting) -> Record:
    """Profile a cached run, and the sweeps as they are by default."""
    sweeps = {}
    for name, arguments in PROFILED.items():
        folder, cache = setting.swept if name == CACHED else setting.warm
        path = setting.fresh() / "profile.pyisession"
        profiler = ("-m", "pyinstrument", "-i", str(INTERVAL_S), "-r", "session", "-o", str(path))
        done = setting.call(folder, cache, *arguments, flags=profiler)
        sweeps[name] = {"wall_s": done.usage.wall_s, "steps": sum_steps(path)}
        setting.say(f"profile of {name}: {done.usage.wall_s:.1f} s")
    return {"sweeps": sweeps}


def sum_steps(path: Path) -> dict[str, float]:
    """Return the seconds of each step from a session that pyinstrument has written."""
    from pyinstrument.session import Session

    seconds: defaultdict[str, float] = defaultdict(float)
    for stack, duration in Session.load(path).frame_records:
        seconds[find_step(stack)] += duration
    return {step: seconds[step] for step in STEPS}


def find_step(stack: list[str]) -> str:
    """Return the step of a call stack, outermost first, in pyinstrument's notation.

    The outermost module that has a step decides: running a session while it evaluates is part of
    evaluating. Only calibration lies within another step, quantize; imports and waiting lie within
    any.
    """
    step = "other"
    for frame in stack:
        file = frame.split("\0")[1]
        if file.startswith("<frozen importlib"):
            return "imports"
        if file.endswith("/resnet8ptq/core/background.py"):
            return WAITING
        named = _step_of(file)
        if step == "other" or (step == "quantize" and named == "calibration"):
            step = named
    return step


def _step_of(file: str) -> str:
    _, package, name = file.rpartition("/resnet8ptq/")
    matching = (step for step, prefixes in MODULES.items() if name.startswith(prefixes))
    return next(matching, "other") if package else "other"


def render(record: Record) -> str:
    """Return the section in Markdown."""
    profiles = record["sweeps"]
    rows = [
        [step, *(f"{profiles[name]['steps'][step]:.1f}" for name in profiles)]
        for step in STEPS
        if any(profiles[name]["steps"][step] >= 0.05 for name in profiles)
    ]
    rows.append(["whole process", *(f"{profiles[name]['wall_s']:.1f}" for name in profiles)])
    return "\n\n".join(
        [
            "Seconds of each step, from a sampling profile: of one run whose outputs are in the "
            "cache, without latency, and of whole sweeps with default settings (with latency, "
            "tracking and report). The outermost module of a call stack decides the step; imports "
            "count as imports in any module. Another process imports MLflow, draws and uploads. "
            "The whole process includes the start of Python and of the profiler.",
            table(["step", *profiles], rows),
            "![Where the time goes](images/steps.png)",
        ]
    )
