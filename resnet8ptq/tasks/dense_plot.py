"""The figure of values for each pixel: the pictures that changed most."""

import numpy as np
from matplotlib.figure import Figure  # no pyplot: figures need no screen and no global state
from numpy.typing import NDArray

from resnet8ptq.core.text import plain
from resnet8ptq.tasks.scoring.comparison import Comparison
from resnet8ptq.tasks.scoring.outputs import Array

PICTURES = 6  # at most: those that changed most


def draw(comparison: Comparison, title: str) -> Figure:
    """Draw the pictures whose metric changed most: the target, and the outputs of both models."""
    model = comparison.model
    baseline = comparison.baseline
    metric = comparison.metric
    change = np.abs(model.per_item - baseline.per_item)
    shown = np.argsort(-change, kind="stable")[:PICTURES]
    figure = Figure(figsize=(10, 1.0 + 3.2 * len(shown)), layout="constrained")
    grid = figure.subplots(len(shown), 3, squeeze=False)
    for row, index in zip(grid, shown, strict=True):
        heads = ["target"] + [
            f"{name}: {metric.title} {metric.show(scores.per_item[index])}"
            for name, scores in (("FP32", baseline), ("quantized", model))
        ]
        maps = [model.targets, *(scores.outputs.values[0] for scores in (baseline, model))]
        drawn = [_colour(values[index]) for values in maps]
        for axes, head, pixels in zip(row, heads, drawn, strict=True):
            axes.imshow(pixels, cmap="gray")
            axes.set_title(head, fontsize=10)
            axes.set_axis_off()
    figure.suptitle(f"{plain(title)}\nthe pictures that changed most", fontsize=11)
    return figure


def _colour(values: Array) -> NDArray[np.float64]:
    """Return a map as a picture [H, W] or [H, W, 3] of values from 0 to 1."""
    pixels = np.asarray(values, np.float64)
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3):
        pixels = np.moveaxis(pixels, 0, 2)
    low, high = pixels.min(), pixels.max()
    return ((pixels - low) / (high - low or 1)).squeeze()
