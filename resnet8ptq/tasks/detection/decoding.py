"""From the outputs of a detector to detections: decoded, suppressed, the best of them kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import DetectionConfig
from resnet8ptq.tasks.contract import Array
from resnet8ptq.tasks.detection.heads import (
    HEADS,
    Candidates,
    Floats,
    Found,
    Frame,
    Shape,
    find_head,
)
from resnet8ptq.tasks.detection.suppression import suppress

NOTHING = -1.0  # the class of a row that holds no detection


def make_decoder(
    config: DetectionConfig,
    input_shape: tuple[int, ...],
    outputs: Mapping[str, Shape],
    class_ids: tuple[int, ...],
) -> "Decoder":
    """Return the decoder of a network.

    Args:
        input_shape: of one picture, channels first or last.
        outputs: see `heads.Frame`.

    Raises:
        ConfigError, ModelError: see `heads.find_head`.
    """
    first = input_shape[0] in (1, 3)
    height, width = input_shape[1:] if first else input_shape[:2]
    frame = Frame(height, width, len(class_ids), outputs, config)
    return Decoder(find_head(frame), frame, class_ids)


@dataclass(frozen=True)
class Decoder:
    """Makes detections of a batch's outputs.

    Attributes:
        head: of `HEADS`.
        frame: see `heads.Frame`.
        class_ids: the categories' ids, in the order of the classes.
    """

    head: str
    frame: Frame
    class_ids: tuple[int, ...]

    def __call__(self, outputs: Sequence[Array]) -> tuple[Floats]:
        """Return detections [n, max_detections, 6], the highest scores first.

        Each is left, top, right and bottom in pixels of the network's input, score and class; of
        rows without a detection the class is `NOTHING`.

        Args:
            outputs: of the network [n, ...].
        """
        config = self.frame.config
        found = HEADS[self.head].decode(outputs, self.frame)
        if isinstance(found, Candidates):
            suppressed = config.nms is not False
            found = suppress(found, config) if suppressed else _above_threshold(found, config)
        else:
            found = self._check_labels(found)
            if config.nms:
                found = suppress(
                    _as_candidates(found, len(outputs[0]), len(self.class_ids)), config
                )
        return (_keep_best(found, len(outputs[0]), config),)

    def _check_labels(self, found: Found) -> Found:
        """Return the detections of classes that the data set has, by their place."""
        labels = found.labels
        if self.frame.config.labels == "ids":
            ids = np.array(self.class_ids)
            order = np.argsort(ids)
            places = np.searchsorted(ids, labels, sorter=order).clip(max=len(ids) - 1)
            labels = np.where(ids[order][places] == labels, order[places], -1)
        known = (labels >= 0) & (labels < len(self.class_ids))
        return Found(found.picture[known], found.boxes[known], found.scores[known], labels[known])


def _above_threshold(candidates: Candidates, config: DetectionConfig) -> Found:
    picture, box, label = np.nonzero(candidates.scores > config.score_threshold)
    return Found(
        picture, candidates.boxes[picture, box], candidates.scores[picture, box, label], label
    )


def _as_candidates(found: Found, pictures: int, classes: int) -> Candidates:
    """Return detections as boxes and scores: each has a score for its own class alone."""
    order = np.argsort(found.picture, kind="stable")
    row = _number(found.picture[order])
    boxes = np.zeros((pictures, row.max(initial=-1) + 1, 4), np.float32)
    scores = np.zeros((*boxes.shape[:2], classes), np.float32)
    boxes[found.picture[order], row] = found.boxes[order]
    scores[found.picture[order], row, found.labels[order]] = found.scores[order]
    return Candidates(boxes, scores)


def _keep_best(found: Found, pictures: int, config: DetectionConfig) -> Floats:
    """Return the highest scores of each picture, as `Decoder` has them."""
    most = config.max_detections
    kept = found.scores > config.score_threshold
    picture, scores = found.picture[kept], found.scores[kept]
    order = np.lexsort((-scores, picture))  # stable: of equal scores the first
    row = _number(picture[order])
    order, row = order[row < most], row[row < most]
    best = np.zeros((pictures, most, 6), np.float32)
    best[..., 5] = NOTHING
    values = np.column_stack([found.boxes[kept], scores, found.labels[kept]])
    best[picture[order], row] = values[order]
    return best


def _number(pictures: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the place of each detection among those of its picture, [D]; given sorted [D]."""
    return np.arange(len(pictures)) - np.searchsorted(pictures, pictures)


def count(detections: Array) -> NDArray[np.int64]:
    """Return how many detections each picture has, [n]."""
    return np.asarray((detections[..., 5] != NOTHING).sum(axis=1))
