"""Statistics of a tensor, from which the calibration methods choose its range."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Range = tuple[float, float]
Ranges = Mapping[str, Range]  # ranges by ONNX tensor name


@dataclass
class TensorStats:
    """The statistics of one tensor.

    The histogram has equal bins over [-threshold, threshold], where `threshold` is the largest
    magnitude. Zero lies in the middle, where the entropy search starts.

    Attributes:
        low, high: the smallest and the largest value.
        counts: number of values in each bin; empty without a histogram.
        zeros: number of values at zero or slightly above, if counted; a ReLU returns many zeros.
        batches: the range of each batch, in order.
    """

    low: float = np.inf
    high: float = -np.inf
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    zeros: int = 0
    batches: list[Range] = field(default_factory=list)

    @classmethod
    def of_batches(cls, batches: NDArray[np.float64]) -> "TensorStats":
        """Return statistics without a histogram, from the ranges of the batches [n, 2]."""
        ranges = [(float(low), float(high)) for low, high in batches]
        # min and max are NaN if any value is NaN
        low = batches[:, 0].min()
        high = batches[:, 1].max()
        return cls(float(low), float(high), batches=ranges)

    @property
    def is_finite(self) -> bool:
        """Whether no value was NaN or infinite."""
        return bool(np.isfinite([self.low, self.high]).all())

    @property
    def threshold(self) -> float:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high))

    @property
    def edges(self) -> NDArray[np.float64]:
        """Bin edges [len(counts) + 1]."""
        return np.linspace(-self.threshold, self.threshold, len(self.counts) + 1)
