"""COCO's evaluation by pycocotools: average precision, and the matches of detections.

https://cocodataset.org/#detection-eval; Lin et al., "Microsoft COCO: Common Objects in Context",
ECCV 2014. AP is the mean over ten IoU thresholds from 0.50 to 0.95, over 101 recalls, and over the
classes that have objects. The IoU is that of boxes or masks. For keypoints, the object keypoint
similarity (OKS) replaces the IoU. Then at most 20 detections of each class in a picture count, and
no metric is of small objects alone.
"""

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.tasks.scoring.statistics import Values

Results = Sequence[Mapping[str, Any]]  # COCO's results format


@dataclass(frozen=True)
class Matches:
    """The D detections of one class, highest scores first, and its objects.

    The pictures are in the order of their ids.

    Attributes:
        picture: [D], the index of each detection's picture.
        right: [thresholds, D], whether the detection matches an object.
        ignored: [thresholds, D], whether the detection does not count, such as one in a crowd.
        objects: [pictures], the number of objects that count.
    """

    picture: NDArray[np.int64]
    right: NDArray[np.bool_]
    ignored: NDArray[np.bool_]
    objects: NDArray[np.int64]


@dataclass(frozen=True)
class CocoResult:
    """The result of COCO's evaluation. A metric is NaN if no object counts for it.

    Attributes:
        pictures: the number of pictures.
        areas: the names of the ranges of areas; the first range covers all areas.
        precision: the precision [10 thresholds, 101 recalls, classes, areas], with the classes in
            the order of the annotations' categories; -1 without objects.
        recall: [10 thresholds, classes, areas], with the same classes; -1 without objects.
        matches: the matches of every class, over all areas.
    """

    pictures: int
    areas: Sequence[str]
    precision: Values
    recall: Values
    matches: Sequence[Matches] = field(repr=False)

    @cached_property
    def metrics(self) -> dict[str, float]:
        """AP and related metrics by name, at pycocotools' largest number of detections."""
        areas = list(enumerate(self.areas[1:], 1))
        metrics = {
            "ap": _mean(self.precision[..., 0]),
            "ap50": _mean(self.precision[0, ..., 0]),  # the first threshold is 0.50
            "ap75": _mean(self.precision[5, ..., 0]),  # the sixth is 0.75
        }
        for index, area in areas:
            metrics[f"ap_{area}"] = _mean(self.precision[..., index])
        metrics["ar"] = _mean(self.recall[..., 0])
        for index, area in areas:
            metrics[f"ar_{area}"] = _mean(self.recall[..., index])
        return metrics

    @cached_property
    def by_class(self) -> Values:
        """AP of each class [classes]; NaN without objects."""
        values = []
        for label in range(self.precision.shape[2]):
            values.append(_mean(self.precision[:, :, label, 0]))
        return np.array(values)


def _mean(values: Values) -> float:
    defined = values[values > -1]
    if not defined.size:
        return float("nan")
    return float(defined.mean())


def evaluate(
    results: Results,
    annotations: Mapping[str, Any],
    kind: str = "bbox",
    sigmas: Sequence[float] = (),
) -> CocoResult:
    """Score detections against annotations, over all pictures of the annotations.

    Args:
        results: detections in COCO's results format: image_id, category_id, score, and bbox,
            segmentation or keypoints.
        annotations: annotations in COCO's format, with images, annotations and categories.
        kind: pycocotools' type of the comparison: bbox, segm or keypoints.
        sigmas: the constant of each keypoint in the OKS; empty for pycocotools' constants.

    Raises:
        ValueError: a detection belongs to a picture that the annotations do not list.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    ids = [image["id"] for image in annotations["images"]]
    unknown = {result["image_id"] for result in results}.difference(ids)
    if unknown:
        raise ValueError(f"image_id {min(unknown)} is in none of the annotations' images")

    # Number the annotations, because pycocotools needs unique ids, and takes 0 for no match
    numbered = []
    for number, annotation in enumerate(annotations["annotations"], 1):
        numbered.append({**annotation, "id": number})

    # Evaluate all pictures, also those without annotations
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        truth = COCO()
        truth.dataset = {
            "images": annotations["images"],
            "annotations": numbered,
            "categories": annotations["categories"],
        }
        truth.createIndex()
        detected = _empty(truth)  # pycocotools loads no empty results
        if len(results):
            detected = truth.loadRes(list(map(dict, results)))
        evaluation = COCOeval(truth, detected, kind)
        if sigmas:
            evaluation.params.kpt_oks_sigmas = np.array(sigmas)
        evaluation.params.imgIds = sorted(ids)
        evaluation.evaluate()
        evaluation.accumulate()

    # Restore the order of the classes, which pycocotools sorts by id
    sorted_ids = list(evaluation.params.catIds)
    order = [sorted_ids.index(category["id"]) for category in annotations["categories"]]
    matches = _matches(evaluation)
    return CocoResult(
        len(ids),
        evaluation.params.areaRngLbl,
        evaluation.eval["precision"][..., -1][:, :, order],  # the most detections are last
        evaluation.eval["recall"][..., -1][:, order],
        [matches[index] for index in order],
    )


def _empty(truth: Any) -> Any:
    from pycocotools.coco import COCO

    empty = COCO()
    empty.dataset = {**truth.dataset, "annotations": []}
    empty.createIndex()
    return empty


def _matches(evaluation: Any) -> list[Matches]:
    """Return the matches of COCO's evaluation over all areas, by class."""
    settings = evaluation.params
    pictures = len(settings.imgIds)
    areas = len(settings.areaRng)
    thresholds = len(settings.iouThrs)
    classes = []
    for index in range(len(settings.catIds)):
        first = index * areas * pictures  # the list runs over classes, areas and pictures
        picture = []
        scores = []
        none = np.zeros((thresholds, 0), np.bool_)  # a class may have no detection
        right = [none]
        ignored = [none]
        objects = np.zeros(pictures, np.int64)

        # Join the pictures, because precision is counted over all of them
        for number, match in enumerate(evaluation.evalImgs[first : first + pictures]):
            if match is None:  # the picture has neither objects nor detections
                continue
            picture += [number] * len(match["dtScores"])
            scores += match["dtScores"]
            right.append(match["dtMatches"] > 0)
            ignored.append(match["dtIgnore"].astype(np.bool_))
            objects[number] = np.count_nonzero(match["gtIgnore"] == 0)

        # Sort with pycocotools' algorithm, so that ties are ordered as there
        order = np.argsort(-np.array(scores), kind="mergesort")
        classes.append(
            Matches(
                np.array(picture, np.int64)[order],
                np.concatenate(right, axis=1)[:, order],
                np.concatenate(ignored, axis=1)[:, order],
                objects,
            )
        )
    return classes
