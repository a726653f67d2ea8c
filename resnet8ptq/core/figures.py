"""Matplotlib figures without pyplot: PNG files, matrices and their labels."""

import io
import pathlib
from functools import lru_cache
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection, QuadMesh
from matplotlib.figure import Figure  # no pyplot: nothing here needs a screen or global state
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D
from numpy.typing import NDArray

from resnet8ptq.core import files

_PNG_START = b"\x89PNG\r\n\x1a\n"
_PNG_END = b"IEND\xaeB`\x82"


def check_png(content: bytes) -> bytes:
    """Return the content; raise `ValueError` unless it begins and ends as a PNG file does."""
    if not (content.startswith(_PNG_START) and content.endswith(_PNG_END)):
        raise ValueError("not a PNG file")
    return content


def save(figure: Figure, path: pathlib.Path) -> None:
    """Write a figure to a PNG atomically."""
    files.write_bytes(path, to_png(figure))


def to_png(figure: Figure) -> bytes:
    """Return a figure as a PNG; this fixes the figure's layout and resolution."""
    figure.set_dpi(110)
    canvas = FigureCanvasAgg(figure)
    engine = figure.get_layout_engine()
    if engine:
        # `savefig` would draw twice, the first time only for the layout.
        engine.execute(figure)
        figure.set_layout_engine("none")
    image = io.BytesIO()
    canvas.print_png(image)  # type: ignore[no-untyped-call]
    return image.getvalue()


def show_matrix(axes: Axes, values: NDArray[Any], **colours: Any) -> QuadMesh:
    """Draw a coloured cell for each value [rows, columns], first row on top, centres at integers.

    `imshow` would be slower, because it resamples the cells to every pixel.
    """
    edges = [np.arange(length + 1) - 0.5 for length in reversed(values.shape)]
    mesh = axes.pcolormesh(*edges, values, **colours)
    axes.invert_yaxis()
    return mesh


def label_cells(axes: Axes, texts: NDArray[np.str_], dark: NDArray[np.bool_], size: float) -> None:
    """Write texts into the cells of `show_matrix`, in white on dark cells.

    All texts are one collection of outlines, because a text object for each cell would be slower.

    Args:
        texts, dark: [rows, columns].
        size: the size of the text in points.
    """
    rows, columns = np.nonzero(texts != "")
    outlines = [_outline(text, size) for text in texts[rows, columns]]
    labels = PathCollection(
        outlines,
        offsets=np.stack([columns, rows], axis=1),
        offset_transform=axes.transData,
        facecolors=np.where(dark[rows, columns], "white", "black"),
        linewidths=0,
    )
    assert axes.figure is not None
    labels.set_transform(Affine2D().scale(1 / 72) + axes.figure.dpi_scale_trans)
    labels.set_in_layout(False)  # labels lie inside their cells, so layout can ignore them
    axes.add_collection(labels, autolim=False)


@lru_cache(4096)  # the figures of a sweep share many numbers
def _outline(text: str, size: float) -> Path:
    """Return the outline of a text, centred at the origin, in points."""
    outline = TextPath((0, 0), text, size=size)
    box = outline.get_extents()
    return Path(outline.vertices - (box.p0 + box.p1) / 2, outline.codes)
