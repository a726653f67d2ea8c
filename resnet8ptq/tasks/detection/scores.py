"""The scored detections of a model, and the change of each class between two models."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr  # scipy.stats takes a second to import

from resnet8ptq.core.console import waiting
from resnet8ptq.tasks import distortion
from resnet8ptq.tasks.bootstrap import Replicates
from resnet8ptq.tasks.comparison import Scores
from resnet8ptq.tasks.detection import ap_bootstrap, average_precision, decoding
from resnet8ptq.tasks.metric import Metrics
from resnet8ptq.tasks.outputs import Array, Outputs
from resnet8ptq.tasks.statistics import SIGNIFICANCE, Values, holm

ENOUGH = 10  # pictures with a class, at least, for a test of the class


@dataclass(frozen=True)
class DetectionScores(Scores):
    """The detections of a model, evaluated as COCO does.

    Attributes:
        outputs: detections [n, most, 6], see `decoding.Decoder`.
        pictures: [n] records, see `data.boxes`.
        class_ids: category ids of the annotations, in the order of the classes.
    """

    outputs: Outputs
    pictures: Array
    class_ids: tuple[int, ...]
    resamples: int
    show: Callable[[NDArray[np.int64]], NDArray[np.uint8]] | None = None

    @property
    def total(self) -> int:
        """Number of pictures."""
        return len(self.pictures)

    @cached_property
    def results(self) -> list[dict[str, Any]]:
        """The detections in COCO's results format, in pixels of the pictures."""
        detections = self.outputs.values[0].astype(np.float64)
        scale, offset = (
            np.tile(self.pictures[name], 2)[:, np.newaxis] for name in ("scale", "offset")
        )
        boxes = (detections[..., :4] - offset) / scale
        boxes[..., 2:] -= boxes[..., :2]
        counts = decoding.count(detections)
        return [
            {
                "image_id": int(self.pictures["image_id"][picture]),
                "category_id": self.class_ids[int(label)],
                "bbox": box,
                "score": score,
            }
            for picture, count in enumerate(counts)
            for (*_, score, label), box in zip(
                detections[picture, :count].tolist(), boxes[picture, :count].tolist(), strict=True
            )
        ]

    @cached_property
    def evaluation(self) -> average_precision.Evaluation:
        """COCO's evaluation of all pictures."""
        return average_precision.evaluate(self.results, to_coco(self.pictures, self.class_ids))

    @property
    def value(self) -> float:
        """AP."""
        return self.evaluation.metrics["ap"]

    @cached_property
    def by_class(self) -> Values:
        """AP of each class on each bootstrap sample [resamples, classes]."""
        with waiting(f"AP of {self.resamples} bootstrap samples"):
            weights = ap_bootstrap.draw(self.total, self.resamples)
            return ap_bootstrap.by_class(self.evaluation.matches, weights)

    @property
    def pictures_of_class(self) -> NDArray[np.int64]:
        """Number of pictures with objects of each class [classes]."""
        return np.array([np.count_nonzero(m.objects) for m in self.evaluation.matches])

    @cached_property
    def per_sample(self) -> Replicates:
        """AP of each bootstrap sample [resamples], shifted so that their mean is AP.

        A bootstrap sample has fewer distinct pictures, which raises AP.
        """
        replicates = ap_bootstrap.mean_of(self.by_class)
        return Replicates(np.asarray(replicates - np.nanmean(replicates) + self.value))

    def sqnr_db(self, baseline: Self) -> float | None:
        """Return the SQNR of the network's outputs on the first pictures, in dB."""
        ours = self.outputs.raw
        theirs = baseline.outputs.raw
        return distortion.sqnr_db(theirs, ours) if self.is_comparable(baseline) else None

    def is_comparable(self, baseline: Self) -> bool:
        """Return whether the network's outputs were kept, for the same pictures."""
        ours = self.outputs.raw
        theirs = baseline.outputs.raw
        shapes = [values.shape for values in ours]
        return bool(ours) and shapes == [values.shape for values in theirs]

    def more(self) -> Metrics:
        """Return COCO's other metrics, and the number of detections."""
        others = {name: value for name, value in self.evaluation.metrics.items() if name != "ap"}
        defined = {name: None if math.isnan(value) else value for name, value in others.items()}
        return {**defined, "counts/detections": len(self.results)}


@dataclass(frozen=True)
class ClassChanges:
    """The change of each class's AP against the baseline's.

    Attributes:
        deltas: AP minus the baseline's [classes]; NaN without objects of the class.
        p_values: p-values [classes], corrected for the number of classes (Holm); NaN for classes in
            fewer than `ENOUGH` pictures.
    """

    deltas: Values
    p_values: Values

    @classmethod
    def of(cls, model: DetectionScores, baseline: DetectionScores) -> Self:
        """Test each class.

        The test uses the normal distribution with the bootstrap's standard error (Efron and
        Tibshirani, An Introduction to the Bootstrap, 1993), because with many classes no counted
        p-value is small enough.
        """
        deltas = np.asarray(model.evaluation.by_class - baseline.evaluation.by_class)
        differences = model.by_class - baseline.by_class
        p_values = np.full(differences.shape[1], np.nan)
        tested = np.flatnonzero(baseline.pictures_of_class >= ENOUGH)
        errors = np.nanstd(differences[:, tested], axis=0, ddof=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            scores = np.where(deltas[tested] == 0, 0, np.abs(deltas[tested]) / errors)
        p_values[tested] = holm(2 * ndtr(-scores))
        return cls(deltas, p_values)

    @property
    def lost(self) -> NDArray[np.int64]:
        """The classes that are significantly worse than FP32's."""
        return np.flatnonzero((self.p_values < SIGNIFICANCE) & (self.deltas < 0))


def to_coco(pictures: Array, class_ids: Sequence[int]) -> dict[str, Any]:
    """Return the annotations of pictures [n], given as records of `data.boxes`."""
    annotations = [
        {
            "image_id": int(record["image_id"]),
            "category_id": class_ids[box["category"]],
            "bbox": box["bbox"].tolist(),
            "area": float(box["area"]),
            "iscrowd": int(box["crowd"]),
        }
        for record in pictures
        for box in record["boxes"][: record["count"]]
    ]
    images = [{"id": int(image_id)} for image_id in pictures["image_id"]]
    categories = [{"id": class_id} for class_id in class_ids]
    return {"images": images, "annotations": annotations, "categories": categories}
