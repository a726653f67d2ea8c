"""The detections of a model and their scores by COCO's evaluation."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.core import masks
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
        outputs: detections [n, most, 6 + 3 * K], and perhaps masks [n], see `decoding.Decoder`.
        pictures: [n] records, see `data.boxes`.
        class_ids: the ids of the classes in the annotations, in the order of the classes.
        show: see `Targets.pictures`.
        sigmas: the constant of each of the K keypoints in the OKS; empty if masks or boxes are
            scored, by IoU.
        input_size: height and width of the network's input, for masks.
    """

    outputs: Outputs
    pictures: Array
    class_ids: tuple[int, ...]
    resamples: int
    show: Callable[[NDArray[np.int64]], NDArray[np.uint8]] | None = None
    sigmas: tuple[float, ...] = ()
    input_size: tuple[int, int] = (0, 0)

    @property
    def kind(self) -> str:
        """The name of COCO's evaluation: `keypoints`, `segm` or `bbox`."""
        if self.sigmas:
            return "keypoints"
        if len(self.outputs.values) > 1:
            return "segm"
        return "bbox"

    @property
    def similarity(self) -> str:
        """The name of the measure that decides whether a detection is right."""
        return {"keypoints": "OKS", "segm": "IoU of masks", "bbox": "IoU"}[self.kind]

    @property
    def total(self) -> int:
        """The number of pictures."""
        return len(self.pictures)

    @cached_property
    def results(self) -> list[dict[str, Any]]:
        """The detections in COCO's results format, in pixels of the pictures."""
        detections = self.outputs.values[0].astype(np.float64)
        key = {"keypoints": "keypoints", "segm": "segmentation", "bbox": "bbox"}[self.kind]
        positions: list[Any]  # the positions of the detections of each picture
        if self.kind == "segm":
            positions = [self._masks(picture) for picture in range(self.total)]
        else:
            positions = self._positions(detections).tolist()

        # List the detections of each picture
        results = []
        for picture, count in enumerate(decoding.count(detections)):
            image_id = int(self.pictures["image_id"][picture])
            scores = detections[picture, :count, 4:6].tolist()
            for (score, label), values in zip(scores, positions[picture][:count], strict=True):
                results.append(
                    {
                        "image_id": image_id,
                        "category_id": self.class_ids[int(label)],
                        key: values,
                        "score": score,
                    }
                )
        return results

    def _positions(self, detections: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the keypoints, or the boxes as left, top, width and height [n, most, values].

        Positions in the network's input become pixels of the pictures.
        """
        scale = self.pictures["scale"][:, np.newaxis, np.newaxis]
        offset = self.pictures["offset"][:, np.newaxis, np.newaxis]
        shape = detections.shape[:2]

        # Keypoints have x, y and visibility
        if self.sigmas:
            points = detections[..., 6:].reshape(*shape, len(self.sigmas), 3)
            points[..., :2] = (points[..., :2] - offset) / scale
            return points.reshape(*shape, 3 * len(self.sigmas))
        corners = detections[..., :4].reshape(*shape, 2, 2)
        boxes = ((corners - offset) / scale).reshape(*shape, 4)
        boxes[..., 2:] -= boxes[..., :2]
        return np.asarray(boxes)

    def masks_in_input(self, picture: int) -> list[bytes]:
        """Return the masks of a picture's detections, in the size of the network's input."""
        number = int(decoding.count(self.outputs.values[0][picture]))
        return masks.split(self.outputs.values[1][picture], number)

    def _masks(self, picture: int) -> list[dict[str, Any]]:
        """Return the masks of a picture's detections in pixels of the picture, in COCO's format."""
        record = self.pictures[picture]
        size = (int(record["height"]), int(record["width"]))
        moved = []
        for text in self.masks_in_input(picture):
            mask = masks.move(text, self.input_size, record["scale"], record["offset"], size)
            moved.append(masks.to_coco(mask, *size))
        return moved

    @cached_property
    def evaluation(self) -> average_precision.CocoResult:
        """COCO's evaluation of all pictures."""
        annotations = to_coco(self.pictures, self.class_ids, with_masks=self.kind == "segm")
        return average_precision.evaluate(self.results, annotations, self.kind, self.sigmas)

    @property
    def value(self) -> float:
        """The AP, the mean over the classes with objects."""
        return self.evaluation.metrics["ap"]

    @property
    def of_class(self) -> Values:
        """AP of each class [classes]; NaN without objects."""
        return self.evaluation.by_class

    @cached_property
    def by_class(self) -> Values:
        """AP of each class on each bootstrap sample [resamples, classes]; NaN without objects."""
        with waiting(f"AP of {self.resamples} bootstrap samples"):
            weights = draw_weights(self.total, self.resamples)
            return ap_bootstrap.by_class(self.evaluation.matches, weights)

    @property
    def samples_of_class(self) -> NDArray[np.int64]:
        """The number of pictures with objects of each class that count [classes]; see `Matches`."""
        return np.array([np.count_nonzero(m.objects) for m in self.evaluation.matches])

    def more(self) -> Metrics:
        """Return COCO's metrics besides AP, and the number of detections.

        A metric is None if no object counts for it.
        """
        metrics: Metrics = {}
        for name, value in self.evaluation.metrics.items():
            if name != "ap":
                metrics[name] = None if math.isnan(value) else value
        metrics["counts/detections"] = len(self.results)
        return metrics


def to_coco(pictures: Array, class_ids: Sequence[int], with_masks: bool = False) -> dict[str, Any]:
    """Return the annotations of pictures [n] in COCO's format, from records of `data.boxes`.

    With masks, an object without a mask becomes a crowd that fills its box. The object then does
    not count, and a detection that matches only this crowd does not count either.
    """
    images = []
    annotations = []
    for record in pictures:
        image_id = int(record["image_id"])
        size = (int(record["height"]), int(record["width"]))
        images.append({"id": image_id, "height": size[0], "width": size[1]})

        # List the objects; those without a mask become crowds
        count = int(record["count"])
        texts = masks.of_record(record) if with_masks else []
        for number, box in enumerate(record["boxes"][:count]):
            annotation: dict[str, Any] = {
                "image_id": image_id,
                "category_id": class_ids[box["category"]],
                "bbox": box["bbox"].tolist(),
                "area": float(box["area"]),
                "iscrowd": int(box["crowd"]),
            }
            if "keypoints" in box.dtype.names:
                annotation |= _keypoints(box["keypoints"])
            if texts:  # an object without a mask has an empty text
                mask = texts[number] or masks.of_box(box["bbox"], *size)
                annotation["segmentation"] = masks.to_coco(mask, *size)
                annotation["iscrowd"] |= not texts[number]
            annotations.append(annotation)
    categories = [{"id": class_id} for class_id in class_ids]
    return {"images": images, "annotations": annotations, "categories": categories}


def _keypoints(points: Array) -> dict[str, Any]:
    """Return the keypoints [3 * K] of an object, and how many are labelled, in COCO's format."""
    return {"keypoints": points.tolist(), "num_keypoints": int(np.count_nonzero(points[2::3] > 0))}
