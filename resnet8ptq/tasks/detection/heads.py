"""What the outputs of a detector mean: the usual heads, by name, and how each is decoded.

Each makes boxes and scores, or detections, of a network's outputs. Boxes are left, top, right and
bottom in pixels of the network's input. A further head is two functions and an entry in `HEADS`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import DetectionConfig
from resnet8ptq.core.errors import ConfigError, ModelError
from resnet8ptq.tasks.contract import Array, describe

Floats = NDArray[np.float32]
Shape = tuple[int | None, ...]

# YOLOv3's for COCO (Redmon and Farhadi, "YOLOv3: An Incremental Improvement", 2018), in pixels.
COCO_ANCHORS = {
    8: (10, 13, 16, 30, 33, 23),
    16: (30, 61, 62, 45, 59, 119),
    32: (116, 90, 156, 198, 373, 326),
}


@dataclass(frozen=True)
class Frame:
    """What a head is read by.

    Attributes:
        height, width: of the network's input, in pixels.
        classes: how many the data set has.
        outputs: the shape of each output by its name, without the batch axis.
        config: how boxes are written, strides and anchors.
    """

    height: int
    width: int
    classes: int
    outputs: Mapping[str, Shape]
    config: DetectionConfig

    @property
    def shapes(self) -> list[Shape]:
        """Of the outputs."""
        return list(self.outputs.values())

    @property
    def scored(self) -> int:
        """How many classes the network has scores for: with the background, where it has one."""
        return self.classes + (self.config.background is not None)

    @property
    def maps(self) -> list[tuple[int, int]]:
        """Rows and columns of the map of each stride."""
        return [(self.height // s, self.width // s) for s in self.config.strides]

    @property
    def anchors(self) -> NDArray[np.float64] | None:
        """Width and height [strides, anchors, 2] in pixels; None where they are not known."""
        given = self.config.anchors
        if given is None:
            given = [COCO_ANCHORS.get(stride, ()) for stride in self.config.strides]
        if len(given) != len(self.config.strides) or len({len(each) for each in given}) != 1:
            return None
        return np.array(given, np.float64).reshape(len(given), -1, 2)


@dataclass(frozen=True)
class Candidates:
    """Boxes [n, A, 4] and scores of each class [n, A, C], before non-maximum suppression."""

    boxes: Floats
    scores: Floats


@dataclass(frozen=True)
class Found:
    """Detections of n pictures as the network has chosen them, each one row.

    Attributes:
        picture: [D], its place among the n.
        boxes, scores, labels: [D, 4], [D], [D].
    """

    picture: NDArray[np.int64]
    boxes: Floats
    scores: Floats
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Head:
    """A way to write detections.

    Attributes:
        takes: the outputs it has, in words.
        fits: tells whether the outputs have such shapes.
        decode: outputs [n, ...], in the network's order.
    """

    takes: str
    fits: Callable[[Frame], bool]
    decode: Callable[[Sequence[Array], Frame], Candidates | Found]


def find_head(frame: Frame) -> str:
    """Return the name of the head: as set, or the one that fits the outputs.

    Raises:
        ConfigError: there is none of that name.
        ModelError: the one that is set does not fit, or none or several do; says which would.
    """
    fitting = [name for name, head in HEADS.items() if head.fits(frame)]
    name = frame.config.head
    if name == "auto" and (len(fitting) == 1 or fitting == ["yolox", "yolov5"]):
        return fitting[0]  # as many boxes as cells: not decoded, as a rule
    given = f"{frame.classes} classes and an input of {frame.height} x {frame.width}"
    returned = f"returns {describe(frame.outputs)}, with {given}"
    if name == "auto":
        why = "several heads fit" if fitting else "no head fits"
        taken = fitting or [f"{each} ({head.takes})" for each, head in HEADS.items()]
        raise ModelError(f"{returned}: {why}; task.head takes {' | '.join(taken)}")
    if name not in HEADS:
        raise ConfigError(f"task.head: got {name!r}, takes auto | {' | '.join(HEADS)}")
    if name not in fitting:
        would = f"; task.head={' or '.join(fitting)} fits" if fitting else "; no other head fits"
        raise ModelError(f"{returned}: task.head={name} takes {HEADS[name].takes}{would}")
    return name


def corners(boxes: Array, written: str, frame: Frame) -> Floats:
    """Return boxes [..., 4] as left, top, right, bottom in pixels of the network's input.

    Args:
        written: how they are, where `task.boxes` does not say it.
    """
    one, two, three, four = np.moveaxis(boxes.astype(np.float32), -1, 0)
    match frame.config.boxes or written:
        case "yxyx":
            one, two, three, four = two, one, four, three
        case "xywh":
            three, four = one + three, two + four
        case "cxcywh":
            one, two, three, four = (
                *(one - three / 2, two - four / 2),
                *(one + three / 2, two + four / 2),
            )
    found = np.stack([one, two, three, four], axis=-1)
    if frame.config.normalized:
        found *= np.array([frame.width, frame.height] * 2, np.float32)
    return found


def _around(centres: Floats, sizes: Floats) -> Floats:
    """Return boxes [..., 4] of these centres [..., 2] and sizes [..., 2]."""
    return np.concatenate([centres - sizes / 2, centres + sizes / 2], axis=-1)


def _grid(rows: int, columns: int) -> Floats:
    """Return x and y of each cell [rows, columns, 2]."""
    y, x = np.mgrid[:rows, :columns].astype(np.float32)
    return np.stack([x, y], axis=-1)


def _sigmoid(values: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-values)), np.float32)


def _single(frame: Frame) -> Shape:
    """Return the shape of the one output of rows; empty where there is something else."""
    shapes = frame.shapes
    return shapes[0] if len(shapes) == 1 and len(shapes[0]) == 2 else ()


def _is_yolox(frame: Frame) -> bool:
    return _single(frame) == (sum(r * c for r, c in frame.maps), 5 + frame.classes)


def _decode_yolox(outputs: Sequence[Array], frame: Frame) -> Candidates:
    """Decode as Ge et al., "YOLOX: Exceeding YOLO Series in 2021", in `decode_outputs`."""
    values = outputs[0].astype(np.float32)
    maps = list(zip(frame.config.strides, frame.maps, strict=True))
    cells = np.concatenate([_grid(*size).reshape(-1, 2) for _, size in maps])
    steps = np.concatenate([np.full((r * c, 1), s, np.float32) for s, (r, c) in maps])
    boxes = _around((values[..., :2] + cells) * steps, np.exp(values[..., 2:4]) * steps)
    return Candidates(boxes, values[..., 4:5] * values[..., 5:])


def _is_yolov3(frame: Frame) -> bool:
    anchors = frame.anchors
    if anchors is None or len(frame.shapes) != len(anchors):
        return False
    return all(map(partial(_is_map, frame, anchors.shape[1]), frame.shapes, frame.maps))


def _is_map(frame: Frame, anchors: int, shape: Shape, size: tuple[int, int]) -> bool:
    values = 5 + frame.classes
    return shape in (
        (*size, anchors * values),
        (anchors * values, *size),
        (anchors, *size, values),
    )


def _decode_yolov3(outputs: Sequence[Array], frame: Frame) -> Candidates:
    """Decode as Redmon and Farhadi, "YOLOv3: An Incremental Improvement", 2018."""
    anchors = frame.anchors
    assert anchors is not None  # it fits
    boxes, scores = [], []
    for output, stride, size, sizes in zip(
        outputs, frame.config.strides, frame.maps, anchors.astype(np.float32), strict=True
    ):
        rows, columns = size
        values = output.astype(np.float32)
        if values.shape[1:] == (len(sizes), *size, 5 + frame.classes):
            values = values.transpose(0, 2, 3, 1, 4)
        elif values.shape[2:] == size:
            values = values.transpose(0, 2, 3, 1)
        values = values.reshape(-1, rows, columns, len(sizes), 5 + frame.classes)
        centres = (_sigmoid(values[..., :2]) + _grid(*size)[:, :, np.newaxis]) * stride
        decoded = _around(centres, np.exp(values[..., 2:4]) * sizes)
        count = len(values), rows * columns * len(sizes)
        boxes.append(decoded.reshape(*count, 4))
        chances = _sigmoid(values[..., 4:5]) * _sigmoid(values[..., 5:])
        scores.append(chances.reshape(*count, frame.classes))
    return Candidates(np.concatenate(boxes, axis=1), np.concatenate(scores, axis=1))


def _is_yolov5(frame: Frame) -> bool:
    return _single(frame)[1:] == (5 + frame.classes,)


def _decode_yolov5(outputs: Sequence[Array], frame: Frame) -> Candidates:
    values = outputs[0].astype(np.float32)
    return Candidates(corners(values[..., :4], "cxcywh", frame), values[..., 4:5] * values[..., 5:])


def _is_yolov8(frame: Frame) -> bool:
    return _single(frame)[:1] == (4 + frame.classes,)


def _decode_yolov8(outputs: Sequence[Array], frame: Frame) -> Candidates:
    values = outputs[0].astype(np.float32).swapaxes(1, 2)
    return Candidates(corners(values[..., :4], "cxcywh", frame), values[..., 4:])


def _places(frame: Frame, *wanted: Callable[[Shape], bool]) -> list[int]:
    """Return the place of the one output of each kind; none where there are others."""
    kinds = [[place for place, s in enumerate(frame.shapes) if fits(s)] for fits in wanted]
    if any(len(kind) != 1 for kind in kinds) or len(frame.shapes) != len(wanted):
        return []
    places = [kind[0] for kind in kinds]
    return places if len(set(places)) == len(places) else []


def _is_boxes(shape: Shape) -> bool:
    return len(shape) == 2 and shape[1] == 4


def _find_ssd(frame: Frame) -> list[int]:
    shapes = frame.shapes
    if len(shapes) != 2 or shapes[0][:1] != shapes[1][:1]:
        return []
    if all(map(_is_boxes, shapes)) and frame.scored == 4:
        return [0, 1]  # boxes first, as usual
    return _places(frame, _is_boxes, lambda s: len(s) == 2 and s[1] == frame.scored != 4)


def _decode_ssd(outputs: Sequence[Array], frame: Frame) -> Candidates:
    boxes, scores = (outputs[place] for place in _find_ssd(frame))
    scores = scores.astype(np.float32)
    if frame.config.background is not None:
        scores = np.delete(scores, frame.config.background, axis=-1)
    return Candidates(corners(boxes, "xyxy", frame), scores)


def _find_selected(frame: Frame) -> list[int]:
    return _places(
        frame,
        _is_boxes,
        lambda s: len(s) == 2 and s[0] == frame.scored and s[1] != 3,
        lambda s: len(s) == 2 and s[1] == 3,
    )


def _decode_selected(outputs: Sequence[Array], frame: Frame) -> Found:
    """Take what ONNX's NonMaxSuppression has selected: picture, class and box of each."""
    boxes, scores, selected = (outputs[place] for place in _find_selected(frame))
    rows = selected.reshape(-1, 3).astype(np.int64)
    picture, label, box = rows[(rows >= 0).all(axis=1)].T
    found = corners(boxes[picture, box], "yxyx", frame)
    return Found(picture, found, scores[picture, label, box].astype(np.float32), label)


def _find_detections(frame: Frame) -> list[int]:
    """Return the places of boxes, scores, labels and perhaps of their number; none for others."""
    names, shapes = list(frame.outputs), frame.shapes
    boxes = [place for place, shape in enumerate(shapes) if _is_boxes(shape)]
    counts = [
        place
        for place, shape in enumerate(shapes)
        if shape == () or (shape == (1,) and re.search("num|count|valid", names[place], re.I))
    ]
    flat = [place for place, s in enumerate(shapes) if len(s) == 1 and place not in counts]
    if len(boxes) != 1 or len(flat) != 2 or len(counts) != len(shapes) - 3 or len(counts) > 1:
        return []
    scores = [place for place in flat if re.search("score|conf|prob", names[place], re.I)]
    labels = [place for place in flat if re.search("label|class|cls|categ", names[place], re.I)]
    if len(scores) == 1:
        labels = [place for place in flat if place not in scores]
    elif len(labels) == 1:
        scores = [place for place in flat if place not in labels]
    else:
        return []
    return [*boxes, *scores, *labels, *counts]


def _is_detections(frame: Frame) -> bool:
    return _single(frame)[1:] == (6,) or bool(_find_detections(frame))


def _decode_detections(outputs: Sequence[Array], frame: Frame) -> Found:
    counts: Sequence[Array] = ()
    if len(outputs) == 1:
        rows = outputs[0]
        boxes, scores, labels = rows[..., :4], rows[..., 4], rows[..., 5]
    else:
        boxes, scores, labels, *counts = (outputs[place] for place in _find_detections(frame))
    there = np.ones(scores.shape, np.bool_)
    for count in counts:
        there &= np.arange(scores.shape[1]) < count.reshape(-1, 1)
    label, background = labels.round().astype(np.int64), frame.config.background
    if background is not None:
        there &= label != background
        label = label - (label > background)
    found = corners(boxes[there], "xyxy", frame)
    return Found(np.nonzero(there)[0], found, scores[there].astype(np.float32), label[there])


HEADS = {
    "yolox": Head(
        "one output [cells of all strides, 5 + classes], undecoded", _is_yolox, _decode_yolox
    ),
    "yolov3": Head(
        "for each stride one output of anchors * (5 + classes) for each cell, undecoded",
        _is_yolov3,
        _decode_yolov3,
    ),
    "yolov5": Head("one output [boxes, 5 + classes], decoded", _is_yolov5, _decode_yolov5),
    "yolov8": Head("one output [4 + classes, boxes], decoded", _is_yolov8, _decode_yolov8),
    "ssd": Head(
        "boxes [boxes, 4], decoded, and scores [boxes, classes, perhaps a background]",
        lambda frame: bool(_find_ssd(frame)),
        _decode_ssd,
    ),
    "selected": Head(
        "boxes [boxes, 4], scores [classes, boxes] and what NonMaxSuppression selected [n, 3]",
        lambda frame: bool(_find_selected(frame)),
        _decode_selected,
    ),
    "detections": Head(
        "boxes [n, 4], scores [n] and labels [n], or all in one output [n, 6]",
        _is_detections,
        _decode_detections,
    ),
}
