"""Observes the values of a tensor, batch by batch.

The bins of a method's histogram depend on the largest magnitude, which is only known after the last
batch. Values are therefore counted in fine bins, with an edge at zero. Their width is 2**-15 of a
power of two above the largest magnitude so far. When a magnitude reaches this power, the power
grows, and neighbouring bins merge without rounding. The counts thus depend neither on the batch
size nor on the order of the samples, and their memory is constant.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.calibration.statistics import Range, TensorStats

HALF = 2**15  # fine bins on each side of zero

_BLOCK = 2**17  # values at once, so that intermediate results stay in the processor's cache
_LEAST = -100  # binary exponent; the inverse of smaller values overflows


@dataclass
class TensorObserver:
    """The range of a tensor in each batch, the counts of its values, and the peaks of the samples.

    Attributes:
        counting: whether values are counted; otherwise only ranges and peaks are kept.
        batches: the range of each batch, in order.
        counts: the count of each fine bin [2 * HALF], from the lowest bin; empty before values are
            counted.
        exponent: the bins span [-2**exponent, 2**exponent).
        finite: whether no value was NaN or infinite; after the first one, values are not counted.
        peaks: the largest magnitudes of the samples of each call, in order, see `observe`.
    """

    counting: bool = False
    batches: list[Range] = field(default_factory=list)
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    exponent: int = _LEAST
    finite: bool = True
    peaks: list[NDArray[np.float32]] = field(default_factory=list)

    @property
    def width(self) -> float:
        """The width of a fine bin."""
        return math.ldexp(1 / HALF, self.exponent)

    def observe(
        self, values: NDArray[np.float32], new_batch: bool = True, samples: int = 1
    ) -> None:
        """Take the values of a tensor for one or several samples into account.

        Args:
            new_batch: whether the values start a batch; else they continue the last one.
            samples: number of samples, if the first axis of the values counts samples; 1 for one
                sample, or if the values do not belong to single samples.
        """
        # Zeros stand for samples without values, such as boxes of empty pictures
        lows = np.zeros(samples, np.float32)
        highs = lows
        if values.size:
            rows = values.reshape(samples, -1)
            lows = rows.min(axis=1)
            highs = rows.max(axis=1)
        low = float(lows.min())
        high = float(highs.max())
        self.peaks.append(np.maximum(-lows, highs))
        self.finite &= math.isfinite(low) and math.isfinite(high)  # NaN if any value is NaN
        if self.counting and self.finite:
            self._widen(max(-low, high))
            self._count(values.reshape(-1), math.floor(low / self.width))

        # The values may continue the last batch
        if not new_batch:
            last_low, last_high = self.batches.pop()
            low = float(np.minimum(low, last_low))
            high = float(np.maximum(high, last_high))
        self.batches.append((low, high))

    def clipped(self, low: float, high: float) -> Self:
        """Return an observer of the same values, limited to [low, high]; the peaks stay unlimited.

        After a value that is not finite, nothing is limited.
        """
        if (low, high) == (-math.inf, math.inf) or not self.finite:
            return self

        # Move the counts beyond the limits into the bins of the limits
        least, most = np.clip([low, high], -HALF * self.width, (HALF - 1) * self.width)
        first = math.floor(least / self.width) + HALF
        last = math.floor(most / self.width) + HALF
        counts = self.counts.copy()
        if self.counting:  # values beyond the ends lie in the outermost bins
            counts[first] = counts[: first + 1].sum()
            counts[:first] = 0
            counts[last] = counts[last:].sum()
            counts[last + 1 :] = 0
        batches = []
        for ends in self.batches:
            lowest, highest = np.clip(ends, low, high).tolist()
            batches.append((lowest, highest))
        return replace(self, batches=batches, counts=counts)

    def is_coarse(self, num_bins: int) -> bool:
        """Return whether the bins of a histogram of `num_bins` bins are narrower than a fine bin.

        A clipped tensor has the fine bins of its source, which may be too wide for its own range.
        Without counting, the result is False. The exception is a value that is not finite: after
        it, the counts are incomplete, and the result is always True.
        """
        if not self.finite:
            return True
        threshold = max(max(-low, high) for low, high in self.batches)
        return self.counting and 0 < 2 * threshold / num_bins < self.width

    def stats(self, num_bins: int) -> TensorStats:
        """Return the statistics, with a histogram of `num_bins` bins if values are counted.

        The count of a fine bin across an edge is divided in proportion. The number of values below
        an edge is thus exact, except for the values of one fine bin. After a value that is not
        finite, all its counts are zero.
        """
        stats = TensorStats.of_batches(np.array(self.batches))
        if self.counting and not self.finite:
            stats.counts = np.zeros(num_bins, np.int64)
        elif self.counting:
            # Interpolate the number of values below each edge
            edges = np.linspace(-stats.threshold, stats.threshold, num_bins + 1)
            fine = self.width * np.arange(-HALF, HALF + 1)
            below = np.concatenate([[0], np.cumsum(self.counts)])
            cumulated = np.rint(np.interp(edges, fine, below)).astype(np.int64)
            cumulated[0] = 0
            cumulated[-1] = below[-1]
            stats.counts = np.diff(cumulated)
            stats.zeros = int(self.counts[HALF])
        return stats

    def bounds(self, num_bins: int) -> list[TensorStats]:
        """Return the statistics that bound the true ones: here the true ones alone."""
        return [self.stats(num_bins)]

    def _widen(self, magnitude: float) -> None:
        if not self.counts.size:
            self.counts = np.zeros(2 * HALF, np.int64)
        exponent = _LEAST
        if magnitude:
            exponent = max(_LEAST, math.frexp(magnitude)[1])

        # 2**grown neighbouring bins become one; a shift by 16 leaves only the two bins beside zero
        grown = exponent - self.exponent
        if grown > 0:
            bins = (np.arange(-HALF, HALF) >> min(grown, 16)) + HALF
            self.counts = np.bincount(bins, self.counts, 2 * HALF).astype(np.int64)
            self.exponent = exponent

    def _count(self, values: NDArray[np.float32], first: int) -> None:
        """Count `values` [n]; the smallest lies in bin `first`, where bin 0 starts at zero.

        The product with a power of two is exact in float32, and so is its floor, unless the product
        underflows. The bins' numbers may wrap around in 16 bits.
        """
        counts = self.counts[HALF + first :]
        scale = np.float32(1 / self.width)
        size = min(_BLOCK, values.size)
        positions = np.empty(size, np.float32)
        bins = np.empty(size, np.int16)
        for start in range(0, values.size, _BLOCK):
            block = values[start : start + _BLOCK]
            np.multiply(block, scale, out=positions[: block.size])
            np.floor(positions, out=bins, casting="unsafe")
            bins -= np.int16(first)
            block_counts = np.bincount(bins.view(np.uint16)[: block.size])
            counts[: len(block_counts)] += block_counts
