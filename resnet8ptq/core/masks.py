"""Masks of objects as COCO's compressed run lengths, by pycocotools.

A mask is a text of run lengths, down the columns of the picture; b"" stands for no mask. The masks
of a picture are one text, joined by spaces, so that an array can hold those of many pictures.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_PIXELS = 2**31  # most pixels of a picture
MAX_OUTLINE = 2**22  # most pixels along a polygon, as pycocotools needs 60 bytes for each
_LEAST = 6  # least numbers of a polygon, which are three points
_FIRST = 48  # the character of the value 0


def read(segmentation: Any, height: int, width: int) -> bytes:
    """Return the mask of an annotation, which holds polygons [[x, y, ...], ...] or run lengths.

    Returns b"" for any other form, such as the empty list of many data sets of boxes, and for
    invalid or too large masks. The C code of pycocotools does not check its input.
    """
    from pycocotools import mask

    try:
        if height * width >= MAX_PIXELS:
            return b""

        # Run lengths, as a list or compressed
        if isinstance(segmentation, dict):
            counts = segmentation["counts"]
            if isinstance(counts, str):
                counts = _parse(counts.encode("ascii"))
            if segmentation["size"] != [height, width] or not _are_runs(counts, height * width):
                return b""
            return _compress(counts, height, width)

        # Polygons, whose union is the mask
        if not segmentation:
            return b""
        if not all(_is_polygon(polygon, height, width) for polygon in segmentation):
            return b""
        parts = mask.frPyObjects(segmentation, height, width)
        return bytes(mask.merge(parts)["counts"]) if parts else b""
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
        return b""


def _is_polygon(polygon: Sequence[float], height: int, width: int) -> bool:
    """Return whether a polygon has three points or more, none far outside, and no huge outline."""
    if len(polygon) < _LEAST or len(polygon) % 2:
        return False
    points = np.array(polygon, np.float64).reshape(-1, 2)
    near = (np.abs(points) <= 2 * max(height, width)).all()  # NaN compares as False
    return bool(near and np.abs(points - np.roll(points, 1, axis=0)).sum() <= MAX_OUTLINE)


def _are_runs(counts: Sequence[int], pixels: int) -> bool:
    return all(type(count) is int and count >= 0 for count in counts) and sum(counts) == pixels


def _parse(text: bytes) -> list[int]:
    """Return the run lengths of a compressed mask, see `rleFrString` of pycocotools.

    Raises:
        ValueError: the text has an invalid character, ends within a number, or has a number of more
            than 13 characters.
    """
    counts: list[int] = []
    value = 0
    shift = 0
    for character in text:
        bits = character - _FIRST
        if not 0 <= bits < 64 or shift > 60:
            raise ValueError("no run lengths")
        value |= (bits & 31) << shift  # five bits of the number, the lowest first
        shift += 5
        if bits & 32:  # more digits of the number follow
            continue
        if bits & 16:  # the number is negative
            value -= 1 << shift
        if len(counts) > 2:  # from the fourth on, a number is the difference to the last but one
            value += counts[-2]
        counts.append(value)
        value = 0
        shift = 0
    if shift:
        raise ValueError("no run lengths")
    return counts


def _compress(counts: list[int], height: int, width: int) -> bytes:
    from pycocotools import mask

    runs = mask.frPyObjects({"counts": counts, "size": [height, width]}, height, width)
    return bytes(runs["counts"])


def encode(inside: NDArray[np.bool_], top: int, left: int, height: int, width: int) -> bytes:
    """Return the mask of an object in a picture of `height` x `width` pixels.

    Args:
        inside: whether each pixel belongs to the object, [rows, columns], for a part of the picture
            with the whole object.
        top, left: the position of the part.
    """
    # Find the edges of the runs in each column, as positions in the picture
    rows = len(inside)
    columns = np.zeros((inside.shape[1], rows + 1), np.int8)  # the extra row ends each run
    columns[:, :rows] = inside.T
    changes = np.flatnonzero(np.diff(columns.ravel(), prepend=0))
    column, row = np.divmod(changes, rows + 1)
    edges = (left + column) * height + top + row

    # Drop the edges where a run continues in the next column
    if len(edges):
        apart = edges[1:-1:2] != edges[2::2]
        kept = np.concatenate([[True], np.repeat(apart, 2), [True]])
        edges = edges[kept]
    runs = np.diff(edges, prepend=0, append=height * width)
    if not runs[-1]:  # the last pixel is in the mask
        runs = runs[:-1]
    return _compress(runs.tolist(), height, width)


def empty(height: int, width: int) -> bytes:
    """Return the mask of a picture without an object."""
    return _compress([height * width], height, width)


def of_box(box: Sequence[float], height: int, width: int) -> bytes:
    """Return the mask of a box (left, top, width and height in pixels).

    The box is rounded to whole pixels and clipped to the picture.
    """
    left, top, *size = box
    edges = np.round([left, top, left + size[0], top + size[1]])
    left, top, right, bottom = edges.clip(0, [width, height] * 2).astype(int).tolist()
    return encode(np.ones((bottom - top, right - left), np.bool_), top, left, height, width)


def to_coco(mask: bytes, height: int, width: int) -> dict[str, Any]:
    """Return a mask in COCO's format."""
    return {"size": [height, width], "counts": mask.decode("ascii")}


def decode(mask: bytes, height: int, width: int) -> NDArray[np.uint8]:
    """Return a mask as an array [height, width] of 0 and 1; zeros for b""."""
    runs = _parse(mask) or [height * width]
    values = (np.arange(len(runs)) % 2).astype(np.uint8)
    return np.repeat(values, runs).reshape(width, height).T


def iou(first: Sequence[Any], second: Sequence[Any]) -> NDArray[np.float64]:
    """Return the IoU [first, second] of each pair of masks in COCO's format."""
    from pycocotools import mask

    return np.asarray(mask.iou(list(first), list(second), [0] * len(second)))


def measure(mask: dict[str, Any]) -> list[float]:
    """Return left, top, width, height and area of a mask in COCO's format, in pixels."""
    from pycocotools import mask as coco

    return [*coco.toBbox(mask).tolist(), float(coco.area(mask))]


def join(masks: Sequence[bytes]) -> bytes:
    """Return the masks of a picture as one text; b"" without masks."""
    return b" ".join(masks).rstrip()


def split(joined: bytes, count: int) -> list[bytes]:
    """Return the `count` masks of a picture from their joined text; b"" for a missing one."""
    masks = bytes(joined).split(b" ")[:count]
    return masks + [b""] * (count - len(masks))


def of_record(record: Any) -> list[bytes]:
    """Return the masks of a picture's objects, see `data.boxes`; empty if the data have none."""
    if "masks" not in record.dtype.names:
        return []
    return split(record["masks"], int(record["count"]))


def move(
    mask: bytes,
    size: tuple[int, int],
    scale: Sequence[float],
    offset: Sequence[float],
    to: tuple[int, int],
) -> bytes:
    """Return a mask resized to another grid of pixels, by bilinear interpolation.

    Pixels above 0.5 are inside. b"" gives the mask without an object.

    Args:
        size, to: height and width of the mask, and of the result.
        scale, offset: x and y of the result are at scale * x + offset in the mask.
    """
    from pycocotools import mask as coco

    if not mask:
        return empty(*to)

    # Interpolate only the part of the result that covers the object
    box = np.asarray(coco.toBbox({"size": list(size), "counts": mask}))
    begin = np.floor((box[:2] - offset) / scale).clip(0, to[::-1]).astype(int)
    end = np.ceil((box[:2] + box[2:] - offset) / scale).clip(begin, to[::-1]).astype(int)
    centres = []  # of the result's pixels, as x and y in the mask
    for axis in (0, 1):
        pixels = np.arange(begin[axis], end[axis]) + 0.5
        centres.append(scale[axis] * pixels + offset[axis] - 0.5)
    x, y = centres
    inside = sample(decode(mask, *size), y, x) > 0.5
    return encode(inside, int(begin[1]), int(begin[0]), *to)


def sample(
    grid: NDArray[Any], rows: NDArray[np.float64], columns: NDArray[np.float64]
) -> NDArray[np.float32]:
    """Return bilinearly interpolated values of a grid; beyond an edge, values stay constant.

    Args:
        rows, columns: positions; 0 is the centre of the first pixel.
    """
    return _between(_between(grid.astype(np.float32), rows).T, columns).T


def _between(values: NDArray[np.float32], positions: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the rows of `values` at these positions, interpolated linearly."""
    last = len(values) - 1
    placed = positions.clip(0, last)
    first = np.floor(placed).astype(np.int64)
    part = (placed - first).astype(np.float32)[:, np.newaxis]
    if not part.any():  # no position is between pixels
        return np.asarray(values[first])
    return np.asarray(
        values[first] * (1 - part) + values[np.minimum(first + 1, last)] * part, np.float32
    )
