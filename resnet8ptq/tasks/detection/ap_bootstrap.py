"""AP of bootstrap samples of the pictures, from matches that were computed once.

A sample is a weight for each picture: how often it was drawn. Which detections are right does not
change with it, only how often each counts.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.tasks.detection.average_precision import Matches
from resnet8ptq.tasks.statistics import resample

Values = NDArray[np.float64]

# pycocotools' recalls, as it makes them.
RECALLS = np.linspace(0.0, 1.00, int(np.round((1.00 - 0.0) / 0.01)) + 1, endpoint=True)
_AT_ONCE = 2**23  # weights of detections


def draw(pictures: int, times: int) -> NDArray[np.int32]:
    """Return how often each bootstrap sample has each picture, [times, pictures]."""
    weights = np.zeros((times, pictures), np.int32)
    for row, chosen in zip(weights, resample(pictures, times), strict=True):
        row += np.bincount(chosen, minlength=pictures).astype(np.int32)
    return weights


def by_class(matches: Sequence[Matches], weights: NDArray[np.int32]) -> Values:
    """Return the AP of each class on each sample [times, classes]; NaN without objects of it."""
    found = np.full((len(weights), len(matches)), np.nan)
    for place, each in enumerate(matches):
        rows = max(1, _AT_ONCE // max(1, len(each.picture)))
        for start in range(0, len(weights) if each.objects.any() else 0, rows):
            part = slice(start, start + rows)
            found[part, place] = _average_precision(each, weights[part])
    return found


def mean_of(classes: Values) -> Values:
    """Return AP [times] of that of the classes [times, classes], of those that have objects."""
    known = ~np.isnan(classes)
    total = np.where(known, classes, 0).sum(axis=1)
    return np.divide(
        total, known.sum(axis=1), out=np.full(len(classes), np.nan), where=known.any(1)
    )


def _average_precision(found: Matches, weights: NDArray[np.int32]) -> Values:
    """Return the AP of one class on each sample [times], as pycocotools accumulates it.

    Precision counts at the highest that it is at this recall or a higher one, so that only right
    detections have to be looked at.
    """
    objects = weights @ found.objects  # [times]
    drawn = weights[:, found.picture]  # [times, D]
    whole = np.cumsum(drawn, axis=1)
    average = np.zeros(len(weights))
    with np.errstate(invalid="ignore", divide="ignore"):
        for right, ignored in zip(found.right, found.ignored, strict=True):
            places = np.flatnonzero(right & ~ignored)
            counted = np.cumsum(drawn * ~ignored, axis=1) if ignored.any() else whole
            hits = np.cumsum(drawn[:, places], axis=1)  # [times, K]
            precision = hits / (counted[:, places] + np.spacing(1))
            highest = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
            # Recalls that this many hits reach, and fewer did not.
            reached = np.searchsorted(RECALLS, hits / objects[:, np.newaxis], side="right")
            gained = np.diff(reached, axis=1, prepend=0)
            average += (highest * gained).sum(axis=1) / len(RECALLS)
    return np.where(objects > 0, average / len(found.right), np.nan)
