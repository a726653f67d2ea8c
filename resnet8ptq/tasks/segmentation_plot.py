"""A figure of `task=segmentation`: the pictures whose predicted classes changed most."""

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure  # no pyplot: figures need no screen and no global state
from matplotlib.patches import Patch

from resnet8ptq.core.text import plain
from resnet8ptq.tasks.scoring.comparison import Comparison

PICTURES = 6  # most pictures in the figure
NAMED = 20  # classes with different colours


def draw(comparison: Comparison, class_names: Sequence[str], title: str) -> Figure:
    """Draw the pictures whose predicted classes changed most, with their masks and predictions."""
    model = comparison.model
    baseline = comparison.baseline
    scored = ~np.isin(model.masks, model.ignored)
    maps = baseline.outputs.values[0], model.outputs.values[0]
    change = ((maps[0] != maps[1]) & scored).mean(axis=(1, 2))
    shown = np.argsort(-change, kind="stable")[:PICTURES]

    # A row for each picture: the picture, its mask, FP32, the model
    height = model.masks.shape[1] / model.masks.shape[2]
    figure = Figure(figsize=(12, 1.2 + len(shown) * (3 * height + 0.3)), layout="constrained")
    grid = figure.subplots(len(shown), 4, squeeze=False)
    pixels = None if model.show is None else model.show(shown)
    for number, (row, index) in enumerate(zip(grid, shown, strict=True)):
        if pixels is not None:
            row[0].imshow(pixels[number].squeeze(), cmap="gray")
        heads = [f"{change[index]:.1%} of the pixels changed", "mask", "FP32", "quantized"]
        for axes, head in zip(row, heads, strict=True):
            axes.set_title(head, fontsize=10)
            axes.set_axis_off()
        for axes, classes in zip(row[1:], (model.masks, *maps), strict=True):
            coloured = np.where(scored[index], classes[index] % NAMED, np.nan)
            axes.imshow(coloured, cmap="tab20", vmin=0, vmax=NAMED - 1, interpolation="nearest")

    # Explain the colours, unless classes share them
    colours = colormaps["tab20"].colors  # type: ignore[attr-defined]
    if 0 < len(class_names) <= NAMED:
        patches = []
        for name, colour in zip(class_names, colours, strict=False):
            patches.append(Patch(color=colour, label=plain(name)))
        figure.legend(handles=patches, loc="outside lower center", ncols=min(10, len(patches)))
    figure.suptitle(f"{plain(title)}\nthe pictures that changed most", fontsize=11)
    return figure
