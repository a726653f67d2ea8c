"""Turns stored samples into network inputs, the same for every framework."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.limits import listed
from resnet8ptq.config.schema import PreprocessConfig
from resnet8ptq.core.errors import ConfigError, DataError

T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True)
class Preprocessing:
    """Arithmetic on samples, in the order of the attributes; the defaults keep the values.

    Attributes:
        offset, step: a stored integer stands for the value `(stored - offset) * step`.
        bgr: whether the order of the channels, the last axis, is reversed.
        scale: a factor of the values.
        mean, std: the last operation is `(value - mean) / std`, with one number for all channels,
            or one for each channel in the order after `bgr`.
    """

    offset: float = 0.0
    step: float = 1.0
    bgr: bool = False
    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def apply(self, stored: NDArray[Any], dtype: str = "float32") -> NDArray[Any]:
        """Return stored samples [n, ...] as inputs of the network, after these operations.

        For `float32`, the values are computed in float64 and rounded once; for `float16`, they are
        then rounded again. For an integer type or `bool`, the samples keep their stored values.

        Args:
            dtype: the dtype of the network's input: `float32`, `float16`, an integer type or
                `bool`.

        Raises:
            DataError: an integer is outside the range of `dtype`.
        """
        if dtype == "float16":
            return self.apply(stored).astype(np.float16)
        if dtype != "float32":
            return to_integers(stored, dtype)
        if self == RAW:
            return stored.astype(np.float32)
        ordered = stored[..., ::-1] if self.bgr else stored
        if stored.dtype != np.uint8:
            return self._compute(ordered)
        # A table of the 256 levels gives the same values in a fraction of the time.
        tables = self._compute(np.arange(256)[:, np.newaxis])  # [256, 1 or channels]
        if tables.shape[1] == 1:
            return tables[:, 0][ordered]
        return tables[ordered, np.arange(tables.shape[1])]

    def _compute(self, values: NDArray[Any]) -> NDArray[np.float32]:
        wide = (values.astype(np.float64) - self.offset) * (self.step * self.scale)
        return ((wide - self.mean) / self.std).astype(np.float32)


RAW = Preprocessing()


def to_integers(stored: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return integers as another integer type, or as `bool`.

    Raises:
        DataError: an integer is outside the range of that type.
    """
    # Look at the values only if the types do not tell that they fit
    wanted = np.dtype(dtype)
    if stored.size and not np.can_cast(stored.dtype, wanted):
        low = 0
        high = 1
        if wanted.kind != "b":
            low = np.iinfo(wanted).min
            high = np.iinfo(wanted).max
        least = int(stored.min())
        most = int(stored.max())
        if least < low or most > high:
            raise DataError(
                f"samples: got integers from {least} to {most}, the network's input is {dtype}; "
                f"expected {low} to {high}"
            )
    return stored.astype(wanted)


def make_preprocessing(
    config: PreprocessConfig, shape: tuple[int, ...], offset: float, step: float
) -> Preprocessing:
    """Return the preprocessing that the settings describe.

    Args:
        shape: the shape of a stored sample, channels last.
        offset, step: see `Preprocessing`.

    Raises:
        ConfigError: the settings do not fit samples of that shape.
    """
    mean = listed(config.mean)
    std = listed(config.std)

    # The numbers of channels must fit
    for key, values in (("mean", mean), ("std", std)):
        if len(values) not in (1, *shape[-1:]):
            raise ConfigError(
                f"preprocess.{key}: got {len(values)} numbers, expected one, or one for each "
                f"channel: the samples are {shape}, channels last"
            )
    bgr = config.channels == "bgr"
    if bgr and (len(shape) != 3 or shape[-1] != 3):
        raise ConfigError(
            f"preprocess.channels: got 'bgr', expected pictures [H, W, 3]; the samples are {shape}"
        )
    return Preprocessing(
        offset,
        step,
        bgr,
        config.scale,
        mean=tuple(map(float, mean)),
        std=tuple(map(float, std)),
    )


def arrange(samples: NDArray[T], layout: Sequence[int] | None) -> NDArray[T]:
    """Return samples [n, ...] with their axes permuted, as a contiguous array.

    Args:
        layout: the axes of a sample in their new order; None returns the samples unchanged. With
            one axis more than the sample, a channel axis of size 1 is first added at the end; with
            one axis less, the last axis, of size 1, is first removed.
    """
    if layout is None:
        return samples
    if len(layout) > samples.ndim - 1:
        samples = samples[..., np.newaxis]
    elif len(layout) < samples.ndim - 1:
        samples = samples[..., 0]
    return np.ascontiguousarray(samples.transpose(0, *(axis + 1 for axis in layout)))
