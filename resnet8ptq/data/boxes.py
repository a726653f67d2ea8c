"""Boxes as labels of samples: an array with one record for each picture.

image_id        the picture's id in the annotations
height, width   size of the picture before resizing, after its rotation by EXIF data
scale, offset   [2]: x and y of the picture become scale * x + offset in the network's input
count           number of boxes
boxes           [M] records, of which the first `count` are used:
    bbox        [4]: left, top, width and height in pixels of the picture
    area        area of the object in pixels
    category    index in the data set's class names
    crowd       whether it is a group of objects; detections in it are ignored
    keypoints   [3 * K]: x, y and visibility of K keypoints, all 0 for objects without keypoints.
                The field is missing if the data have no keypoints
masks           the masks of the boxes as one text, see `core.masks`. The field is missing if the
                data have no masks
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.core import masks

BOX = np.dtype([("bbox", "f8", 4), ("area", "f8"), ("category", "i8"), ("crowd", "?")])
_PICTURE = (
    ("image_id", "i8"),
    ("height", "i8"),
    ("width", "i8"),
    ("scale", "f8", 2),
    ("offset", "f8", 2),
    ("count", "i8"),
)

# The fields of `BOX`, and the keypoints if the data have any.
Box = (
    tuple[Sequence[float], float, int, bool]
    | tuple[Sequence[float], float, int, bool, Sequence[float]]
)


@dataclass(frozen=True)
class Annotated:
    """A picture's size, its placement in the network's input, its boxes and their masks."""

    image_id: int
    height: int
    width: int
    scale: tuple[float, float]
    offset: tuple[float, float]
    boxes: Sequence[Box]
    masks: Sequence[bytes] = ()


def pack(pictures: Sequence[Annotated], keypoints: int = 0) -> NDArray[Any]:
    """Return pictures as an array [N] of records.

    Args:
        keypoints: number of keypoints of each object; 0 if the data have none.
    """
    box = BOX
    if keypoints:
        box = np.dtype([*BOX.descr, ("keypoints", "f8", 3 * keypoints)])
    most = max((len(picture.boxes) for picture in pictures), default=0)
    fields = [*_PICTURE, ("boxes", box, (most,))]

    # Each record has room for the most boxes and the longest masks
    texts = [masks.join(picture.masks) for picture in pictures]
    longest = max(map(len, texts), default=0)
    if longest:
        fields.append(("masks", f"S{longest}"))
    packed = np.zeros(len(pictures), fields)
    for record, picture, text in zip(packed, pictures, texts, strict=True):
        if longest:
            record["masks"] = text
        for name in ("image_id", "height", "width", "scale", "offset"):
            record[name] = getattr(picture, name)
        record["count"] = len(picture.boxes)
        record["boxes"][: len(picture.boxes)] = np.array(list(picture.boxes), box)
    return packed
