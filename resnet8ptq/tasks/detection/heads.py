"""The usual heads of detectors by name, and the decoding of their outputs.

A head decodes outputs to boxes and scores, or to detections. Boxes are left, top, right and bottom
in pixels of the network's input. Further values of each box may follow: x, y and visibility of K
keypoints, or the coefficients of a mask. To add a head, write two functions and an entry in
`HEADS`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import DetectionConfig
from resnet8ptq.core.errors import ConfigError, ModelError
from resnet8ptq.core.text import no_such_name
from resnet8ptq.tasks.scoring.outputs import Array, describe

Floats = NDArray[np.float32]
Shape = tuple[int | None, ...]

# The anchors of YOLOv3 for COCO, in pixels (Redmon and Farhadi, "YOLOv3: An Incremental
# Improvement", 2018).
COCO_ANCHORS = {
    8: (10, 13, 16, 30, 33, 23),
    16: (30, 61, 62, 45, 59, 119),
    32: (116, 90, 156, 198, 373, 326),
}


@dataclass(frozen=True)
class Frame:
    """The properties of a network and its data that decoding needs.

    Attributes:
        height, width: the size of the network's input in pixels.
        outputs: the shape of each output by name, without the batch axis.
        keypoints: the number of keypoints of an object.
        coefficients: the number of coefficients of a mask.
    """

    height: int
    width: int
    classes: int
    outputs: Mapping[str, Shape]
    config: DetectionConfig
    keypoints: int = 0
    coefficients: int = 0

    @property
    def further(self) -> int:
        """The number F of further values of each box."""
        return 3 * self.keypoints + self.coefficients

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of the outputs without the batch axis, in the network's order."""
        return list(self.outputs.values())

    @property
    def scored(self) -> int:
        """The number of scored classes, including the background if the settings name one."""
        return self.classes + (self.config.background is not None)

    @property
    def maps(self) -> list[tuple[int, int]]:
        """Rows and columns of the feature map at each stride."""
        return [(self.height // stride, self.width // stride) for stride in self.config.strides]

    @property
    def anchors(self) -> NDArray[np.float64] | None:
        """Width and height in pixels [strides, anchors, 2], by default `COCO_ANCHORS`.

        The result is None unless all strides have equally many anchors.
        """
        anchors = self.config.anchors
        if anchors is None:
            anchors = [COCO_ANCHORS.get(stride, ()) for stride in self.config.strides]
        counts = set(map(len, anchors))
        if len(anchors) != len(self.config.strides) or len(counts) != 1:
            return None
        return np.array(anchors, np.float64).reshape(len(anchors), -1, 2)


@dataclass(frozen=True)
class Candidates:
    """Boxes of n pictures, A in each, before the suppression.

    Attributes:
        boxes: [n, A, 4 + F], the corners and F further values, such as keypoints.
        scores: [n, A, C], the score of each class.
    """

    boxes: Floats
    scores: Floats


@dataclass(frozen=True)
class Detections:
    """D detections in a batch of pictures.

    Attributes:
        picture: [D], the index of each detection's picture.
        boxes: [D, 4 + F], the corners and F further values.
        scores: [D].
        labels: [D], class indices, or the ids of classes until `Decoder` has replaced them.
    """

    picture: NDArray[np.int64]
    boxes: Floats
    scores: Floats
    labels: NDArray[np.int64]

    def select(self, chosen: NDArray[Any]) -> "Detections":
        """Return the detections at these indices, or in this mask."""
        return Detections(*(array[chosen] for array in vars(self).values()))


@dataclass(frozen=True)
class Head:
    """A layout of outputs.

    Attributes:
        takes: a description of the outputs, for messages.
        fits: returns whether the outputs of a frame may have this layout.
        decode: decodes the outputs of a batch, in the network's order.
        further: whether the layout allows values after a box's corners and scores, such as
            keypoints.
    """

    takes: str
    fits: Callable[[Frame], bool]
    decode: Callable[[Sequence[Array], Frame], Candidates | Detections]
    further: bool = False


def _possible_heads(frame: Frame) -> dict[str, Head]:
    """Return the heads by name; if boxes have further values, only those that allow them."""
    return {name: head for name, head in HEADS.items() if head.further or not frame.further}


def fitting_heads(frame: Frame) -> list[str]:
    """Return the names of the heads that fit the outputs."""
    return [name for name, head in _possible_heads(frame).items() if head.fits(frame)]


def find_head(frame: Frame) -> str:
    """Return the name of the head in the settings, or of the only head that fits the outputs.

    With `task.head=auto`, if only `yolox` and `yolov5` fit, the result is `yolox`.

    Raises:
        ConfigError: the name is unknown.
        ModelError: the named head does not fit. With `auto`: none or several fit.
    """
    fitting = fitting_heads(frame)
    name = frame.config.head
    if name == "auto" and (len(fitting) == 1 or fitting == ["yolox", "yolov5"]):
        return fitting[0]  # outputs with a box for every cell are usually not decoded
    if name in fitting:
        return name
    if name not in ("auto", *HEADS):
        raise ConfigError(no_such_name("task.head", name, ["auto", *HEADS]))

    # Describe the outputs, because no head fits or several do
    context = f"{frame.classes} classes"
    if frame.keypoints:
        context += f", {frame.keypoints} keypoints"
    if frame.coefficients:
        context += f", {frame.coefficients} mask coefficients"
    context += f" and an input of {frame.height} x {frame.width}"
    returned = f"returns {describe(frame.outputs)}, with {context}"

    # Advise the heads that fit, or else list all that are possible
    if name != "auto":
        mend = "no other head fits"
        if fitting:
            mend = f"task.head={' or '.join(fitting)} fits"
        raise ModelError(f"{returned}: task.head={name} takes {HEADS[name].takes}; {mend}")
    if fitting:
        raise ModelError(f"{returned}: several heads fit; task.head takes {' | '.join(fitting)}")
    possible = [f"{key} ({head.takes})" for key, head in _possible_heads(frame).items()]
    raise ModelError(f"{returned}: no head fits; task.head takes {' | '.join(possible)}")


def corners(boxes: Array, written: str, frame: Frame) -> Floats:
    """Return boxes [..., 4] as left, top, right, bottom in pixels of the network's input.

    Args:
        boxes: in pixels, or in fractions of the input's size with `task.normalized`.
        written: the format of the boxes if `task.boxes` is null.
    """
    values = np.moveaxis(boxes.astype(np.float32), -1, 0)
    match frame.config.boxes or written:
        case "yxyx":
            top, left, bottom, right = values
        case "xywh":
            left, top, width, height = values
            right = left + width
            bottom = top + height
        case "cxcywh":
            x, y, width, height = values
            left = x - width / 2
            top = y - height / 2
            right = x + width / 2
            bottom = y + height / 2
        case _:  # "xyxy"
            left, top, right, bottom = values

    # Fractions of the input's size become pixels
    pixels = np.stack([left, top, right, bottom], axis=-1)
    if frame.config.normalized:
        pixels *= np.array([frame.width, frame.height] * 2, np.float32)
    return pixels


def _join(boxes: Floats, further: Array, frame: Frame) -> Floats:
    """Return boxes [..., 4] followed by further values [..., F], with keypoints in pixels."""
    values = further.astype(np.float32)
    if frame.config.normalized and frame.keypoints:
        values *= np.tile(np.array([frame.width, frame.height, 1], np.float32), frame.keypoints)
    return np.concatenate([boxes, values], axis=-1)


def _around(centres: Floats, sizes: Floats) -> Floats:
    """Return boxes [..., 4] with these centres [..., 2] and sizes [..., 2]."""
    return np.concatenate([centres - sizes / 2, centres + sizes / 2], axis=-1)


def _grid(rows: int, columns: int) -> Floats:
    """Return x and y of every cell [rows, columns, 2]."""
    y, x = np.mgrid[:rows, :columns].astype(np.float32)
    return np.stack([x, y], axis=-1)


def _sigmoid(values: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-values)), np.float32)


def _single(frame: Frame) -> Shape:
    """Return the shape of the only output, if it has two axes; empty for any other outputs."""
    if len(frame.shapes) != 1 or len(frame.shapes[0]) != 2:
        return ()
    return frame.shapes[0]


def _is_yolox(frame: Frame) -> bool:
    cells = sum(rows * columns for rows, columns in frame.maps)
    return _single(frame) == (cells, 5 + frame.classes)


def _decode_yolox(outputs: Sequence[Array], frame: Frame) -> Candidates:
    """Decode as `decode_outputs` of YOLOX (Ge et al., "YOLOX: Exceeding YOLO Series in 2021")."""
    # List the cells of all maps in the order of the boxes
    values = outputs[0].astype(np.float32)
    grids = []  # [cells, 2]
    strides = []  # [cells, 1]
    for stride, (rows, columns) in zip(frame.config.strides, frame.maps, strict=True):
        grids.append(_grid(rows, columns).reshape(-1, 2))
        strides.append(np.full((rows * columns, 1), stride, np.float32))

    # Centres are relative to cells, and sizes are logarithms
    cells = np.concatenate(grids)
    steps = np.concatenate(strides)
    centres = (values[..., :2] + cells) * steps
    sizes = np.exp(values[..., 2:4]) * steps
    boxes = _around(centres, sizes)
    return Candidates(boxes, values[..., 4:5] * values[..., 5:])


def _is_yolov3(frame: Frame) -> bool:
    anchors = frame.anchors
    if anchors is None or len(frame.shapes) != len(anchors):
        return False
    return all(map(partial(_is_map, frame, anchors.shape[1]), frame.shapes, frame.maps))


def _is_map(frame: Frame, anchors: int, shape: Shape, size: tuple[int, int]) -> bool:
    values = 5 + frame.classes
    return shape in ((*size, anchors * values), (anchors * values, *size), (anchors, *size, values))


def _decode_yolov3(outputs: Sequence[Array], frame: Frame) -> Candidates:
    """Decode one output for each stride (Redmon and Farhadi, see `COCO_ANCHORS`).

    The anchors are on a separate axis, or joined with the values on the first or last axis.
    """
    anchors = frame.anchors
    assert anchors is not None  # the head fits
    boxes = []
    scores = []
    for output, stride, size, sizes in zip(
        outputs, frame.config.strides, frame.maps, anchors.astype(np.float32), strict=True
    ):
        rows, columns = size

        # Bring the axes into the order rows, columns, anchors, values
        values = output.astype(np.float32)
        if values.shape[1:] == (len(sizes), *size, 5 + frame.classes):
            values = values.transpose(0, 2, 3, 1, 4)
        elif values.shape[2:] == size:
            values = values.transpose(0, 2, 3, 1)
        values = values.reshape(-1, rows, columns, len(sizes), 5 + frame.classes)

        # Decode boxes relative to cells and anchors
        cells = _grid(*size)[:, :, np.newaxis]
        centres = (_sigmoid(values[..., :2]) + cells) * stride
        decoded = _around(centres, np.exp(values[..., 2:4]) * sizes)
        count = len(values), rows * columns * len(sizes)
        boxes.append(decoded.reshape(*count, 4))
        chances = _sigmoid(values[..., 4:5]) * _sigmoid(values[..., 5:])
        scores.append(chances.reshape(*count, frame.classes))
    return Candidates(np.concatenate(boxes, axis=1), np.concatenate(scores, axis=1))


def _is_yolov5(frame: Frame) -> bool:
    return _single(frame)[1:] == (5 + frame.classes + frame.further,)


def _decode_yolov5(outputs: Sequence[Array], frame: Frame) -> Candidates:
    values = outputs[0].astype(np.float32)
    boxes, sure, scores, further = np.split(values, (4, 5, 5 + frame.classes), axis=-1)
    return Candidates(_join(corners(boxes, "cxcywh", frame), further, frame), sure * scores)


def _is_yolov8(frame: Frame) -> bool:
    return _single(frame)[:1] == (4 + frame.classes + frame.further,)


def _decode_yolov8(outputs: Sequence[Array], frame: Frame) -> Candidates:
    values = outputs[0].astype(np.float32).swapaxes(1, 2)
    boxes, scores, further = np.split(values, (4, 4 + frame.classes), axis=-1)
    return Candidates(_join(corners(boxes, "cxcywh", frame), further, frame), scores)


def _match(frame: Frame, *kinds: Callable[[Shape], bool]) -> list[int]:
    """Return the index of each kind's output; empty unless kinds and outputs match one to one."""
    if len(frame.shapes) != len(kinds):
        return []
    indices: list[int] = []
    for fits in kinds:
        fitting = [index for index, shape in enumerate(frame.shapes) if fits(shape)]
        if len(fitting) != 1:
            return []
        indices += fitting
    if len(set(indices)) < len(indices):  # one output fits two kinds
        return []
    return indices


def _is_boxes(shape: Shape) -> bool:
    return len(shape) == 2 and shape[1] == 4


def _find_ssd(frame: Frame) -> list[int]:
    shapes = frame.shapes
    if len(shapes) != 2 or shapes[0][:1] != shapes[1][:1]:
        return []
    if all(map(_is_boxes, shapes)) and frame.scored == 4:
        return [0, 1]  # boxes first, as usual
    return _match(frame, _is_boxes, lambda s: len(s) == 2 and s[1] == frame.scored != 4)


def _decode_ssd(outputs: Sequence[Array], frame: Frame) -> Candidates:
    box_index, score_index = _find_ssd(frame)
    boxes = outputs[box_index]
    scores = outputs[score_index].astype(np.float32)
    if frame.config.background is not None:
        scores = np.delete(scores, frame.config.background, axis=-1)
    return Candidates(corners(boxes, "xyxy", frame), scores)


def find_selected(frame: Frame) -> list[int]:
    """Return the indices of boxes, scores and their selection; empty for other outputs."""
    return _match(
        frame,
        _is_boxes,
        lambda s: len(s) == 2 and s[0] == frame.scored and s[1] != 3,
        lambda s: len(s) == 2 and s[1] == 3,
    )


def _decode_selected(outputs: Sequence[Array], frame: Frame) -> Detections:
    """Decode the output of ONNX's NonMaxSuppression: rows of picture, class and box index.

    Rows of the background are left out.
    """
    boxes, scores, selected = [outputs[index] for index in find_selected(frame)]
    rows = selected.reshape(-1, 3).astype(np.int64)
    rows = rows[(rows >= 0).all(axis=1)]

    # The classes behind the background move down by one
    background = frame.config.background
    if background is not None:
        rows = rows[rows[:, 1] != background]
    picture, index, box = rows.T
    label = index
    if background is not None:
        label = index - (index > background)
    selected_boxes = corners(boxes[picture, box], "yxyx", frame)
    kept = scores[picture, index, box].astype(np.float32)
    return Detections(picture, selected_boxes, kept, label)


def _find_detections(frame: Frame) -> list[int]:
    """Return the indices of boxes, scores, labels and, if there is one, a count of detections.

    The result is empty for other outputs.
    """
    # Sort the outputs by shape; a count is a single number
    boxes = []
    counts = []
    flat = []
    for index, (name, shape) in enumerate(frame.outputs.items()):
        if _is_boxes(shape):
            boxes.append(index)
        elif shape == () or (shape == (1,) and re.search("num|count|valid", name, re.I)):
            counts.append(index)
        elif len(shape) == 1:
            flat.append(index)
    if len(boxes) != 1 or len(flat) != 2 or len(counts) > 1:
        return []
    if len(frame.outputs) != 3 + len(counts):
        return []

    # Find by name which of the two are the scores
    scores = _find_named(frame, flat, "score|conf|prob")
    labels = _find_named(frame, flat, "label|class|cls|categ")
    if len(scores) == 1:
        labels = list(set(flat).difference(scores))
    elif len(labels) == 1:
        scores = list(set(flat).difference(labels))
    else:
        return []
    return [*boxes, *scores, *labels, *counts]


def _find_named(frame: Frame, indices: Sequence[int], pattern: str) -> list[int]:
    """Return the indices, out of `indices`, of outputs whose name contains a match of a pattern."""
    names = list(frame.outputs)
    return [index for index in indices if re.search(pattern, names[index], re.I)]


def _is_detections(frame: Frame) -> bool:
    if _single(frame)[1:] == (6 + frame.further,):
        return True
    return not frame.further and bool(_find_detections(frame))


def _decode_detections(outputs: Sequence[Array], frame: Frame) -> Detections:
    counts: Sequence[Array] = ()
    if len(outputs) == 1:
        rows = outputs[0]
        boxes = rows[..., :4]
        scores = rows[..., 4]
        labels = rows[..., 5]
        further = rows[..., 6:]
    else:
        boxes, scores, labels, *counts = [outputs[index] for index in _find_detections(frame)]
        further = boxes[..., 4:]  # none

    # Leave out empty rows and the background
    filled = np.ones(scores.shape, np.bool_)
    for count in counts:
        filled &= np.arange(scores.shape[1]) < count.reshape(-1, 1)
    label = labels.round().astype(np.int64)
    background = frame.config.background
    if background is not None:
        filled &= label != background
        if frame.config.labels == "indices":
            label = label - (label > background)
    pixels = _join(corners(boxes[filled], "xyxy", frame), further[filled], frame)
    kept = scores[filled].astype(np.float32)
    return Detections(np.nonzero(filled)[0], pixels, kept, label[filled])


HEADS = {
    "yolox": Head(
        "one output [cells of all strides, 5 + classes], undecoded", _is_yolox, _decode_yolox
    ),
    "yolov3": Head(
        "for each stride one output of anchors * (5 + classes) for each cell, undecoded",
        _is_yolov3,
        _decode_yolov3,
    ),
    "yolov5": Head(
        "one output [boxes, 5 + classes], decoded; keypoints or mask coefficients may follow",
        _is_yolov5,
        _decode_yolov5,
        further=True,
    ),
    "yolov8": Head(
        "one output [4 + classes, boxes], decoded; keypoints or mask coefficients may follow",
        _is_yolov8,
        _decode_yolov8,
        further=True,
    ),
    "ssd": Head(
        "boxes [boxes, 4], decoded, and scores [boxes, classes, perhaps a background]",
        lambda frame: bool(_find_ssd(frame)),
        _decode_ssd,
    ),
    "selected": Head(
        "boxes [boxes, 4], scores [classes, boxes] and the output of NonMaxSuppression [n, 3]",
        lambda frame: bool(find_selected(frame)),
        _decode_selected,
    ),
    "detections": Head(
        "boxes [n, 4], scores [n] and labels [n], or all in one output [n, 6], where keypoints or "
        "mask coefficients may follow",
        _is_detections,
        _decode_detections,
        further=True,
    ),
}
