"""Computes the AP of bootstrap samples of the pictures, from matches that were computed once.

A bootstrap sample is a weight for each picture: the number of times that the picture was drawn. A
detection stays right or wrong in each sample, and counts as often as its picture was drawn.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.tasks.detection.average_precision import Matches
from resnet8ptq.tasks.scoring.statistics import Values

# The recalls of pycocotools, by the same formula
RECALLS = np.linspace(0.0, 1.00, int(np.round((1.00 - 0.0) / 0.01)) + 1, endpoint=True)
_AT_ONCE = 2**23  # most weights of detections in memory


def by_class(matches: Sequence[Matches], weights: NDArray[np.int32]) -> Values:
    """Return the AP by bootstrap sample and class [times, classes]; NaN without objects.

    Args:
        weights: how often each bootstrap sample draws each picture [times, pictures].
    """
    classes = np.full((len(weights), len(matches)), np.nan)
    for label, match in enumerate(matches):
        if not match.objects.any():
            continue
        rows = max(1, _AT_ONCE // max(1, len(match.picture)))
        for start in range(0, len(weights), rows):
            part = slice(start, start + rows)
            classes[part, label] = _average_precision(match, weights[part])
    return classes


def _average_precision(match: Matches, weights: NDArray[np.int32]) -> Values:
    """Return the AP of one class on each bootstrap sample [times], as in pycocotools.

    The precision at a recall is the highest precision at this recall or above, so only the
    positions of right detections matter.
    """
    objects = weights @ match.objects  # [times]
    drawn = weights[:, match.picture]  # [times, D]
    whole = np.cumsum(drawn, axis=1)

    # Add up the APs of the thresholds
    average = np.zeros(len(weights))
    with np.errstate(invalid="ignore", divide="ignore"):
        for right, ignored in zip(match.right, match.ignored, strict=True):
            hit = np.flatnonzero(right & ~ignored)
            counted = whole
            if ignored.any():
                counted = np.cumsum(drawn * ~ignored, axis=1)
            hits = np.cumsum(drawn[:, hit], axis=1)  # [times, K]
            precision = hits / (counted[:, hit] + np.spacing(1))
            highest = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
            # Find the number of recalls that each hit reaches first
            reached = np.searchsorted(RECALLS, hits / objects[:, np.newaxis], side="right")
            gained = np.diff(reached, axis=1, prepend=0)
            average += (highest * gained).sum(axis=1) / len(RECALLS)
    return np.where(objects > 0, average / len(match.right), np.nan)
