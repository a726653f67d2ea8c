"""The figure of a metric by class, see `classwise`."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure  # no pyplot: figures need no screen and no global state

from resnet8ptq.core.text import plain
from resnet8ptq.tasks.scoring.classwise import ClassChanges
from resnet8ptq.tasks.scoring.comparison import Comparison

CLASSES = 20  # most classes in the figure


def draw(comparison: Comparison, class_names: Sequence[str], title: str) -> Figure:
    """Draw the classes whose metric changed most: the metric, and the change with 95% interval."""
    metric = comparison.metric.title
    model = comparison.model
    baseline = comparison.baseline
    changes = ClassChanges.of(model, baseline)

    # Choose the largest changes, and sort them by the change
    deltas = changes.deltas
    order = np.argsort(-np.abs(deltas), kind="stable")  # NaN last
    shown = order[: min(CLASSES, np.count_nonzero(~np.isnan(deltas)))]
    shown = shown[np.argsort(deltas[shown], kind="stable")]
    figure = Figure(figsize=(10, 0.9 + 0.27 * len(shown)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    rows = np.arange(len(shown))

    # Draw the metric of each class on the left, and the change on the right
    for name, scores, colour, offset in (
        ("FP32", baseline, "0.65", -0.2),
        ("quantized", model, "C0", 0.2),
    ):
        values = scores.of_class[shown]
        left.barh(rows + offset, values, height=0.38, color=colour, label=name)

    # A significant change is red, see the label below
    differences = model.by_class[:, shown] - baseline.by_class[:, shown]
    low, high = np.nanquantile(differences, (0.025, 0.975), axis=0)
    colours = []
    for label in shown:
        if label in changes.lost:
            colours.append("C3")
        else:
            colours.append("0.3")
    right.hlines(rows, low, high, color=colours, linewidth=2)
    right.scatter(deltas[shown], rows, color=colours, zorder=3, s=18)
    right.axvline(0, color="0.6", linewidth=1)

    # Write names and titles
    counts = baseline.samples_of_class[shown]
    names = []
    for label, count in zip(shown, counts, strict=True):
        names.append(f"{plain(class_names[label])} ({count})")
    left.set_yticks(rows, names)
    left.set(xlabel=f"{metric}  (in brackets: pictures)", xlim=(0, None))
    right.set(xlabel=f"{metric} minus FP32's, 95% bootstrap interval\n(red: significant, by Holm)")
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    head = f"{plain(title)}\nclasses"
    if len(shown) < len(class_names):
        head += f", the {len(shown)} that changed most"
    figure.suptitle(head, fontsize=11)
    figure.legend(loc="outside upper right", ncols=2)
    return figure
