"""Observes a tensor's values near both ends of its range, which usually suffice for percentiles.

A range by percentile usually ends in the tails, but most values lie in the middle, between the
tails, and cost most of the time. After the first samples, the values of the tails are counted by
bin, and those of the middle only in total. The true histogram lies between two extremes: all values
of this total at the start of the middle, or all at its end. If both give the same range, so does
the true histogram. Otherwise, the caller has to count all values (`calibration.observer`).
"""

import math
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.calibration.observer import HALF, TensorObserver
from resnet8ptq.calibration.statistics import Range, TensorStats

TAIL = 0.01  # the share of the first values in each tail
_FIRST_VALUES = 2**20  # values that are all counted before the tails are known
_FIRST_SAMPLES = 8
_BLOCK = 2**17  # values at once, so that intermediate results stay in the processor's cache


@dataclass
class TailObserver(TensorObserver):
    """The range of a tensor in each batch, and the counts of the values in both tails.

    Attributes:
        total: the number of all values, until the first that is NaN or infinite.
        middle: the range between the tails, without its second end; None as long as all values are
            counted.
        uncounted: the number of values of the middle that `counts` lacks.
    """

    total: int = 0
    middle: Range | None = None
    uncounted: int = 0

    def clipped(self, low: float, high: float) -> Self:
        """Return an observer of the same values, limited to [low, high]; see the base class."""
        clipped = super().clipped(low, high)
        if self.middle is None:
            return clipped
        first, last = np.clip(self.middle, low, high).tolist()
        return replace(clipped, middle=(first, last))

    def bounds(self, num_bins: int) -> list[TensorStats]:
        """Return two statistics: with uncounted values at the middle's start, and at its end."""
        if self.middle is None:
            return 2 * [self.stats(num_bins)]
        return [self._fill(end).stats(num_bins) for end in self.middle]

    def _fill(self, value: float) -> TensorObserver:
        """Return a copy that counts all uncounted values in the bin of `value`."""
        position = min(max(math.floor(value / self.width), -HALF), HALF - 1)
        counts = self.counts.copy()
        counts[HALF + position] += self.uncounted
        return replace(self, counts=counts, uncounted=0)

    def _count(self, values: NDArray[np.float32], first: int) -> None:
        self.total += values.size
        if self.middle is None:
            super()._count(values, first)
            self.middle = self._find_middle()
            return

        if not values.size:  # such as boxes of empty pictures
            return

        # Take the values of the tails out of each block, and count them at once
        with np.errstate(over="ignore"):  # an end at 2**128 becomes infinity, beyond all values
            low, high = np.array(self.middle, np.float32)  # exact: edges of bins
        tails = []
        for start in range(0, values.size, _BLOCK):
            block = values[start : start + _BLOCK]
            tails.append(block[(block < low) | (block >= high)])
        counted = np.concatenate(tails)
        self.uncounted += values.size - counted.size
        if counted.size:
            super()._count(counted, math.floor(counted.min() / self.width))

    def _find_middle(self) -> Range | None:
        """Return the ends of the middle; None until enough values are counted.

        A bin with more than one tail's share, such as the zeros behind a ReLU, belongs to the
        middle, where its values need not be counted one by one.
        """
        samples = sum(map(len, self.peaks))
        if self.total < _FIRST_VALUES or samples < _FIRST_SAMPLES:
            return None
        share = TAIL * self.total
        below = np.cumsum(self.counts)
        first = int(np.searchsorted(below, share))  # the bin in which the lower tail ends
        last = int(np.searchsorted(below, self.total - share))
        if self.counts[first] <= share:
            first += 1
        if self.counts[last] > share:
            last += 1
        low = self.width * (first - HALF)
        return low, max(low, self.width * (last - HALF))
