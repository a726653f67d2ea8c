"""Start-up: imports and time of `--help` and of one cached run."""

import re
from collections import defaultdict

from benchmarks.memory import imported
from benchmarks.setting import NO_LATENCY, Record, Setting
from benchmarks.tables import spread, table

COMMANDS = {"--help": ("--help",), "one cached run": ("backend=onnx", NO_LATENCY)}
SHOWN = 12  # packages
_LINE = re.compile(r"^import time:\s+(\d+) \|\s+\d+ \| +([\w.]+)$", flags=re.MULTILINE)


def measure(setting: Setting) -> Record:
    """Time both, and sum their imports by top-level package."""
    folder, cache = setting.swept
    commands: Record = {}
    for name, arguments in COMMANDS.items():
        done = setting.call(folder, cache, *arguments, flags=("-X", "importtime"))
        commands[name] = {
            "packages_s": sum_packages(done.err),
            "imported": imported(done.err),
            "wall_s": [],
        }
    for _ in range(setting.rounds):
        for name, arguments in COMMANDS.items():
            wall_s = setting.call(folder, cache, *arguments).usage.wall_s
            commands[name]["wall_s"].append(wall_s)
            setting.say(f"{name}: {wall_s:.2f} s")
    return {"commands": commands}


def sum_packages(log: str) -> dict[str, float]:
    """Return the seconds of each top-level package in a log of `-X importtime`, most first."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for microseconds, module in _LINE.findall(log):
        seconds[module.partition(".")[0]] += int(microseconds) / 1e6
    most = sorted(seconds, key=lambda package: -seconds[package])[:SHOWN]
    return {package: round(seconds[package], 4) for package in most}


def render(record: Record) -> str:
    """Return the section in Markdown."""
    commands = record["commands"]
    parts = [
        "Wall time of the process, and import time by top-level package (by `-X importtime`, which "
        "slows imports somewhat). Heavy imports: those of TensorFlow, Keras, tf2onnx and torch."
    ]
    for name, entry in commands.items():
        heavy = ", ".join(entry["imported"]) or "none"
        parts.append(f"`{name}`: {spread(entry['wall_s'])} s. Heavy imports: {heavy}.")
    columns = [list(entry["packages_s"].items()) for entry in commands.values()]
    rows = [[cell for column in columns for cell in _cells(column, rank)] for rank in range(SHOWN)]
    parts.append(table([label for name in commands for label in (name, "s")], rows))
    return "\n\n".join(parts)


def _cells(column: list[tuple[str, float]], rank: int) -> tuple[str, str]:
    if rank >= len(column):
        return "", ""
    package, seconds = column[rank]
    return package, f"{seconds:.2f}"
