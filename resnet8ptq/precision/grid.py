"""The grids for rounding weights, and the scheme of activations.

A level stands for value = scale * (level - zero_point), as in Jacob et al., "Quantization and
Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", CVPR 2018.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import DTYPES, QuantizationConfig
from resnet8ptq.core.errors import UnsupportedError

# (dtype, reduced to 7 bits) -> lowest and highest level, as in ONNX Runtime
_LEVELS = {
    ("int8", False): (-128, 127),
    ("int8", True): (-64, 64),
    ("uint8", False): (0, 255),
    ("uint8", True): (0, 127),
    ("int4", False): (-8, 7),
    ("int3", False): (-4, 3),
    ("int2", False): (-2, 1),
}
_SHARES = np.linspace(1, 0.3, 71)  # candidates for the range, as shares of the largest weight


@dataclass(frozen=True)
class WeightScheme:
    """The quantization of weights; `dtype` is int8, uint8, int4, int3 or int2.

    Below 8 bits, the end of the range is a share of the largest absolute weight. It is the share
    from 0.3 to 1 with the smallest squared error: with few levels, clipping the largest weights
    reduces the error.
    """

    dtype: str
    per_channel: bool = False
    symmetric: bool = True
    reduce_range: bool = False

    @classmethod
    def of(cls, config: QuantizationConfig, reduce_range: bool = False) -> "WeightScheme":
        """Return the scheme for the settings of a quantized run.

        By default, weights are symmetric, except uint8 with one scale for each layer. Weights with
        a scale for each channel are always symmetric.

        Raises:
            UnsupportedError: the settings ask for asymmetric weights with a scale for each channel,
                which integer convolutions do not take.
        """
        if config.per_channel and config.symmetric.weights is False:
            raise UnsupportedError(
                "symmetric.weights=false with per_channel=true: integer convolutions take one "
                "zero point for all channels"
            )

        # Unsigned weights need a zero point to use all their levels
        dtype = DTYPES[config.dtype.name][1]
        symmetric = config.symmetric.weights
        if symmetric is None:
            symmetric = dtype != "uint8"
        return cls(
            dtype,
            config.per_channel,
            symmetric=symmetric or config.per_channel,
            reduce_range=reduce_range,
        )

    @property
    def bits(self) -> int:
        """Bits of a weight; `reduce_range` does not change them."""
        return int(self.dtype.lstrip("uint"))

    @property
    def clips(self) -> bool:
        """Whether the range may exclude the largest weights."""
        return self.bits < 8

    @property
    def levels(self) -> tuple[int, int]:
        """Lowest and highest level; opposite numbers for signed symmetric weights."""
        lowest, highest = _LEVELS[self.dtype, self.reduce_range and not self.clips]
        if lowest and self.symmetric:
            lowest = -highest
        return lowest, highest

    def grid(self, weights: NDArray[np.float32], axis: int) -> "Grid":
        """Return the grid of a layer's weights; `scale` and `zero_point` broadcast over them.

        >>> weights = np.array([[-1.27, 0.635], [0.1, 0.2]], np.float32)
        >>> WeightScheme("int8").grid(weights, 0).quantize(weights).tolist()
        [[-127, 64], [10, 20]]

        Args:
            axis: the axis of the weights that counts output channels.
        """
        reduced = None  # None stands for all axes, with one scale for the layer
        if self.per_channel:
            others = set(range(weights.ndim)) - {axis % weights.ndim}
            reduced = tuple(sorted(others))

        # The range of the weights; it includes 0
        least = weights.min(axis=reduced, keepdims=True)
        most = weights.max(axis=reduced, keepdims=True)
        low = np.minimum(least, 0).astype(np.float64)
        high = np.maximum(most, 0).astype(np.float64)
        if self.symmetric:
            high = np.maximum(-low, high)
            low = -high

        # The step between two levels
        lowest, highest = self.levels
        scale = (high - low) / (highest - lowest)
        empty = scale < np.finfo(np.float32).tiny  # channels of zeros
        scale = np.where(empty, 1.0, scale)
        if self.clips:
            scale = _least_error(weights, scale, reduced, highest)

        # The level of the value 0
        if self.symmetric:
            zero_point = np.full_like(scale, np.round((lowest + highest) / 2))
        else:
            zero_point = np.round(lowest - low / scale)
        return Grid(
            scale.astype(np.float32),
            zero_point=zero_point.astype(np.int64),
            lowest=lowest,
            highest=highest,
        )


def fit_bias(
    weights: NDArray[np.float32], bias: NDArray[np.float32], scale: float, per_channel: bool
) -> NDArray[np.float32]:
    """Return weights [channels, ...] whose symmetric scales let the bias [channels] fit in 32 bits.

    A bias has the scale of the weights times that of the input. With weights near 0 the bias would
    be clipped, so one weight of such a channel, or of the layer, is raised. With 8-bit inputs, this
    changes the output by less than 2**-14 of the largest bias.

    >>> weights = np.array([[1e-9, 0], [1, 1]], np.float32)
    >>> (fit_bias(weights, np.array([4, 4], np.float32), 2**-7, True) * 2**23).tolist()
    [[508.0, 0.0], [8388608.0, 8388608.0]]

    Args:
        scale: the scale of the input.
        per_channel: whether each channel has a scale; otherwise the layer has one.
    """
    rows = weights.reshape(len(weights), -1)
    # A bias of 2**30 steps leaves room within 32 bits
    least = 127 * np.abs(bias) / (scale * 2.0**30)
    if not per_channel:
        rows = rows.reshape(1, -1)
        least = least.max(keepdims=True)
    small = np.abs(rows).max(axis=1) < least
    rows = rows.copy()
    rows[small, 0] = least[small]
    return rows.reshape(weights.shape)


def _least_error(
    weights: NDArray[np.float32],
    scale: NDArray[np.float64],
    reduced: tuple[int, ...] | None,
    highest: int,
) -> NDArray[np.float64]:
    """Return the multiple of `scale`, of those in `_SHARES`, that has the smallest squared error.

    Weights that already lie on a grid, with one of them at its end, get the same grid again.

    Args:
        scale: the scale at which the largest weight gets the last level.
        reduced: the axes that share a scale; None for all axes.
        highest: the highest level; the lowest is its opposite.
    """
    errors = []
    candidates = []
    for share in _SHARES:
        candidate = (scale * share).astype(np.float32).astype(np.float64)
        levels = np.clip(np.round(weights / candidate), -highest, highest)
        error = np.square(levels * candidate - weights)
        errors.append(error.sum(axis=reduced, keepdims=True))
        candidates.append(candidate)
    best = np.argmin(errors, axis=0)[None]
    return np.take_along_axis(np.array(candidates), best, axis=0)[0]


@dataclass(frozen=True)
class Grid:
    """The levels of weights; `scale` and `zero_point` broadcast over the weights."""

    scale: NDArray[np.float32]
    zero_point: NDArray[np.int64]
    lowest: int
    highest: int

    def quantize(self, weights: NDArray[np.float32]) -> NDArray[np.int64]:
        """Return the nearest level of each weight, within the ends of the grid.

        Half steps are rounded to the even number of steps from zero.
        """
        levels = np.round(weights / self.scale).astype(np.int64) + self.zero_point
        return np.clip(levels, self.lowest, self.highest)

    def dequantize(self, levels: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the value of each level."""
        return ((levels - self.zero_point) * self.scale).astype(np.float32)

    def round(self, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the nearest value on the grid."""
        return self.dequantize(self.quantize(weights))


@dataclass(frozen=True)
class ActivationScheme:
    """The quantization of activations, with one scale for each tensor.

    Attributes:
        bits: bits of a level.
        symmetric: whether the range is symmetric, without the lowest level.
        level_pools: see `backends.contract.Quantizer`.
    """

    bits: int = 8
    symmetric: bool = False
    level_pools: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """Number of steps between the lowest and the highest level, an even number if symmetric."""
        levels = 2**self.bits
        if self.symmetric:
            levels -= 1  # without the lowest level, which has no opposite
        return levels - 1
