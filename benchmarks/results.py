"""The measurements on disk, and RESULTS.md, which is made from them alone."""

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import calibration, commands, equality, sweeps
from benchmarks.setting import REPO, Record, Setting
from benchmarks.tables import Row, table

FOLDER = REPO / "benchmarks"
JSON_FILE = "results.json"
MARKDOWN_FILE = "RESULTS.md"


@dataclass(frozen=True)
class Section:
    """A part of the benchmark.

    Attributes:
        parts: functions that return a text from the measurements, by its heading.
        summarize: returns the section's rows of the first table.
    """

    measure: Callable[[Setting], Record]
    parts: dict[str, Callable[[Record], str]]
    summarize: Callable[[Record], list[Row]] = lambda record: []


SECTIONS = {
    "sweep4": Section(
        sweeps.measure_sweep4, {"A sweep of 4": sweeps.render_sweep4}, sweeps.summarize_sweep4
    ),
    "sweep24": Section(
        sweeps.measure_sweep24,
        {"A sweep of 24": sweeps.render_sweep24},
        sweeps.summarize_sweep24,
    ),
    "commands": Section(commands.measure, {"Commands": commands.render}, commands.summarize),
    "calibration": Section(
        calibration.measure,
        {"Calibrating a network of real size": calibration.render},
        calibration.summarize,
    ),
    "equality": Section(equality.measure, {"Same results": equality.render}),
}


def load(folder: Path = FOLDER) -> Record:
    """Return the earlier measurements; empty if there are none."""
    path = folder / JSON_FILE
    return json.loads(path.read_text()) if path.exists() else {}


def describe(rounds: int) -> Record:
    """Return machine, versions and date of a section."""
    from resnet8ptq.core import machine

    described = machine.describe()
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": described["git_commit"],
        "rounds": rounds,
        "cpu": described["cpu"],
        "cores": machine.threads(None),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "platform": platform.system() + " " + platform.machine(),
        "load_average": os.getloadavg()[0],
        "versions": machine.versions() | _more_versions(),
    }


def _more_versions() -> dict[str, str]:
    from importlib.metadata import version

    return {f"version.{name}": version(name) for name in ("mlflow", "hydra-core")}


def write(results: Record, folder: Path = FOLDER) -> None:
    """Write the measurements and the page."""
    (folder / JSON_FILE).write_text(json.dumps(results, indent=1) + "\n")
    (folder / MARKDOWN_FILE).write_text(render(results))


def render(results: Record) -> str:
    """Return RESULTS.md."""
    parts = [
        "# Cost beside the bare libraries",
        "`make bench` makes this page. The bare loop is `benchmarks/bare.py`: the same "
        "configurations in one plain script, on all cores, without tracking, comparisons and "
        "figures. Both sides run in turns, each in a new process. A cell has the median of all "
        "rounds, with the smallest and the largest value in brackets. Ratios are taken round by "
        "round. Earlier figures: [studies/cost.md](../studies/cost.md).",
        "A warm cache holds the results that jobs share: the converted network, the ranges of its "
        "tensors, FP32's outputs and the fastest batch size. Every quantized file is evaluated. "
        "The bare loop finds the ranges and evaluates FP32 each time, so that a warm row shows the "
        "cost of a later sweep, and the other rows compare the same work. Ours also evaluates the "
        "selection samples, tracks the runs and writes the report. Repeated: the cache also holds "
        "the outputs of the same files.",
        _summary(results),
        *_machines(results),
        _loads(results),
    ]
    for name, section in SECTIONS.items():
        for heading, text in section.parts.items() if name in results else ():
            parts += [f"## {heading}", text(results[name])]
    return "\n\n".join(parts) + "\n"


def _summary(results: Record) -> str:
    """Return the first table: the rows of all sections, with date and machine."""
    rows = []
    for name, section in SECTIONS.items():
        if name in results:
            measured = results[name]["measured"]
            machine = f"{measured['cpu']}, {_count(measured['cores'], 'core')}"
            where = [_count(measured["rounds"], "round"), measured["date"][:10], machine]
            rows += [[*row.cells(), *where] for row in section.summarize(results[name])]
    header = ["", "ours s", "beside", "theirs s", "ratio", "measured", "date", "machine"]
    return table(header, rows)


def _machines(results: Record) -> list[str]:
    """Describe commit, machine and versions: once if all sections share them."""
    said: dict[str, list[str]] = {}
    for name in SECTIONS:
        if name in results:
            said.setdefault(_machine(results[name]["measured"]), []).append(name)
    if len(said) == 1:
        return list(said)
    return [f"{', '.join(names)}: {machine}" for machine, names in said.items()]


def _loads(results: Record) -> str:
    """Return a sentence with the load average before each section."""
    loads = (
        f"{name} {results[name]['measured']['load_average']:.1f}"
        for name in SECTIONS
        if name in results
    )
    return (
        "Load average before each section, including the work of the section before it: "
        f"{', '.join(loads)}."
    )


def _machine(measured: Record) -> str:
    versions = ", ".join(
        f"{key.removeprefix('version.')} {value}"
        for key, value in measured["versions"].items()
        if key != "version.resnet8ptq"
    )
    return (
        f"{measured['cpu']}, {_count(measured['cores'], 'core')}, "
        f"{measured['memory_bytes'] / 1e9:.0f} GB, {measured['platform']}; "
        f"{_count(measured['rounds'], 'round')}; commit "
        f"{measured['commit'][:12]}{'-dirty' * measured['commit'].endswith('-dirty')}, "
        f"{measured['date'][:10]}. {versions}."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
