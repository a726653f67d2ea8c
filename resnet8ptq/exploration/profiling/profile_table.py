"""The tables, the files and the figure of a profile."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure  # no pyplot: nothing here needs a screen or global state
from rich.console import Console

from resnet8ptq.backends.contract import NodeTime
from resnet8ptq.config.loading import CONFIG_FILE, save_config
from resnet8ptq.config.naming import Combination
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import figures, files
from resnet8ptq.core.console import print_table, say, stdout
from resnet8ptq.core.text import plain
from resnet8ptq.exploration.profiling.breakdown import Breakdown, ProfileResult, sum_ms

_LISTED = 8  # nodes in float that are named; the others are counted
_COLOURED = 9  # operators with their own colour


def write_profile(folder: Path, config: RunConfig, result: ProfileResult) -> None:
    """Write `config.yaml`, `profile.csv` and `profile.png`, each atomically."""
    save_config(config, folder / CONFIG_FILE)
    files.write_text(folder / "profile.csv", to_csv(result.breakdowns))
    figures.save(draw_bars(result.breakdowns, describe(config)), folder / "profile.png")


def to_csv(breakdowns: Sequence[Breakdown]) -> str:
    """Return a CSV with a row for each node, in order of execution; times in ms for a batch."""
    rows: list[list[object]] = [
        ["batch_size", "model", "place", "node", "operator", "kind", "ms", "share"]
    ]
    for breakdown in breakdowns:
        for model, nodes in (("fp32", breakdown.fp32), ("quantized", breakdown.model)):
            whole = sum_ms(nodes) or 1
            for number, node in enumerate(nodes):
                first = [breakdown.batch_size, model, number, node.name, node.operator, node.kind]
                rows.append([*first, f"{node.ms:.5f}", f"{node.ms / whole:.4f}"])
    return files.to_csv(rows)


def print_tables(result: ProfileResult, title: str, console: Console | None = None) -> None:
    """Print the title and the conclusions, then a table and notes for each batch size."""
    console = stdout(console, 130)
    say(console, title)
    for breakdown in result.breakdowns:
        say(console, breakdown.conclude())
    for breakdown in result.breakdowns:
        heads = ("operator", "FP32 ms", "nodes", "8-bit ms", "nodes", "share")
        title = f"batch {breakdown.batch_size}"
        right = range(1, len(heads))
        print_table(console, heads, _rows(breakdown), title=title, right=right, totals=2)
        for note in _notes(breakdown):
            say(console, note)


def _rows(breakdown: Breakdown) -> list[list[object]]:
    """Return a row for each operator, then one for all nodes and one for the run."""
    rows: list[list[object]] = []
    whole = breakdown.total_ms() or 1
    for kind in breakdown.operators():
        row: list[object] = [kind.name, "", "", "", "", ""]
        if kind.fp32_count:
            row[1:3] = [f"{kind.fp32_ms:.3f}", kind.fp32_count]
        if kind.count:
            row[3:] = [f"{kind.ms:.3f}", kind.count, f"{kind.ms / whole:.0%}"]
        rows.append(row)

    # The profiler itself takes time, so the run without it has its own row
    fp32_ms = f"{sum_ms(breakdown.fp32):.3f}"
    rows.append(
        ["all nodes", fp32_ms, len(breakdown.fp32), f"{whole:.3f}", len(breakdown.model), "100%"]
    )
    run_ms = f"{breakdown.ms:.3f}"
    rows.append(["the run, without a profiler", f"{breakdown.fp32_ms:.3f}", "", run_ms, "", ""])
    return rows


def _notes(breakdown: Breakdown) -> list[str]:
    """Return notes on conversions, on nodes in float, and on a profiler that adds much time."""
    number = breakdown.count("conversion")
    notes = [f"conversions: {breakdown.conversions_ms:.3f} ms in {number} nodes"]

    # Name the nodes in float that take longest
    for kind in ("unfused", "float"):
        left = [node for node in breakdown.model if node.kind == kind]
        left.sort(key=lambda node: -node.ms)
        named = [f"{_name(node)} {node.ms:.3f} ms" for node in left[:_LISTED]]
        if len(left) > _LISTED:
            named.append(f"{len(left) - _LISTED} more")
        if named:
            notes.append(f"{_KINDS[kind]}: {'; '.join(named)}")

    # Warn if the profiler distorts the times
    added = breakdown.total_ms() / breakdown.ms - 1
    if added > _MUCH:
        notes.append(
            f"timing every node adds {added:.0%} to the quantized run, most where nodes are many "
            "and small: compare times with each other, not with a run's"
        )
    return notes


_MUCH = 0.1
_KINDS = {
    "unfused": "in float between conversions, where integer kernels were expected",
    "float": "in float",
}


def _name(node: NodeTime) -> str:
    if node.operator in node.name:
        return node.name
    return f"{node.name} ({node.operator})"


def describe(config: RunConfig) -> str:
    """Return the title: the network, the configuration and the number of threads."""
    threads = f"{config.latency.threads} thread"
    if config.latency.threads > 1:
        threads += "s"
    return Combination.of_config(config).describe(config.model.name or "", threads)


def draw_bars(breakdowns: Sequence[Breakdown], title: str) -> Figure:
    """Draw a bar of FP32 and one of the quantized model for each batch size, stacked by operator.

    The `_COLOURED` operators that take longest lie at the bottom, the longest lowest. All others
    share the grey segment on top.
    """
    longest: dict[str, float] = {}  # the largest share of each operator
    for breakdown in breakdowns:
        for operator in breakdown.operators():
            share = max(operator.ms, operator.fp32_ms) / (breakdown.total_ms() or 1)
            longest[operator.name] = max(longest.get(operator.name, 0.0), share)
    shown = sorted(longest, key=lambda name: -longest[name])[:_COLOURED]

    # Make a panel for each batch size
    figure = Figure(figsize=(4.2 * len(breakdowns) + 2.6, 4.8), layout="constrained")
    panels = figure.subplots(1, len(breakdowns), squeeze=False)[0]

    # Draw a bar for FP32 and one for the quantized model
    for axes, breakdown in zip(panels, breakdowns, strict=True):
        heights = {name: np.zeros(2) for name in [*shown, "others"]}
        for operator in breakdown.operators():
            name = operator.name if operator.name in shown else "others"
            heights[name] += (operator.fp32_ms, operator.ms)
        bottoms = np.zeros(2)
        for number, (name, both) in enumerate(heights.items()):
            colour = "lightgrey" if name == "others" else f"C{number}"
            axes.bar((0, 1), both, bottom=bottoms, color=colour, width=0.6, label=plain(name))
            bottoms = bottoms + both
        axes.set_xticks((0, 1), ("FP32", "quantized"))
        axes.set_ylabel("ms for a batch")
        axes.set_title(f"batch {breakdown.batch_size}")
        axes.spines[["top", "right"]].set_visible(False)

    # All panels share the legend, in the order of the stacks
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=8)
    figure.suptitle(plain(title), x=0.01, ha="left")
    return figure
