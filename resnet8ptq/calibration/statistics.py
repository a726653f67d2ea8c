"""Statistics of a tensor for calibration: its range in each batch, and a histogram."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import CalibConfig
from resnet8ptq.core.errors import QuantizationError

Range = tuple[float, float]
Ranges = Mapping[str, Range]  # by ONNX tensor name


@dataclass
class TensorStats:
    """The statistics of one tensor.

    The histogram has equal bins over [-threshold, threshold], where `threshold` is the largest
    magnitude of the first pass. Zero lies in the middle, where the entropy search starts.

    Attributes:
        zeros: number of values that are exactly zero, as many are after a ReLU.
        batches: the range of each batch of the first pass, in order.
    """

    low: float = np.inf
    high: float = -np.inf
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    zeros: int = 0
    batches: list[Range] = field(default_factory=list)

    @classmethod
    def of_batches(cls, batches: NDArray[np.float64]) -> "TensorStats":
        """Return the statistics after the first pass, from its ranges of the batches [n, 2]."""
        ranges = [(float(low), float(high)) for low, high in batches]
        low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
        return cls(low, high, batches=ranges)

    @property
    def threshold(self) -> float:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high))

    @property
    def edges(self) -> NDArray[np.float64]:
        """Bin edges [len(counts) + 1]."""
        return np.linspace(-self.threshold, self.threshold, len(self.counts) + 1)

    def observe(
        self, values: NDArray[np.float32], stage: str, config: CalibConfig, new_batch: bool = True
    ) -> None:
        """Add values: to the range in the pass `ranges`, to the bins in `histograms`.

        Args:
            new_batch: the values start a batch; else they continue that of the last call.

        Raises:
            QuantizationError: a value is NaN or infinite.
        """
        if stage == "histograms":
            if len(self.counts) == 0:
                self.counts = np.zeros(config.num_bins, dtype=np.int64)
            count_into(self.counts, values.reshape(-1), self.threshold)
            self.zeros += int(np.count_nonzero(values == 0))  # twice as fast as on floats
            return
        low, high = 0.0, 0.0  # of a tensor without values, such as the boxes found where none are
        if values.size:
            low, high = float(values.min()), float(values.max())
        if not np.isfinite([low, high]).all():  # min and max of anything with NaN are NaN
            raise QuantizationError("an activation of the calibration images is NaN or infinite")
        self.low, self.high = min(self.low, low), max(self.high, high)
        if not new_batch:
            last_low, last_high = self.batches.pop()
            low, high = min(low, last_low), max(high, last_high)
        self.batches.append((low, high))


def count_into(counts: NDArray[np.int64], values: NDArray[np.float32], threshold: float) -> None:
    """Add `values` [n] to the `counts` [bins] of equal bins over [-threshold, threshold], in place.

    Equals numpy.histogram, except for values within rounding error of a bin edge; faster.
    Works in blocks, so that intermediate results stay in the processor's cache.
    """
    half = len(counts) / 2
    width = (threshold or 1.0) / half  # its inverse might overflow
    size = min(_BLOCK, values.size)
    # From float64 to intp in one step takes three times as long as by int32.
    all_positions = np.empty(size)
    all_narrow, all_bins = np.empty(size, np.int32), np.empty(size, np.intp)
    for start in range(0, values.size, _BLOCK):
        block = values[start : start + _BLOCK]
        positions, narrow = all_positions[: block.size], all_narrow[: block.size]
        bins = all_bins[: block.size]
        np.divide(block, width, out=positions)
        positions += half
        narrow[...] = positions  # rounds down: no position is negative
        bins[...] = narrow
        block_counts = np.bincount(bins, minlength=len(counts) + 1)
        counts += block_counts[:-1]
        counts[-1] += block_counts[-1]  # the last bin includes both of its edges


_BLOCK = 32_768  # values
