"""Figures of predicted classes: the accuracy of each class, and the confusion matrix."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure  # no pyplot: figures need no screen and no global state
from numpy.typing import NDArray

from resnet8ptq.core.figures import label_cells, show_matrix
from resnet8ptq.core.text import plain
from resnet8ptq.tasks.scoring.hits import Hits
from resnet8ptq.tasks.scoring.statistics import wilson

SHOWN = 20  # most classes in a figure


def classes(model: Hits, baseline: Hits, class_names: Sequence[str], title: str) -> Figure:
    """Draw the accuracy of each shown class in model and FP32, with 95% Wilson intervals.

    A class without samples has no bars.
    """
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axes = figure.subplots()
    shown = _changed_most(model, baseline, len(class_names))
    positions = np.flatnonzero(np.isin(shown, model.labels))  # classes with samples
    labels = shown[positions]

    # Draw FP32's bar left of the model's, with its interval
    series = (("FP32", baseline, "0.65", -0.2), ("quantized", model, "C0", 0.2))
    for name, hits, colour, offset in series:
        accuracies = []
        intervals = []
        for label in labels:
            right = hits.right[hits.labels == label]
            accuracies.append(int(right.sum()) / len(right))
            intervals.append(wilson(int(right.sum()), len(right)))
        accuracy = np.array(accuracies)
        low, high = np.transpose(intervals)
        axes.bar(
            positions + offset,
            100 * accuracy,
            width=0.38,
            color=colour,
            yerr=[100 * (accuracy - low), 100 * (high - accuracy)],
            capsize=3,
            label=name,
        )

    # Write names and titles
    names = [plain(class_names[label]) for label in shown]
    axes.set_xticks(range(len(shown)), names, rotation=30, ha="right")
    axes.set_ylim(max(0.0, axes.dataLim.y0), 100)
    axes.set(title=_title(title, shown, class_names), ylabel="accuracy, %  (bars: 95% interval)")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside upper right", ncols=2)
    return figure


def confusion(model: Hits, baseline: Hits, class_names: Sequence[str], title: str) -> Figure:
    """Draw the confusion matrix of the shown classes, and its change from FP32."""
    figure = Figure(figsize=(14.5, 7.2), layout="constrained")
    left, right = figure.subplots(1, 2)

    # The colour of a cell is its share of the true class
    shown = _changed_most(model, baseline, len(class_names))
    names = [class_names[label] for label in shown]
    whole = model.confusion(len(class_names))
    counts = whole[np.ix_(shown, shown)]
    shares = counts / np.maximum(whole[shown].sum(axis=1, keepdims=True), 1)
    show_matrix(left, shares, cmap="Blues", vmin=0, vmax=1)
    _label_cells(left, counts, shares > 0.5, names, "{}")
    left.set(title="samples")

    # Counts may rise and fall, so the colours have a middle
    changes = whole - baseline.confusion(len(class_names))
    change = changes[np.ix_(shown, shown)]
    limit = max(1, int(np.abs(change).max()))
    show_matrix(right, change, cmap="PuOr", norm=TwoSlopeNorm(0, -limit, limit))
    _label_cells(right, change, np.abs(change) > 0.6 * limit, names, "{:+d}")
    right.set(title="change from FP32")
    figure.suptitle(_title(title, shown, class_names))
    return figure


def _changed_most(model: Hits, baseline: Hits, classes: int) -> NDArray[np.int64]:
    """Return at most `SHOWN` classes, ascending: those with the most changed predictions.

    At equal numbers, classes with samples come first.
    """
    if classes <= SHOWN:
        return np.arange(classes)
    moved = model.predictions != baseline.predictions
    changed = np.bincount(model.labels[moved], minlength=classes)
    samples = np.bincount(model.labels, minlength=classes)
    return np.sort(np.lexsort((samples == 0, -changed))[:SHOWN])


def _title(title: str, shown: NDArray[np.int64], class_names: Sequence[str]) -> str:
    if len(shown) == len(class_names):
        return plain(title)
    return f"{plain(title)}\nthe {SHOWN} of {len(class_names)} classes that changed most"


def _label_cells(
    axes: Axes,
    counts: NDArray[np.int64],
    dark: NDArray[np.bool_],
    class_names: Sequence[str],
    text: str,
) -> None:
    # Leave cells of 0 empty
    texts = np.where(counts, np.vectorize(text.format, otypes=["U"])(counts), "")
    label_cells(axes, texts, dark, size=9)
    axes.set_aspect("equal")
    names = [plain(name) for name in class_names]
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="predicted class", ylabel="true class")
