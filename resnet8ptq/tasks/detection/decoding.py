"""From the outputs of a detector to detections: decoded, suppressed, the best of them kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from resnet8ptq.config.schema import DetectionConfig
from resnet8ptq.tasks.contract import Array
from resnet8ptq.tasks.detection.heads import HEADS, Candidates, Floats, Found, Frame

NOTHING = -1.0  # the class of a row that holds no detection


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


def suppress(candidates: Candidates, config: DetectionConfig) -> Found:
    """Suppress for each class what overlaps a higher score, by ONNX Runtime's NonMaxSuppression."""
    scores = np.ascontiguousarray(candidates.scores.swapaxes(1, 2))
    run = _suppression(config.max_detections, config.iou_threshold, config.score_threshold)
    [selected] = run.run(None, {"boxes": candidates.boxes, "scores": scores})
    picture, label, box = selected.T
    return Found(picture, candidates.boxes[picture, box], scores[picture, label, box], label)


def _above_threshold(candidates: Candidates, config: DetectionConfig) -> Found:
    picture, box, label = np.nonzero(candidates.scores > config.score_threshold)
    return Found(
        picture, candidates.boxes[picture, box], candidates.scores[picture, box, label], label
    )


def _as_candidates(found: Found, pictures: int, classes: int) -> Candidates:
    """Return detections as boxes and scores: each has a score for its own class alone."""
    counts = np.bincount(found.picture, minlength=pictures)
    order = np.argsort(found.picture, kind="stable")
    row = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    boxes = np.zeros((pictures, counts.max(initial=0), 4), np.float32)
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
    counts = np.bincount(picture, minlength=pictures)
    row = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    order, row = order[row < most], row[row < most]
    best = np.zeros((pictures, most, 6), np.float32)
    best[..., 5] = NOTHING
    values = np.column_stack([found.boxes[kept], scores, found.labels[kept]])
    best[picture[order], row] = values[order]
    return best


@cache
def _suppression(most: int, iou: float, score: float) -> onnxruntime.InferenceSession:
    """Return a session of the one operator; boxes may name their corners in either order."""
    boxes = helper.make_tensor_value_info("boxes", TensorProto.FLOAT, [None, None, 4])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, [None, None, None])
    selected = helper.make_tensor_value_info("selected", TensorProto.INT64, [None, 3])
    settings = (("most", TensorProto.INT64, most), ("iou", 1, iou), ("score", 1, score))
    constants = [helper.make_tensor(name, kind, [1], [value]) for name, kind, value in settings]
    names = ["boxes", "scores", *(name for name, _, _ in settings)]
    node = helper.make_node("NonMaxSuppression", names, ["selected"])
    graph = helper.make_graph([node], "suppression", [boxes, scores], [selected], constants)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(proto)
    return onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )


def count(detections: Array) -> NDArray[np.int64]:
    """Return how many detections each picture has, [n]."""
    return np.asarray((detections[..., 5] != NOTHING).sum(axis=1))
