"""The scored detections of a model."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.core.console import waiting
from resnet8ptq.tasks.detection import ap_bootstrap, average_precision, decoding
from resnet8ptq.tasks.scoring.classwise import ClasswiseScores, draw_weights
from resnet8ptq.tasks.scoring.metric import Metrics
from resnet8ptq.tasks.scoring.outputs import Array, Outputs
from resnet8ptq.tasks.scoring.statistics import Values


@dataclass(frozen=True)
class DetectionScores(ClasswiseScores):
    """The detections of a model, evaluated as COCO does.

    Attributes:
        outputs: detections [n, most, 6 + 3 * K], see `decoding.Decoder`.
        pictures: [n] records, see `data.boxes`.
        class_ids: category ids of the annotations, in the order of the classes.
        sigmas: the constant of each of the K keypoints in the OKS; (): boxes are scored by IoU.
    """

    outputs: Outputs
    pictures: Array
    class_ids: tuple[int, ...]
    resamples: int
    show: Callable[[NDArray[np.int64]], NDArray[np.uint8]] | None = None
    sigmas: tuple[float, ...] = ()

    @property
    def similarity(self) -> str:
        """By what a detection is right."""
        return "OKS" if self.sigmas else "IoU"

    @property
    def total(self) -> int:
        """Number of pictures."""
        return len(self.pictures)

    @cached_property
    def results(self) -> list[dict[str, Any]]:
        """The detections in COCO's results format, in pixels of the pictures."""
        detections = self.outputs.values[0].astype(np.float64)
        counts = decoding.count(detections)
        key = "keypoints" if self.sigmas else "bbox"
        scale, offset = (
            self.pictures[name][:, np.newaxis, np.newaxis] for name in ("scale", "offset")
        )
        if self.sigmas:
            points = detections[..., 6:].reshape(*detections.shape[:2], len(self.sigmas), 3)
            points[..., :2] = (points[..., :2] - offset) / scale
            found = points.reshape(*detections.shape[:2], 3 * len(self.sigmas))
        else:
            corners = detections[..., :4].reshape(*detections.shape[:2], 2, 2)
            found = ((corners - offset) / scale).reshape(*detections.shape[:2], 4)
            found[..., 2:] -= found[..., :2]
        return [
            {
                "image_id": int(self.pictures["image_id"][picture]),
                "category_id": self.class_ids[int(label)],
                key: values,
                "score": score,
            }
            for picture, count in enumerate(counts)
            for (score, label), values in zip(
                detections[picture, :count, 4:6].tolist(),
                found[picture, :count].tolist(),
                strict=True,
            )
        ]

    @cached_property
    def evaluation(self) -> average_precision.Evaluation:
        """COCO's evaluation of all pictures."""
        annotations = to_coco(self.pictures, self.class_ids)
        return average_precision.evaluate(self.results, annotations, self.sigmas)

    @property
    def value(self) -> float:
        """AP."""
        return self.evaluation.metrics["ap"]

    @property
    def of_class(self) -> Values:
        """AP of each class [classes]."""
        return self.evaluation.by_class

    @cached_property
    def by_class(self) -> Values:
        """AP of each class on each bootstrap sample [resamples, classes]."""
        with waiting(f"AP of {self.resamples} bootstrap samples"):
            weights = draw_weights(self.total, self.resamples)
            return ap_bootstrap.by_class(self.evaluation.matches, weights)

    @property
    def pictures_of_class(self) -> NDArray[np.int64]:
        """Number of pictures with objects of each class [classes]."""
        return np.array([np.count_nonzero(m.objects) for m in self.evaluation.matches])

    def more(self) -> Metrics:
        """Return COCO's other metrics, and the number of detections."""
        others = {name: value for name, value in self.evaluation.metrics.items() if name != "ap"}
        defined = {name: None if math.isnan(value) else value for name, value in others.items()}
        return {**defined, "counts/detections": len(self.results)}


def to_coco(pictures: Array, class_ids: Sequence[int]) -> dict[str, Any]:
    """Return the annotations of pictures [n], given as records of `data.boxes`."""
    annotations = [
        {
            "image_id": int(record["image_id"]),
            "category_id": class_ids[box["category"]],
            "bbox": box["bbox"].tolist(),
            "area": float(box["area"]),
            "iscrowd": int(box["crowd"]),
            **(_keypoints(box["keypoints"]) if "keypoints" in box.dtype.names else {}),
        }
        for record in pictures
        for box in record["boxes"][: record["count"]]
    ]
    images = [{"id": int(image_id)} for image_id in pictures["image_id"]]
    categories = [{"id": class_id} for class_id in class_ids]
    return {"images": images, "annotations": annotations, "categories": categories}


def _keypoints(points: Array) -> dict[str, Any]:
    """Return the keypoints [3 * K] of an object with their number, in COCO's format."""
    return {"keypoints": points.tolist(), "num_keypoints": int(np.count_nonzero(points[2::3] > 0))}
