"""Figures as files: saved, encoded, and with labels from outside."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure  # no pyplot: nothing here needs a screen or global state
from numpy.typing import NDArray

from resnet8ptq.core import files


def save(figure: Figure, path: Path) -> None:
    """Write a figure to a PNG, all or nothing."""
    with files.atomic(path) as temporary:
        temporary.write_bytes(to_png(figure))


def to_png(figure: Figure) -> bytes:
    """Return a figure as a PNG. It cannot be laid out again after."""
    figure.set_dpi(110)
    canvas = FigureCanvasAgg(figure)
    if engine := figure.get_layout_engine():
        # `savefig` would draw twice, the first time only for the layout.
        engine.execute(figure)
        figure.set_layout_engine("none")
    image = io.BytesIO()
    canvas.print_png(image)  # type: ignore[no-untyped-call]
    return image.getvalue()


def show_matrix(axes: Axes, values: NDArray[Any], **colours: Any) -> QuadMesh:
    """Colour a cell for each value [rows, columns], the first row on top; centres at integers.

    What `imshow` shows, which resamples a few cells to every pixel first.
    """
    edges = [np.arange(length + 1) - 0.5 for length in reversed(values.shape)]
    mesh = axes.pcolormesh(*edges, values, **colours)
    axes.invert_yaxis()
    return mesh
