"""Figures of one run."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure  # no pyplot: nothing here needs a screen or global state
from numpy.typing import NDArray

from resnet8ptq.core.figures import show_matrix
from resnet8ptq.core.text import plain
from resnet8ptq.tasks.classification import Paired
from resnet8ptq.tasks.statistics import wilson


def classes(paired: Paired, class_names: Sequence[str], title: str) -> Figure:
    """Accuracy of each class beside FP32's, with 95% Wilson intervals."""
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axes = figure.subplots()
    labels = np.unique(paired.labels)  # of classes with images
    totals = [int((paired.labels == label).sum()) for label in labels]
    series = (("FP32", paired.baseline_hits, "0.65", -0.2), ("quantized", paired.hits, "C0", 0.2))
    for name, hits, colour, offset in series:
        right = [int(hits[paired.labels == label].sum()) for label in labels]
        accuracy = np.divide(right, totals)
        low, high = np.transpose([wilson(*counts) for counts in zip(right, totals, strict=True)])
        axes.bar(
            labels + offset,
            100 * accuracy,
            width=0.38,
            color=colour,
            yerr=[100 * (accuracy - low), 100 * (high - accuracy)],
            capsize=3,
            label=name,
        )
    axes.set_xticks(
        range(len(class_names)), [plain(n) for n in class_names], rotation=30, ha="right"
    )
    axes.set_ylim(max(0.0, axes.dataLim.y0), 100)
    axes.set(title=plain(title), ylabel="accuracy, %  (bars: 95% interval)")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside upper right", ncols=2)
    return figure


def confusion(paired: Paired, class_names: Sequence[str], title: str) -> Figure:
    """Counts of images by true and predicted class, and beside them their change from FP32's."""
    figure = Figure(figsize=(14.5, 7.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    counts = paired.confusion(len(class_names))
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    show_matrix(left, shares, cmap="Blues", vmin=0, vmax=1)
    _label_cells(left, counts, shares > 0.5, class_names, "{}")
    left.set(title="images")
    change = paired.confusion_change(len(class_names))
    limit = max(1, int(np.abs(change).max()))
    show_matrix(right, change, cmap="PuOr", norm=TwoSlopeNorm(0, -limit, limit))
    _label_cells(right, change, np.abs(change) > 0.6 * limit, class_names, "{:+d}")
    right.set(title="change from FP32")
    figure.suptitle(plain(title))
    return figure


def _label_cells(
    axes: Axes,
    counts: NDArray[np.int64],
    dark: NDArray[np.bool_],
    class_names: Sequence[str],
    text: str,
) -> None:
    for (row, column), count in np.ndenumerate(counts):
        if count:
            colour = "white" if dark[row, column] else "black"
            shown = text.format(count)
            written = axes.text(
                column, row, shown, ha="center", va="center", color=colour, fontsize=9
            )
            written.set_in_layout(False)  # inside its cell: no need to measure it
    axes.set_aspect("equal")
    names = [plain(name) for name in class_names]
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="predicted class", ylabel="true class")


def sensitivity(
    layers: Sequence[str],
    sqnr_db: Sequence[float],
    points_lost: Sequence[float],
    saved_kb: Sequence[float],
    *,
    whole_sqnr_db: float,
    output: str,
    title: str,
) -> Figure:
    """Three bars for each layer, the first layer on top.

    Args:
        points_lost: accuracy lost, in percentage points.
        whole_sqnr_db: with every layer quantized, drawn as a line.
        output: what the SQNR is taken of.
    """
    figure = Figure(figsize=(11, 1.8 + 0.34 * len(layers)), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True, width_ratios=(2, 1, 1))
    columns = (
        (sqnr_db, "", f"SQNR of the {output} (dB)"),
        (points_lost, "%+.2f", "accuracy lost (points)"),
        (saved_kb, "%.1f", "saved (kB)"),
    )
    places = range(len(layers))
    for axes, (values, label, name) in zip(panels, columns, strict=True):
        bars = axes.barh(places, values, color="tab:blue", height=0.65)
        axes.bar_label(bars, fmt=label, padding=3, fontsize=9)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.margins(x=0.3)  # room for the labels
        axes.set_xlabel(name)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    # The line would cross numbers at the bars' ends: here they stand by the names.
    named = [f"{plain(layer)}  {value:.1f}" for layer, value in zip(layers, sqnr_db, strict=True)]
    panels[0].set_yticks(places, named)
    panels[0].invert_yaxis()
    line = panels[0].axvline(whole_sqnr_db, color="tab:red", linestyle="--")
    figure.legend([line], [f"all layers: {whole_sqnr_db:.1f} dB"], loc="outside upper right")
    figure.suptitle(plain(title), x=0.01, ha="left")
    return figure


def fine_tuning(points: Sequence[Mapping[str, float]]) -> Figure:
    """Loss in training and on held-out images, and accuracy on those, over the steps."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    series = (
        (left, "qat_loss", "training", "C0", None),
        (left, "qat_validation_loss", "held-out", "C1", "o"),
        (right, "qat_validation_accuracy", "held-out", "C1", "o"),
    )
    for axes, name, label, colour, marker in series:
        curve = [(point["step"], point[name]) for point in points if name in point]
        axes.plot(*zip(*curve, strict=True), color=colour, marker=marker, label=label)
    left.set(ylabel="distillation loss")
    right.set(ylabel="accuracy of held-out images")
    for axes in (left, right):
        axes.set(xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend()
    return figure
