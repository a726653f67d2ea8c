"""Explains the error of one layer: a cut range, a bias, a scale, an order of channels, or rounding.

Each explanation is a simple change of the exact values. It holds if it leaves at most a tenth of
the noise.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.experiment.diagnosis.measuring import to_db

Array = NDArray[np.float32]

LEFT = 0.1  # of the noise: what an explanation may leave
WEIGHTS_DB = 15.0  # weights of 4 bits have about 20 dB
FEW = 10  # values of a channel: with fewer, nothing is explained
NAMED = 5  # channels that an explanation lists
OFF = 0.05  # from 1: a factor nearer than this is none


@dataclass(frozen=True)
class Levels:
    """The range and the step of a tensor in a quantized file."""

    low: float
    high: float
    step: float


def explain(
    exact: Array,
    actual: Array,
    levels: Levels | None,
    weights: tuple[Array, Array] | None = None,
) -> str:
    """Return the explanation of a layer's error, in words.

    Args:
        exact, actual: the layer's output [samples, channels, ...] in FP32 and in the file, both for
            the file's inputs.
        levels: of this tensor in the file; None if they are not known.
        weights: the layer's weights [channels, ...] in FP32 and in the file; None: not known.
    """
    if not power(actual - exact):
        return "equal"
    if weights is not None:
        ours, theirs = (array.reshape(len(array), -1).astype(np.float64) for array in weights)
        weights_db = to_db(power(ours), power(theirs - ours))
        if weights_db < WEIGHTS_DB:
            words = _find_factor(ours, theirs) or _find_order(ours, theirs)
            return f"its weights are wrong (SQNR {weights_db:.1f} dB){words and ': ' + words}"
    if levels is not None and (words := _find_rounding(exact, actual, levels)):
        return words
    for axis in dict.fromkeys((1, exact.ndim - 1)):  # channels: of a convolution, of a product
        expected, got = _channels_first(exact, axis), _channels_first(actual, axis)
        for find in (_find_factor, _find_shift, _find_order):
            if words := find(expected, got):
                return words
    if weights is not None:
        return f"its weights are right (SQNR {weights_db:.1f} dB), and no single change explains it"
    return "its weights, or its operator: no single scale, bias or range explains it"


def _find_rounding(exact: Array, actual: Array, levels: Levels) -> str:
    """Return a text if the levels of the tensor explain most of the error, by ends or step."""
    rounded = round_to(exact, levels)
    if power(actual - rounded) >= power(actual - exact) / 2:
        return ""
    cut = power(np.clip(exact, levels.low, levels.high) - exact)
    if cut > power(rounded - exact) / 2:
        return (
            f"its range in the file, {levels.low:.4g} to {levels.high:.4g}, cuts values of "
            f"{exact.min():.4g} to {exact.max():.4g}"
        )
    return f"rounding to its levels, {levels.step:.3g} apart"


def round_to(values: Array, levels: Levels) -> Array:
    """Return the nearest level of each value."""
    rounded = np.rint(values / levels.step) * levels.step
    return np.asarray(np.clip(rounded, levels.low, levels.high), np.float32)


def power(values: NDArray[np.floating]) -> float:
    """Return the sum of squares; a mask may hold infinities, whose difference is not a number."""
    return float(np.square(np.nan_to_num(values), dtype=np.float64).sum())


def _channels_first(values: Array, axis: int) -> NDArray[np.float64]:
    """Return values as a matrix [channels, rest]; of a vector or less, one channel."""
    if values.ndim < 2:
        return values.reshape(1, -1).astype(np.float64)
    return np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1).astype(np.float64)


def _find_factor(exact: NDArray[np.float64], actual: NDArray[np.float64]) -> str:
    """Return a text if the values are a multiple of the exact ones, in all or in some channels."""
    noise = np.square(actual - exact).sum()
    whole = (exact * actual).sum() / max(np.square(exact).sum(), np.finfo(float).tiny)
    if abs(whole - 1) > OFF and np.square(actual - whole * exact).sum() < LEFT * noise:
        return f"its values are {whole:.3g} times those of FP32: a scale"
    squares = np.maximum(np.square(exact).sum(axis=1), np.finfo(float).tiny)
    factors = (exact * actual).sum(axis=1) / squares
    left = np.square(actual - factors[:, np.newaxis] * exact).sum()
    if exact.shape[1] < FEW or left >= LEFT * noise:
        return ""
    wrong = _worst_channels(exact, actual)
    listed = ", ".join(f"{channel} ({factors[channel]:.3g} times)" for channel in wrong)
    return f"a scale of its channels is wrong: {listed}"


def _find_shift(exact: NDArray[np.float64], actual: NDArray[np.float64]) -> str:
    """Return a text if the values differ by one constant in each channel.

    A ReLU behind the layer hides the constant where both are zero.
    """
    seen = (exact != 0) & (actual != 0)
    counts = np.maximum(seen.sum(axis=1), 1)
    shifts = np.where(seen, actual - exact, 0).sum(axis=1) / counts
    rest = np.where(seen, actual - exact - shifts[:, np.newaxis], 0)
    noise = np.where(seen, actual - exact, 0)
    if seen.sum() < FEW * len(exact) or np.square(rest).sum() >= LEFT * np.square(noise).sum():
        return ""
    wrong = _worst_channels(exact, actual)
    listed = ", ".join(f"{channel} ({shifts[channel]:+.3g})" for channel in wrong)
    return f"its channels differ by a constant, as of a wrong bias: {listed}"


def _find_order(exact: NDArray[np.float64], actual: NDArray[np.float64]) -> str:
    """Return a text if the channels are those of FP32 in another order."""
    channels = len(exact)
    if not 2 <= channels <= 4096 or exact.shape[1] < FEW:
        return ""
    with np.errstate(invalid="ignore", divide="ignore"):
        alike = np.nan_to_num(np.corrcoef(exact, actual)[:channels, channels:])
    order = alike.argmax(axis=1)  # the file's channel for each of FP32's
    if len({*order.tolist()}) < channels or (order == np.arange(channels)).all():
        return ""
    noise = np.square(actual - exact).sum()
    if np.square(actual[order] - exact).sum() >= LEFT * noise:
        return ""
    return f"its channels are in another order: {order[:NAMED].tolist()} ..."


def _worst_channels(exact: NDArray[np.float64], actual: NDArray[np.float64]) -> list[int]:
    """Return the channels with nearly all of the noise, at most `NAMED`, the worst first."""
    noise = np.square(actual - exact).sum(axis=1)
    order = np.argsort(-noise, kind="stable")
    count = int(np.searchsorted(np.cumsum(noise[order]), (1 - LEFT) * noise.sum())) + 1
    return [int(channel) for channel in order[: min(count, NAMED)]]
