"""Decodes a detector's outputs, suppresses overlapping boxes, and keeps the best detections."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import DetectionConfig
from resnet8ptq.core import masks
from resnet8ptq.core.errors import ModelError
from resnet8ptq.tasks.detection.heads import (
    HEADS,
    Candidates,
    Detections,
    Floats,
    Frame,
    Shape,
    find_head,
    find_selected,
    fitting_heads,
)
from resnet8ptq.tasks.detection.suppression import suppress
from resnet8ptq.tasks.scoring.outputs import Array, describe, has_prototypes

NOTHING = -1.0  # the class of a row that holds no detection


def make_decoder(
    config: DetectionConfig,
    input_shape: tuple[int, ...],
    outputs: Mapping[str, Shape],
    class_ids: tuple[int, ...],
    keypoints: int = 0,
    with_masks: bool = False,
) -> "Decoder":
    """Return the decoder of a network.

    Args:
        input_shape: the shape of one picture, with 1 or 3 channels first, or channels last.
        outputs: the shape of each output by name, without the batch axis.
        keypoints: the number of keypoints of an object.
        with_masks: whether to decode masks; otherwise, the network's masks are left out.

    Raises:
        ConfigError: `task.head` is unknown.
        ModelError: see `find_head`; or there are no prototypes for masks.
    """
    height, width = input_shape[:2]
    if input_shape[0] in (1, 3):  # channels first
        height, width = input_shape[1:]
    frame = Frame(height, width, len(class_ids), outputs, config, keypoints)
    frame, prototypes = _split_prototypes(frame)
    if with_masks and prototypes is None:
        raise ModelError(
            f"returns {describe(outputs)}, with {len(class_ids)} classes: expected boxes with "
            "the coefficients of their masks, and prototypes [coefficients, rows, columns]; "
            "task=detection scores boxes alone"
        )
    return Decoder(find_head(frame), frame, class_ids, prototypes, with_masks)


def _split_prototypes(frame: Frame) -> "tuple[Frame, Prototypes | None]":
    """Return the frame of the boxes alone, with the coefficients of masks, and the prototypes.

    Without prototypes, the result is the same frame and None. The maps of prototypes must have the
    aspect ratio of the network's input, and a head must fit the boxes with their coefficients.
    """
    if not has_prototypes(frame.outputs):
        return frame, None
    index = [len(shape) for shape in frame.outputs.values()].index(3)
    shape = list(frame.outputs.values())[index]
    rows = {name: sizes for name, sizes in frame.outputs.items() if len(sizes) == 2}

    # Try the coefficients as first and as last axis
    for first, coefficients, (high, wide) in (
        (True, shape[0], shape[1:]),
        (False, shape[2], shape[:2]),
    ):
        if not (coefficients and high and wide) or high * frame.width != wide * frame.height:
            continue
        alone = replace(frame, outputs=rows, coefficients=coefficients)
        if fitting_heads(alone):
            return alone, Prototypes(index, first)
    return frame, None


@dataclass(frozen=True)
class Prototypes:
    """The output with prototypes of masks.

    The logits of a mask are the sum of the prototypes, weighted by the coefficients of a box (Bolya
    et al., "YOLACT: Real-time Instance Segmentation", ICCV 2019).

    Attributes:
        index: the index of the output.
        channels_first: whether a picture's output is [coefficients, rows, columns], instead of
            [rows, columns, coefficients].
    """

    index: int
    channels_first: bool

    def masks(self, maps: Array, rows: Floats, frame: Frame) -> bytes:
        """Return the masks of one picture's detections as one text, see `core.masks`.

        The masks have the size of the network's input, to which bilinear interpolation resizes the
        weighted sum. A pixel in the box belongs to the object if the sigmoid of its value is above
        0.5.

        Args:
            maps: the output for this picture.
            rows: left, top, right, bottom and the coefficients of each detection [D, 4 + F].
        """
        if not self.channels_first:
            maps = np.moveaxis(maps, 2, 0)
        high, wide = maps.shape[1:]
        size = np.array([frame.width, frame.height] * 2)
        texts = []
        for row in rows:
            # The pixels whose indices are in the box
            edges = np.ceil(np.nan_to_num(row[:4])).clip(0, size)
            left, top, right, bottom = edges.astype(int).tolist()
            y = (np.arange(top, bottom) + 0.5) * high / frame.height - 0.5
            x = (np.arange(left, right) + 0.5) * wide / frame.width - 0.5
            # Use only the part of the maps that the box needs
            above, below = _find_ends(y)
            before, behind = _find_ends(x)
            part = maps[:, above:below, before:behind].astype(np.float32)
            logits = np.tensordot(row[4:], part, 1)
            inside = masks.sample(logits, y - above, x - before) > 0
            texts.append(masks.encode(inside, top, left, frame.height, frame.width))
        return masks.join(texts)


def _find_ends(positions: NDArray[np.floating]) -> tuple[int, int]:
    """Return start and stop of the indices that interpolation at ascending positions needs."""
    if not positions.size:
        return 0, 1
    return max(0, math.floor(positions[0])), math.ceil(positions[-1]) + 1


@dataclass(frozen=True)
class Decoder:
    """Turns a batch's outputs into detections.

    Attributes:
        head: a key of `HEADS`.
        frame: the network's input and outputs, without the prototypes.
        class_ids: the ids of the classes in the annotations, in the order of the classes.
        prototypes: the prototypes of masks; None if the network returns none.
        with_masks: whether to decode the masks.
    """

    head: str
    frame: Frame
    class_ids: tuple[int, ...]
    prototypes: Prototypes | None = None
    with_masks: bool = False

    def __call__(self, outputs: Sequence[Array], inputs: Array | None = None) -> tuple[Array, ...]:
        """Return detections [n, max_detections, 6 + 3 * K] and, with `with_masks`, masks [n].

        Each row has left, top, right and bottom in pixels of the network's input, score, class, and
        x, y and visibility of each of K keypoints. The highest scores come first. Rows without a
        detection have the class `NOTHING`. The masks of one picture are one text, see
        `Prototypes.masks`.
        """
        config = self.frame.config
        rows = list(outputs)
        if self.prototypes is not None:
            del rows[self.prototypes.index]
        pictures = len(rows[0])
        if self.head == "selected":  # a selection has a row for each box, and may be the first
            pictures = len(rows[find_selected(self.frame)[0]])
        decoded = HEADS[self.head].decode(rows, self.frame)

        # Suppress overlapping boxes, unless the network has done it
        if isinstance(decoded, Candidates) and config.nms is False:
            detections = _above_threshold(decoded, config)
        elif isinstance(decoded, Candidates):
            detections = suppress(decoded, config)
        else:
            detections = self._select_classes(decoded)
            if config.nms:
                candidates = _as_candidates(detections, pictures, len(self.class_ids))
                detections = suppress(candidates, config)
        best = _keep_best(detections, pictures, config)

        # Further values are keypoints, or coefficients of masks
        if self.prototypes is None:
            return (best,)
        alone = best[..., :6]
        if not self.with_masks:
            return (alone,)
        texts = []
        counts = count(best)
        for picture, maps in enumerate(outputs[self.prototypes.index]):
            detected = best[picture, : counts[picture]]
            without_class = np.delete(detected, (4, 5), axis=1)  # keeps boxes and coefficients
            texts.append(self.prototypes.masks(maps, without_class, self.frame))
        return alone, np.array(texts, np.bytes_)

    def _select_classes(self, detections: Detections) -> Detections:
        """Return the detections of the data set's classes, with class indices as labels."""
        # Labels may be the ids of the annotations; a selection has indices of scores
        labels = detections.labels
        if self.frame.config.labels == "ids" and self.head != "selected":
            ids = np.array(self.class_ids)
            order = np.argsort(ids)
            index = order[np.searchsorted(ids, labels, sorter=order).clip(max=len(ids) - 1)]
            labels = np.where(ids[index] == labels, index, -1)
        return replace(detections, labels=labels).select(
            (labels >= 0) & (labels < len(self.class_ids))
        )


def _above_threshold(candidates: Candidates, config: DetectionConfig) -> Detections:
    picture, box, label = np.nonzero(candidates.scores > config.score_threshold)
    return Detections(
        picture, candidates.boxes[picture, box], candidates.scores[picture, box, label], label
    )


def _as_candidates(detections: Detections, pictures: int, classes: int) -> Candidates:
    """Return detections as boxes with a score for their class and 0 for all others."""
    ordered = detections.select(np.argsort(detections.picture, kind="stable"))
    row = _number(ordered.picture)
    values = ordered.boxes.shape[1]
    boxes = np.zeros((pictures, row.max(initial=-1) + 1, values), np.float32)
    scores = np.zeros((*boxes.shape[:2], classes), np.float32)
    boxes[ordered.picture, row] = ordered.boxes
    scores[ordered.picture, row, ordered.labels] = ordered.scores
    return Candidates(boxes, scores)


def _keep_best(detections: Detections, pictures: int, config: DetectionConfig) -> Floats:
    """Return each picture's detections with the highest scores [n, max_detections, 6 + F].

    The first 6 values of a row are those of `Decoder.__call__`. Detections with a score at or below
    the threshold are left out.
    """
    most = config.max_detections
    kept = detections.select(detections.scores > config.score_threshold)
    # Stable, so the first of equals stays
    kept = kept.select(np.lexsort((-kept.scores, kept.picture)))
    row = _number(kept.picture)
    kept = kept.select(row < most)
    row = row[row < most]
    boxes = kept.boxes[:, :4]
    points = kept.boxes[:, 4:]
    best = np.zeros((pictures, most, 6 + points.shape[1]), np.float32)
    best[..., 5] = NOTHING
    best[kept.picture, row] = np.column_stack([boxes, kept.scores, kept.labels, points])
    return best


def _number(pictures: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each detection's index within its picture [D], from sorted picture indices [D]."""
    return np.arange(len(pictures)) - np.searchsorted(pictures, pictures)


def count(detections: Array) -> NDArray[np.int64]:
    """Return the number of detections [...] in rows [..., most, values]."""
    return np.asarray((detections[..., 5] != NOTHING).sum(axis=-1))
