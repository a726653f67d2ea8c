"""The figure of `task=dense`: the pictures that changed most."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # no pyplot: figures need no screen and no global state
from numpy.typing import NDArray

from resnet8ptq.core.text import plain
from resnet8ptq.tasks.scoring.comparison import Comparison
from resnet8ptq.tasks.scoring.outputs import Array

PICTURES = 6  # most pictures in the figure


def draw(comparison: Comparison, title: str) -> Figure:
    """Draw the pictures whose metric changed most: the target, and the outputs of both models."""
    model = comparison.model
    baseline = comparison.baseline
    metric = comparison.metric
    change = np.abs(model.per_item - baseline.per_item)
    shown = np.argsort(-change, kind="stable")[:PICTURES]

    # A row for each picture, and a column for each map
    figure = Figure(figsize=(10, 1.0 + 3.2 * len(shown)), layout="constrained")
    grid = figure.subplots(len(shown), 3, squeeze=False)
    for row, index in zip(grid, shown, strict=True):
        _draw_map(row[0], "target", model.targets[index])
        for axes, name, scores in ((row[1], "FP32", baseline), (row[2], "quantized", model)):
            head = f"{name}: {metric.title} {metric.show(scores.per_item[index])}"
            _draw_map(axes, head, scores.outputs.values[0][index])
    figure.suptitle(f"{plain(title)}\nthe pictures that changed most", fontsize=11)
    return figure


def _draw_map(axes: Axes, head: str, values: Array) -> None:
    axes.imshow(_colour(values), cmap="gray")
    axes.set_title(head, fontsize=10)
    axes.set_axis_off()


def _colour(values: Array) -> NDArray[np.float64]:
    """Return a map as a picture [H, W] or [H, W, 3] of values from 0 to 1.

    Unless there are 3 channels, their mean is drawn, such as for the two of a flow. The shortest of
    three axes is that of the channels.
    """
    pixels = np.asarray(values, np.float64)
    if pixels.ndim == 3:
        pixels = np.moveaxis(pixels, int(np.argmin(pixels.shape)), 2)
        if pixels.shape[2] != 3:
            pixels = pixels.mean(axis=2)
    low = pixels.min()
    span = pixels.max() - low
    return (pixels - low) / (span or 1)
