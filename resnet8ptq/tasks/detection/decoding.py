"""Turns a detector's outputs into detections: decodes, suppresses, keeps the best."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import DetectionConfig
from resnet8ptq.tasks.detection.heads import (
    HEADS,
    Candidates,
    Detections,
    Floats,
    Frame,
    Shape,
    find_head,
)
from resnet8ptq.tasks.detection.suppression import suppress
from resnet8ptq.tasks.scoring.outputs import Array

NOTHING = -1.0  # the class of a row that holds no detection


def make_decoder(
    config: DetectionConfig,
    input_shape: tuple[int, ...],
    outputs: Mapping[str, Shape],
    class_ids: tuple[int, ...],
    keypoints: int = 0,
) -> "Decoder":
    """Return the decoder of a network.

    Args:
        input_shape: shape of one picture, channels first or last.
        keypoints: number of keypoints of an object.
    """
    first = input_shape[0] in (1, 3)
    height, width = input_shape[1:] if first else input_shape[:2]
    frame = Frame(height, width, len(class_ids), outputs, config, keypoints)
    return Decoder(find_head(frame), frame, class_ids)


@dataclass(frozen=True)
class Decoder:
    """Turns a batch's outputs into detections.

    Attributes:
        head: a key of `HEADS`.
        class_ids: the categories' ids, in the order of the classes.
    """

    head: str
    frame: Frame
    class_ids: tuple[int, ...]

    def __call__(self, outputs: Sequence[Array]) -> tuple[Floats]:
        """Return detections [n, max_detections, 6 + 3 * K], the highest scores first.

        Each row has left, top, right and bottom in pixels of the network's input, score, class, and
        x, y and visibility of each keypoint. Rows without a detection have the class `NOTHING`.
        """
        config = self.frame.config
        pictures = len(outputs[0])
        decoded = HEADS[self.head].decode(outputs, self.frame)
        if isinstance(decoded, Candidates):
            choose = _above_threshold if config.nms is False else suppress
            detections = choose(decoded, config)
        else:
            detections = self._select_classes(decoded)
            if config.nms:
                candidates = _as_candidates(detections, pictures, len(self.class_ids))
                detections = suppress(candidates, config)
        return (_keep_best(detections, pictures, config),)

    def _select_classes(self, detections: Detections) -> Detections:
        """Return the detections of the data set's classes, with class indices as labels."""
        labels = detections.labels
        if self.frame.config.labels == "ids":
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
    """Return the detections with the highest scores of each picture, see `Decoder.__call__`."""
    most = config.max_detections
    kept = detections.select(detections.scores > config.score_threshold)
    kept = kept.select(np.lexsort((-kept.scores, kept.picture)))  # stable: of equals the first
    row = _number(kept.picture)
    kept = kept.select(row < most)
    row = row[row < most]
    boxes, points = kept.boxes[:, :4], kept.boxes[:, 4:]
    best = np.zeros((pictures, most, 6 + points.shape[1]), np.float32)
    best[..., 5] = NOTHING
    best[kept.picture, row] = np.column_stack([boxes, kept.scores, kept.labels, points])
    return best


def _number(pictures: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each detection's index within its picture [D], from sorted picture indices [D]."""
    return np.arange(len(pictures)) - np.searchsorted(pictures, pictures)


def count(detections: Array) -> NDArray[np.int64]:
    """Return the number of detections of each picture [n]."""
    return np.asarray((detections[..., 5] != NOTHING).sum(axis=1))
