"""COCO's evaluation of boxes, by pycocotools: average precision, and which detections are right.

https://cocodataset.org/#detection-eval; Lin et al., "Microsoft COCO: Common Objects in Context",
ECCV 2014. AP is the mean over ten IoU thresholds from 0.50 to 0.95, over 101 recalls, and over the
classes that have objects.
"""

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Detections = Sequence[Mapping[str, Any]]  # COCO's results format

_MOST = 100  # detections for each class and picture, pycocotools' own


@dataclass(frozen=True)
class Matches:
    """The detections of one class, the highest scores first, and its objects.

    Attributes:
        picture: [D], the place of each detection's picture.
        right: [thresholds, D], whether it matches an object.
        ignored: [thresholds, D], whether it counts for nothing, such as within a crowd.
        objects: [pictures], how many there are to be found.
    """

    picture: NDArray[np.int64]
    right: NDArray[np.bool_]
    ignored: NDArray[np.bool_]
    objects: NDArray[np.int64]


@dataclass(frozen=True)
class Evaluation:
    """What COCO's evaluation finds; NaN where there are no objects of the kind.

    Attributes:
        pictures: how many were scored.
        precision: [10 thresholds, 101 recalls, classes, 4 areas], pycocotools' own, with the
            classes in the order of the annotations' categories.
        recall: [10 thresholds, classes, 4 areas].
        matches: of each class, over all areas.
    """

    pictures: int
    precision: Values
    recall: Values
    matches: Sequence[Matches] = field(repr=False)

    @cached_property
    def metrics(self) -> dict[str, float]:
        """AP and its kin by name, the first six numbers and the last four of pycocotools."""
        areas = ("small", "medium", "large")
        return {
            "ap": _mean(self.precision[..., 0]),
            "ap50": _mean(self.precision[0, ..., 0]),
            "ap75": _mean(self.precision[5, ..., 0]),
            **{f"ap_{a}": _mean(self.precision[..., n]) for n, a in enumerate(areas, 1)},
            "ar": _mean(self.recall[..., 0]),
            **{f"ar_{a}": _mean(self.recall[..., n]) for n, a in enumerate(areas, 1)},
        }

    @cached_property
    def by_class(self) -> Values:
        """AP of each class [classes]."""
        classes = self.precision.shape[2]
        return np.array([_mean(self.precision[:, :, place, 0]) for place in range(classes)])


def _mean(values: Values) -> float:
    known = values[values > -1]
    return float(known.mean()) if known.size else float("nan")


def evaluate(results: Detections, annotations: Mapping[str, Any]) -> Evaluation:
    """Score detections against annotations, of all pictures of the annotations and no others.

    Args:
        results: in COCO's results format: image_id, category_id, bbox and score of each.
        annotations: in COCO's format, with images, annotations and categories.

    Raises:
        ValueError: a detection of a picture that the annotations lack.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    ids = [image["id"] for image in annotations["images"]]
    if strange := {each["image_id"] for each in results} - set(ids):
        raise ValueError(f"image_id {min(strange)} is in none of the annotations' images")
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does
        truth = COCO()
        truth.dataset = {key: annotations[key] for key in ("images", "annotations", "categories")}
        truth.dataset["annotations"] = [
            {"id": place, **each} for place, each in enumerate(annotations["annotations"], 1)
        ]
        truth.createIndex()
        found = truth.loadRes([dict(each) for each in results]) if len(results) else _empty(truth)
        evaluation = COCOeval(truth, found, "bbox")
        evaluation.params.imgIds = sorted(ids)
        evaluation.evaluate()
        evaluation.accumulate()
    last = evaluation.params.maxDets.index(_MOST)
    # pycocotools has the classes in the order of their ids.
    sorted_ids = list(evaluation.params.catIds)
    order = [sorted_ids.index(category["id"]) for category in annotations["categories"]]
    matches = _matches(evaluation)
    return Evaluation(
        len(ids),
        evaluation.eval["precision"][..., last][:, :, order],
        evaluation.eval["recall"][..., last][:, order],
        [matches[place] for place in order],
    )


def _empty(truth: Any) -> Any:
    from pycocotools.coco import COCO

    found = COCO()
    found.dataset = {**truth.dataset, "annotations": []}
    found.createIndex()
    return found


def _matches(evaluation: Any) -> list[Matches]:
    """Return what COCO's evaluation has matched over all areas, by class."""
    settings = evaluation.params
    pictures, areas = len(settings.imgIds), len(settings.areaRng)
    thresholds = len(settings.iouThrs)
    classes = []
    for place in range(len(settings.catIds)):
        first = place * areas * pictures  # its lists run over classes, areas and pictures
        each = evaluation.evalImgs[first : first + pictures]
        picture, scores = [], []
        right, ignored = ([np.zeros((thresholds, 0), np.bool_)] for _ in range(2))
        objects = np.zeros(pictures, np.int64)
        for number, found in enumerate(each):
            if found is None:  # neither objects nor detections
                continue
            picture += [number] * len(found["dtScores"])
            scores += found["dtScores"]
            right.append(found["dtMatches"] > 0)
            ignored.append(found["dtIgnore"].astype(np.bool_))
            objects[number] = np.count_nonzero(found["gtIgnore"] == 0)
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
