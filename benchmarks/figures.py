"""The figures of RESULTS.md."""

import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from benchmarks import growth, sweeps
from benchmarks.setting import Record
from benchmarks.steps import STEPS

# Okabe and Ito's colours, which colour-blind people can tell apart; then greys.
COLOURS = (
    *("#0072B2", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#D55E00", "#CC79A7", "#000000"),
    *("#999999", "#CCCCCC", "#666666", "#E0E0E0"),
)


def draw(results: Record, folder: Path) -> None:
    """Draw every figure that has been measured."""
    folder.mkdir(exist_ok=True)
    for section, name, plot in (
        ("memory", "memory", memory),
        ("sweep24", "added", added),
        ("steps", "steps", steps),
        ("growth", "growth", growth_by_size),
    ):
        if section in results:
            columns = 3 if plot is growth_by_size else 1
            figure, axes = plt.subplots(1, columns, figsize=(8, 3.6), layout="constrained")
            plot(results[section], axes)
            for one in figure.axes:
                one.spines[["top", "right"]].set_visible(False)
            figure.savefig(folder / f"{name}.png", dpi=120)
            plt.close(figure)


def memory(record: Record, axes: Any) -> None:
    """Draw peak memory against calibration images, a line for each method."""
    methods = dict.fromkeys(run["calib"] for run in record["runs"])
    for method, colour in zip(methods, COLOURS, strict=False):
        runs = [run for run in record["runs"] if run["calib"] == method]
        peaks = [run["usage"]["max_rss_bytes"] / 1e6 for run in runs]
        axes.plot([run["images"] for run in runs], peaks, "o-", color=colour, label=method)
    axes.set(xlabel="calibration images", ylabel="peak memory of the process, MB", xscale="log")
    counts = sorted({run["images"] for run in record["runs"]})
    axes.set_xticks(counts, [f"{count:,}" for count in counts], minor=False)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def added(record: Record, axes: Any) -> None:
    """Draw wall time against the number of configurations, and the time of each step's calls."""
    names, counts = ("six", "twelve", "cold_no_latency"), (6, 12, 18)
    medians = [statistics.median(sweeps.values(record, name)) for name in names]
    axes.plot(counts, medians, "o-", color=COLOURS[0], label="run.py, whole sweep")
    for colour, side, label in ((COLOURS[1], "bare", "bare loop's"), (COLOURS[3], "ours", "own")):
        walls = [medians[0]]
        for _, fewer, more in sweeps.steps():
            calls = sweeps.added_calls_s(record, fewer, more, side)
            walls.append(walls[-1] + 6 * statistics.median(calls))
        label = f"+ {label} quantize and evaluate calls"
        axes.plot(counts, walls, "o--", color=colour, label=label)
    axes.set(xlabel="configurations in the sweep", ylabel="wall time, s", xticks=counts)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def growth_by_size(record: Record, axes: Any) -> None:
    """Draw CPU time over the size of the network, of the data, and of the sweep."""
    least, fewest = min(growth.WIDTHS), growth.SAMPLES[0]
    sizes = {size: growth.added(record, "cpu_s", size, fewest) for size in growth.WIDTHS}
    counts = {count: growth.added(record, "cpu_s", least, count) for count in growth.SAMPLES}
    jobs = {n: growth.values(record, "cpu_s", least, fewest, n) for n in growth.JOBS}
    panels = (
        (sizes, "million parameters", "CPU s, one more job"),
        (counts, "samples", ""),
        (jobs, "jobs of the sweep", "CPU s, whole sweep"),
    )
    for panel, (values, x, y) in zip(axes, panels, strict=True):
        medians = [statistics.median(rounds) for rounds in values.values()]
        panel.plot(list(values), medians, "o-", color=COLOURS[0])
        panel.set(xlabel=x, ylabel=y)
        panel.set_ylim(bottom=0)


def steps(record: Record, axes: Any) -> None:
    """Draw one stacked bar for each sweep profiled."""
    profiles = record["sweeps"]
    names = list(profiles)
    left = [0.0] * len(names)
    for step, colour in zip(STEPS, COLOURS, strict=True):
        widths = [profiles[name]["steps"][step] for name in names]
        axes.barh(names, widths, left=left, color=colour, label=step, height=0.6)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_xlabel("seconds")
    axes.invert_yaxis()
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
