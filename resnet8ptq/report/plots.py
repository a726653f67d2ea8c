"""Figures of a whole sweep, for its report. The functions return None without data."""

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.core import figures
from resnet8ptq.core.text import plain
from resnet8ptq.report import pareto
from resnet8ptq.report.comparison import Cell, Family
from resnet8ptq.report.facts import best_first
from resnet8ptq.report.reference import Entry
from resnet8ptq.report.table import FIRST, MANY
from resnet8ptq.tasks.contract import Metric

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_RING: dict[str, Any] = {"marker": "o", "ms": 13, "mec": "black", "mfc": "none"}
_OTHERS: dict[str, Any] = {"ls": "", "marker": "x", "color": "0.5"}
_CALIBRATIONS = {
    **{"minmax": "C0", "entropy": "C1", "percentile": "C2", "histogram": "C4"},
    **{"mse": "C3", "moving_average": "C5", "dynamic": "C6"},
}


def class_impact(family: Family) -> Figure | None:
    """Accuracy change by class and run, in points; significant losses are framed.

    Of many runs the best, as in the table.
    """
    cells, names = family.measured, family.class_names
    if not cells or not names:
        return None
    shown = ""
    if len(cells) > MANY:
        shown = f"\nthe {FIRST} best of {len(cells):,} runs by {family.metric.title}"
        cells = [cells[index] for index in best_first([c.record for c in cells])[:FIRST]]
    change = 100 * np.array([family.class_deltas(cell) for cell in cells])
    limit = max(1.0, float(np.nanmax(np.abs(change), initial=0.0)))
    figure = Figure(
        figsize=(max(7.0, 3.2 + 0.72 * len(names)), 1.7 + 0.34 * len(cells)), layout="constrained"
    )
    axes = figure.subplots()
    mesh = figures.show_matrix(axes, change, cmap="RdBu", norm=TwoSlopeNorm(0, -limit, limit))
    known = ~np.isnan(change)
    texts = np.where(known, np.vectorize("{:+.1f}".format, otypes=["U"])(change), "")
    figures.label_cells(axes, texts, np.abs(change) > 0.6 * limit, size=8)
    for row, column in np.argwhere(known):
        if names[column] in cells[row].worse_classes:
            axes.add_patch(Rectangle((column - 0.48, row - 0.48), 0.96, 0.96, fill=False, lw=2))
    axes.set_xticks(range(len(names)), [plain(n) for n in names], rotation=45, ha="right")
    axes.set_yticks(range(len(cells)), [plain(cell.label) for cell in cells], fontsize=8)
    axes.set_title("Accuracy against FP32 by class, in points (framed: a significant loss)" + shown)
    figure.colorbar(mesh, ax=axes, label="points", shrink=0.8)
    return figure


def trade_offs(family: Family, limits: ReportConfig, others: Sequence[Entry] = ()) -> Figure | None:
    """The loss against FP32 over size and, if measured, over latency; with Pareto fronts.

    Args:
        limits: draws the limit of the loss.
        others: results of other tools on the same samples, drawn over size.
    """
    cells = family.measured
    if not cells:
        return None
    panels: list[tuple[str, str, float, Sequence[Cell]]] = [
        ("model file, kB", "size_bytes", 1e-3, cells)
    ]
    timed = [cell for cell in cells if cell.record.latency_ms is not None]
    if timed:  # simulated runs are not
        panels.append(("latency of one image, p50, ms", "latency_p50_ms", 1, timed))
    searched = pareto.find(family)
    members = {cell.record.run_id for cell in searched.members} if searched else set()
    figure = Figure(figsize=(6.2 * len(panels), 5.2), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    kinds = sorted({_kind(cell) for cell in cells})
    metric, markers = family.metric, dict(zip(kinds, cycle(_MARKERS), strict=False))
    for axes, (label, name, scale, shown) in zip(grid, panels, strict=True):
        _scatter(axes, metric, shown, name, scale, label, markers, members, metric.limit(limits))
    handles = _legend(cells, markers, f"report.{metric.limit_key}")
    if others:
        fp32 = float(np.mean([cell.metric(f"baseline_{metric.name}") for cell in cells]))
        losses = [metric.scale * (fp32 - entry.fair / entry.total) for entry in others]
        sizes = [1e-3 * entry.size_bytes for entry in others]
        grid[0].plot(sizes, losses, **_OTHERS)
        handles.append(Line2D([], [], label="other tools", **_OTHERS))
    if members:
        handles.append(Line2D([], [], ls="", label="on the front of the search", **_RING))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _style(cell: Cell, markers: Mapping[str, str]) -> dict[str, Any]:
    """Marker: framework and dtype; colour: calibration; filled: per channel."""
    colour = _CALIBRATIONS.get(_method(cell), "C7")
    face = colour if cell.record.combination.per_channel else "white"
    return {"marker": markers[_kind(cell)], "color": colour, "markerfacecolor": face}


def _method(cell: Cell) -> str:
    called = cell.record.combination
    return "dynamic" if called.method == "dynamic" else called.calib


def _kind(cell: Cell) -> str:
    called = cell.record.combination
    method = "" if called.method == "static" else f" {called.method}"
    return f"{called.framework} {called.dtype}{method}"


def _legend(cells: Sequence[Cell], markers: Mapping[str, str], limit: str) -> list[Line2D]:
    """One key for each mark in use: three short lists instead of every combination."""
    calibrations = dict.fromkeys(_method(cell) for cell in cells)
    lines = [
        Line2D([], [], ls="", marker=marker, color="0.3", label=plain(kind))
        for kind, marker in markers.items()
    ]
    lines += [
        Line2D([], [], lw=4, color=_CALIBRATIONS.get(name, "C7"), label=plain(name))
        for name in calibrations
    ]
    for filled, name in ((False, "per tensor"), (True, "per channel")):
        if any(cell.record.combination.per_channel == filled for cell in cells):
            face = "0.3" if filled else "white"
            lines.append(
                Line2D([], [], ls="", marker="o", color="0.3", markerfacecolor=face, label=name)
            )
    lines.append(Line2D([], [], ls=":", color="C3", lw=1, label=limit))
    return [*lines, Line2D([], [], ls="--", color="black", lw=1, label="Pareto front")]


def _scatter(
    axes: Axes,
    metric: Metric,
    cells: Sequence[Cell],
    name: str,
    scale: float,
    label: str,
    markers: Mapping[str, str],
    members: Collection[str],
    max_drop: float,
) -> None:
    """Draw the loss of each cell over one of its metrics, and FP32 over its own value."""
    points: list[tuple[float, float]] = []
    for cell in cells:
        x, loss = scale * cell.metric(name), metric.scale * _loss(metric, cell)
        ends = [cell.metric(f"delta_ci95_{end}") for end in ("low", "high")]
        style = _style(cell, markers)
        interval = [metric.scale * metric.cost(end) for end in ends]
        axes.plot([x, x], interval, color=style["color"], alpha=0.25, lw=1)
        axes.plot(x, loss, linestyle="", **style)
        if cell.record.run_id in members:
            axes.plot(x, loss, linestyle="", **_RING)
        points.append((x, loss))
    for index, (framework, x) in enumerate(_baselines(cells, name).items()):
        points.append((scale * x, 0.0))
        axes.plot(scale * x, 0, marker="*", ms=11, color="black", linestyle="")
        axes.annotate(
            plain(f"FP32 {framework}"),
            (scale * x, 0),
            (0, -18 - 11 * index),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    every = np.array(points)
    front = every[pareto.mask(every)]
    axes.plot(*front[front[:, 0].argsort()].T, "k--", lw=1, zorder=0)
    allowed = metric.allowed(max_drop, cells[0].metric(f"baseline_{metric.name}"))
    axes.axhline(metric.scale * allowed, color="C3", lw=1, ls=":", zorder=0)
    axes.margins(x=0.1)  # room for the label of FP32, the largest and slowest model
    axes.invert_yaxis()  # better is higher
    title = f"{plain(metric.loss_title)}  (bars: 95% interval)"
    axes.set(xlabel=label, ylabel=title)


def _loss(metric: Metric, cell: Cell) -> float:
    delta = cell.record.delta
    return cell.metric("drop") if delta is None else metric.cost(delta)


def _baselines(cells: Sequence[Cell], name: str) -> dict[str, float]:
    """Return the median of a metric of FP32 in each framework."""
    by_framework: dict[str, list[float]] = {}
    for cell in cells:
        value = cell.record.metrics.get(f"baseline_{name}")
        if value is not None:
            by_framework.setdefault(cell.record.combination.framework, []).append(value)
    return {framework: float(np.median(values)) for framework, values in by_framework.items()}


def _short(names: Sequence[str]) -> list[str]:
    """Remove Keras's prefix and tf2onnx's suffix from the names."""
    prefix = r"^(?:model|functional|sequential)(?:_\d+)?[/_]"
    return [plain(re.sub(prefix, "", name).removesuffix(":0")) for name in names]


def activation_ranges(family: Family, backend: str) -> Figure | None:
    """The range that each calibration method kept, for each activation of one framework."""
    chosen: dict[str, dict[str, list[float]]] = {}
    for cell in family.measured:
        if cell.record.backend == backend and cell.ranges.get("activations"):
            chosen.setdefault(cell.record.calib, cell.ranges["activations"])
    if not chosen:
        return None
    names = list(next(iter(chosen.values())))
    figure = Figure(figsize=(9, 1.8 + 0.27 * len(names)), layout="constrained")
    axes = figure.subplots()
    offsets = np.linspace(-0.25, 0.25, len(chosen))
    for offset, (method, ranges) in zip(offsets, chosen.items(), strict=True):
        rows = [row for row, name in enumerate(names) if name in ranges]
        low, high = np.reshape([ranges[names[row]] for row in rows], (-1, 2)).T
        colour = _CALIBRATIONS.get(method, "C7")
        axes.hlines(np.add(rows, offset), low, high, colour, lw=2.5, label=plain(method))
    axes.set_yticks(range(len(names)), _short(names))
    axes.tick_params(axis="y", labelsize=7)
    axes.invert_yaxis()
    axes.set_xscale("symlog", linthresh=1)
    axes.set(
        xlabel="activation value",
        title=f"{plain(backend)}: activation ranges kept by each method",
    )
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    return figure


def weight_ranges(family: Family) -> Figure | None:
    """The smallest and the largest weight of each layer, which minmax keeps per tensor."""
    cells = [cell for cell in family.measured if cell.ranges.get("weights")]
    if not cells:
        return None
    ranges = cells[0].ranges["weights"]  # of the FP32 network: the same in every run
    figure = Figure(figsize=(9, 1.4 + 0.3 * len(ranges)), layout="constrained")
    axes = figure.subplots()
    for row, (low, high) in enumerate(ranges.values()):
        axes.barh(row, high - low, left=low, height=0.5, color="C0")
        axes.text(high, row, f" {low:.2f} to {high:.2f}", va="center", fontsize=8)
    axes.set_yticks(range(len(ranges)), [plain(name) for name in ranges])
    axes.invert_yaxis()
    axes.use_sticky_edges = False  # or the longest bar ends in the frame
    axes.margins(x=0.15)
    axes.axvline(0, color="black", lw=0.8)
    axes.set(xlabel="weight", title="weights of the FP32 network, by layer")
    return figure
