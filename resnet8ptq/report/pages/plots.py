"""Figures of a report; a function returns None if the runs have no data for its figure."""

import re
from collections.abc import Sequence

import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from resnet8ptq.core import figures
from resnet8ptq.core.text import plain
from resnet8ptq.report.families import Family, best_first, records_of
from resnet8ptq.report.table import FIRST, MANY

_PREFIX = re.compile(r"^(?:model|functional|sequential)(?:_\d+)?[/_]")  # Keras's
_COLOURS = {  # matplotlib's colours by calibration method
    "minmax": "C0",
    "entropy": "C1",
    "percentile": "C2",
    "mse": "C3",
    "histogram": "C4",
    "moving_average": "C5",
    "dynamic": "C6",
    "weight_only": "C7",
}


def class_impact(family: Family) -> Figure | None:
    """Draw the accuracy change by class and model, in points; frame significant losses.

    With more than `MANY` models, only the `FIRST` best are drawn.
    """
    cells = family.models
    names = family.class_names
    if not cells or not names:
        return None
    shown = ""
    if len(cells) > MANY:
        shown = f"\nthe {FIRST} best of {len(cells):,} runs by {family.metric.title}"
        order = best_first(records_of(cells))
        cells = [cells[index] for index in order[:FIRST]]

    # Draw a matrix of models by classes, in points
    deltas = [family.class_deltas(cell) for cell in cells]
    change = 100 * np.array(deltas)
    limit = max(1.0, float(np.nanmax(np.abs(change), initial=0.0)))
    figure = Figure(
        figsize=(max(7.0, 3.2 + 0.72 * len(names)), 1.7 + 0.34 * len(cells)), layout="constrained"
    )
    axes = figure.subplots()
    mesh = figures.show_matrix(axes, change, cmap="RdBu", norm=TwoSlopeNorm(0, -limit, limit))
    known = ~np.isnan(change)
    change = np.round(change, 1) + 0.0  # turns -0.0 into 0.0
    texts = np.where(known, np.vectorize("{:+.1f}".format, otypes=["U"])(change), "")
    figures.label_cells(axes, texts, np.abs(change) > 0.6 * limit, size=8)
    for row, column in np.argwhere(known):
        if names[column] in cells[row].worse_classes:
            axes.add_patch(Rectangle((column - 0.48, row - 0.48), 0.96, 0.96, fill=False, lw=2))

    # Name both axes
    classes = list(map(plain, names))
    models = [plain(cell.label) for cell in cells]
    axes.set_xticks(range(len(classes)), classes, rotation=45, ha="right")
    axes.set_yticks(range(len(models)), models, fontsize=8)
    axes.set_title("Accuracy against FP32 by class, in points (framed: a significant loss)" + shown)
    figure.colorbar(mesh, ax=axes, label="points", shrink=0.8)
    return figure


def _short(names: Sequence[str]) -> list[str]:
    """Return printable names without Keras's prefix and tf2onnx's suffix."""
    short = []
    for name in names:
        own = _PREFIX.sub("", name).removesuffix(":0")
        short.append(plain(own))
    return short


def activation_ranges(family: Family, backend: str) -> Figure | None:
    """Draw the ranges of one backend's activations by each calibration method.

    Only activations with a range by the first method are drawn. Returns None without two methods to
    compare.
    """
    chosen: dict[str, dict[str, list[float]]] = {}
    for cell in family.measured:
        if cell.record.backend == backend and cell.ranges.get("activations"):
            chosen.setdefault(cell.record.calib, cell.ranges["activations"])
    if len(chosen) < 2:
        return None

    # Draw a line for each method, side by side
    names = list(next(iter(chosen.values())))
    figure = Figure(figsize=(9, 1.8 + 0.27 * len(names)), layout="constrained")
    axes = figure.subplots()
    offsets = np.linspace(-0.25, 0.25, len(chosen))
    for offset, (method, ranges) in zip(offsets, chosen.items(), strict=True):
        # A method may lack activations of the first one
        rows = []
        ends = []
        for row, name in enumerate(names):
            if name in ranges:
                rows.append(row)
                ends.append(ranges[name])
        low, high = np.reshape(ends, (-1, 2)).T
        axes.hlines(
            y=np.add(rows, offset),
            xmin=low,
            xmax=high,
            colors=_COLOURS.get(method, "C7"),
            lw=2.5,
            label=plain(method),
        )

    # Name the activations; most ranges are small, a few are large
    axes.set_yticks(range(len(names)), _short(names))
    axes.tick_params(axis="y", labelsize=7)
    axes.invert_yaxis()
    axes.set_xscale("symlog", linthresh=1)
    axes.set(
        xlabel="activation value", title=f"{plain(backend)}: activation ranges kept by each method"
    )
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    return figure


def _find_weights(family: Family) -> dict[str, list[float]]:
    """Return the ranges of the FP32 network's weights by layer; empty if no run has them."""
    for cell in family.measured:
        ranges = cell.ranges.get("weights")
        if ranges:
            return ranges
    return {}


def weight_ranges(family: Family) -> Figure | None:
    """Draw each layer's smallest and largest weight in the FP32 network."""
    ranges = _find_weights(family)
    if not ranges:
        return None
    figure = Figure(figsize=(9, 1.4 + 0.3 * len(ranges)), layout="constrained")
    axes = figure.subplots()
    # One bar for each layer, from the smallest to the largest weight
    for row, (low, high) in enumerate(ranges.values()):
        axes.barh(row, high - low, left=low, height=0.5, color="C0")
        axes.text(high, row, f" {low:.2f} to {high:.2f}", va="center", fontsize=8)
    axes.set_yticks(range(len(ranges)), list(map(plain, ranges)))
    axes.invert_yaxis()
    axes.use_sticky_edges = False  # keeps the longest bar off the frame
    axes.margins(x=0.15)
    axes.axvline(0, color="black", lw=0.8)
    axes.set(xlabel="weight", title="weights of the FP32 network, by layer")
    return figure
