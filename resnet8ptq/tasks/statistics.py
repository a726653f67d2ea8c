"""Intervals, paired tests, and their correction for several comparisons."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, ndtri  # scipy.stats takes a second to import


def wilson(correct: int, total: int) -> tuple[float, float]:
    """Return the 95% Wilson score interval of a proportion (Wilson, 1927)."""
    z, p = float(ndtri(0.975)), correct / total
    scale = 2 * (total + z**2)
    centre = (2 * total * p + z**2) / scale
    half_width = z / scale * math.sqrt(4 * total * p * (1 - p) + z**2)
    # At the ends exactly: rounding would leave 1e-17.
    low = centre - half_width if correct > 0 else 0.0
    return low, centre + half_width if correct < total else 1.0


def mcnemar(hits: NDArray[np.bool_], other_hits: NDArray[np.bool_]) -> float:
    """Return the p-value of the exact two-sided McNemar test (McNemar, 1947); 1 without flips.

    Two models on the same images [n]: under equal accuracy, an image that only one of them gets
    right falls to either with probability 1/2. Both tails of that binomial distribution are
    P(X <= k) = I_1/2(flips - k, k + 1) (Abramowitz and Stegun, 1964, 26.5.24).
    """
    ours, theirs = int((hits & ~other_hits).sum()), int((other_hits & ~hits).sum())
    if abs(ours - theirs) <= 1:
        return 1.0  # the tails meet
    fewer = min(ours, theirs)
    return 2 * float(betainc(max(ours, theirs), fewer + 1, 0.5))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number m, in the same order.

    The k-th smallest (k = 0, 1, ...) times m - k, at least its predecessor and at most 1 (Holm,
    1979, in the adjusted form of Wright, 1992).
    """
    order = np.argsort(p_values)
    scaled = np.asarray(p_values)[order] * np.arange(len(order), 0, -1)
    corrected = np.empty(len(order))
    corrected[order] = np.minimum(np.maximum.accumulate(scaled), 1)
    return corrected.tolist()


def above_chance(correct: int, total: int, classes: int) -> float:
    """Return the one-sided p-value of `correct` hits under guessing among equal classes.

    P(X >= k) of a binomial distribution is I_p(k, n - k + 1) (Abramowitz and Stegun, 1964,
    26.5.24).
    """
    return float(betainc(correct, total - correct + 1, 1 / classes)) if correct else 1.0
