"""A tensor's levels, and sums of noise and magnitudes over samples that need not be kept."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

BULK = 0.99  # share of the nonzero values; larger values are outliers or the tail
_OCTAVES = 256  # float32's exponents; the first is that of zeros, the last that of infinities
_MIDDLE = 126  # the exponent of values from 0.5 to 1


def power(values: NDArray[Any]) -> float:
    """Return the sum of squares.

    NaN counts as 0, because the difference of two equal infinities, as in masks, is NaN. An
    infinity counts as the largest number of the dtype.
    """
    return float(np.square(np.nan_to_num(values), dtype=np.float64).sum())


def to_db(signal: float, noise: float) -> float:
    """Return 10 * log10(signal / noise).

    The ratio is infinite without noise, and minus infinite without signal or with infinite noise.

    >>> to_db(100, 1), to_db(1, 0), to_db(0, 1)
    (20.0, inf, -inf)
    """
    if noise <= 0:
        return math.inf
    if noise == math.inf or not signal > 0:
        return -math.inf
    return 10 * math.log10(signal / noise)


@dataclass(frozen=True)
class Levels:
    """The range and the step of a tensor in a quantized file."""

    low: float
    high: float
    step: float

    def round(self, values: Array) -> Array:
        """Return the nearest level of each value."""
        rounded = np.rint(values / self.step) * self.step
        return np.asarray(np.clip(rounded, self.low, self.high), np.float32)

    def __str__(self) -> str:
        return f"{self.low:.4g} to {self.high:.4g}"


@dataclass
class Noise:
    """Powers of a signal and of its noise, summed over values."""

    signal: float = 0.0
    noise: float = 0.0

    def add(self, exact: Array, noisy: Array) -> None:
        """Add exact and noisy values.

        NaN or infinity in place of a number is infinite noise.
        """
        self.signal += power(exact)
        is_lost = bool((np.isfinite(exact) & ~np.isfinite(noisy)).any())
        if is_lost:
            self.noise = math.inf
        else:
            self.noise += power(noisy - exact)

    @property
    def sqnr_db(self) -> float:
        """Signal-to-quantization-noise ratio in dB; infinite without noise."""
        return to_db(self.signal, self.noise)


@dataclass
class Spread:
    """Histogram of values by magnitude, with an octave for each bin, such as [0.5, 1).

    Zeros, subnormals, infinities and NaN are in no bin.

    Attributes:
        counts: number of values in each bin.
        signal, noise: sums of squares in each bin, of the values and of the errors of rounding.
        low, high: the smallest and the largest of all values.
    """

    counts: NDArray[np.float64] = field(default_factory=lambda: np.zeros(_OCTAVES))
    signal: NDArray[np.float64] = field(default_factory=lambda: np.zeros(_OCTAVES))
    noise: NDArray[np.float64] = field(default_factory=lambda: np.zeros(_OCTAVES))
    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def of(cls, values: Array, rounded: Array) -> "Spread":
        """Return the histogram of `values`, with the noise of their rounded values."""
        spread = cls()
        spread.add(values, rounded)
        return spread

    def add(self, values: Array, rounded: Array) -> None:
        """Add values and their rounded values."""
        values = values.ravel()
        rounded = rounded.ravel()
        # NaN has no place in the range, but must not hide the other values
        self.low = min(self.low, float(np.fmin.reduce(values, initial=math.inf)))
        self.high = max(self.high, float(np.fmax.reduce(values, initial=-math.inf)))

        # Sum by the exponent of float32, without its first and last bin
        octaves = np.asarray(values, np.float32).view(np.int32) >> 23 & 0xFF
        with np.errstate(invalid="ignore"):  # a mask may hold infinities
            errors = rounded - values
        for sums, weights in (
            (self.counts, None),
            (self.signal, np.square(values, dtype=np.float64)),
            (self.noise, np.square(errors, dtype=np.float64)),
        ):
            sums[1:-1] += np.bincount(octaves, weights, _OCTAVES)[1:-1]

    @property
    def peak(self) -> float:
        """The largest magnitude; 0 if all bins are empty."""
        if not self.counts.any():
            return 0.0
        return max(abs(self.low), abs(self.high))

    @property
    def reach(self) -> float:
        """The smallest power of two above 99% of the nonzero values.

        Of fewer than 100 nonzero values, the largest may lie above the reach. With fewer than two,
        the reach is 0.
        """
        octave = self._last
        if octave < 0:
            return 0.0
        return math.ldexp(1.0, octave - _MIDDLE)

    @property
    def sqnr_db(self) -> float:
        """SQNR of the rounded values in all bins, in dB."""
        return to_db(float(self.signal.sum()), float(self.noise.sum()))

    @property
    def bulk_db(self) -> float:
        """SQNR of the values below `reach` in dB."""
        bulk = slice(self._last + 1)
        return to_db(float(self.signal[bulk].sum()), float(self.noise[bulk].sum()))

    @property
    def peaks(self) -> float:
        """The ratio of `peak` to `reach`; 0 if `reach` is 0."""
        if not self.reach:
            return 0.0
        return self.peak / self.reach

    @property
    def _last(self) -> int:
        total = self.counts.sum()
        least = min(BULK * total, total - 1)  # among few values, the largest may be an outlier
        below = np.cumsum(self.counts)
        return int(np.searchsorted(below, least)) if least > 0 else -1
