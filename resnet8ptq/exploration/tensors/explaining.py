"""Explains the error of one layer, for example by wrong weights, a clipped range or a wrong scale.

Most explanations are simple changes of the exact values. FP32's bias, or rounding to the file's
levels, must explain more than half of the noise. A scale, a constant or an order must leave less
than a tenth of it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.exploration.search import step_table
from resnet8ptq.exploration.tensors.spread import Levels, power, to_db

Array = NDArray[np.float32]
Matrix = NDArray[np.float64]  # [channels, rest]

LEFT = 0.1  # share of the noise, or of a largest difference, that does not count
WEIGHTS_DB = 15.0  # weights of 8 bits have 30 dB or more
NARROW_DB = 0.1  # weights of 4 bits have 10 to 20 dB, of 2 bits 0.1 to 7, other ones at most 0
NEAR_DB = 3.0  # an output this much noisier than the weights is still explained by them
FEW = 10  # least number of values of a channel for an explanation
FEW_WEIGHTS = 4  # the least number for weights, whose only noise is rounding
NAMED = 5  # channels that an explanation lists
UNUSED = 4  # ratio to the largest value, above which a range is mostly unused
OFF = 0.05  # distance from 1 up to which a factor does not count


@dataclass(frozen=True)
class LayerExplanation:
    """The cause of a layer's error.

    Attributes:
        kind: the kind of fault, see `step_table`; empty without a fault, such as for rounding.
        words: the cause, such as `its weights are rounded coarsely`.
        certain: whether the fault counts even if it costs little.
    """

    kind: str
    words: str
    certain: bool = False


def find_least_db(dtype: str) -> float:
    """Return the SQNR, in dB, below which weights of a dtype count as wrong.

    >>> find_least_db("int8"), find_least_db("int2")
    (15.0, 0.1)
    """
    bits = dtype.lstrip("abcdefghijklmnopqrstuvwxyz")
    return NARROW_DB if bits in ("2", "3", "4") else WEIGHTS_DB


def explain(
    exact: Array,
    actual: Array,
    levels: Levels | None,
    weights: tuple[Array, Array] | None = None,
    biases: tuple[Array, Array] | None = None,
    fp32: Array | None = None,
    least_db: float = WEIGHTS_DB,
) -> LayerExplanation:
    """Return the explanation of a layer's error.

    Args:
        exact, actual: the layer's output [samples, ...] in FP32 and in the file, both computed from
            the file's tensors before it. The channels lie along axis 1 or the last axis.
        levels: the levels of the output in the file; None if they have no single known scale.
        weights: the layer's weights [channels, ...] in FP32 and in the file; None if they are not
            known.
        biases: the layer's biases [channels] in FP32 and in the file; None if they are not known.
        fp32: the layer's output in FP32, computed from FP32's own tensors; by default `exact`.
        least_db: the SQNR below which weights are wrong, see `find_least_db`.
    """
    # Values that are lost need no further explanation
    if weights is not None:
        lost = _find_lost_weights(*weights)
        if lost is not None:
            return lost
    if np.isfinite(exact).all() and not np.isfinite(actual).all():
        return LayerExplanation(
            step_table.UNEXPLAINED, "its values in the file are NaN or infinite"
        )
    if not power(actual - exact):
        return LayerExplanation("", "equal")

    # Blame the weights first, because they are compared without running the layer
    weights_db = np.inf
    if weights is not None:
        ours = _flatten(weights[0])
        theirs = _flatten(weights[1])
        weights_db = to_db(power(ours), power(theirs - ours))
        if weights_db < least_db:
            words = f"its weights are wrong (SQNR {weights_db:.1f} dB)"
            cause = _find_factor(ours, theirs, FEW_WEIGHTS)
            cause = cause or _find_order(ours, theirs, FEW_WEIGHTS)
            cause = cause or _find_change(exact, actual)  # square weights may be matched transposed
            if cause is None:
                return LayerExplanation(step_table.WRONG_WEIGHTS, words)
            return LayerExplanation(cause.kind, f"{words}: {cause.words}")

    # Then blame the bias, or the rounding of the output
    if biases is not None:
        bias = _find_bias(exact, actual, *biases)
        if bias is not None:
            return bias
    if levels is not None:
        own = exact if fp32 is None else fp32
        rounding = _find_rounding(exact, actual, levels, fp32=own)
        if rounding is not None:
            return rounding

    # Otherwise look for a change of the whole output
    change = _find_change(exact, actual)
    if change is not None:
        return change
    if to_db(power(exact), power(actual - exact)) >= weights_db - NEAR_DB:
        words = f"its weights are rounded coarsely (SQNR {weights_db:.1f} dB)"
        return LayerExplanation("", words)
    if weights is not None:
        words = (
            f"its weights are right (SQNR {weights_db:.1f} dB), and no single change explains it"
        )
    else:
        words = "no single scale, bias or range explains it, and its weights could not be compared"
    return LayerExplanation(step_table.UNEXPLAINED, words)


def _find_change(exact: Array, actual: Array) -> LayerExplanation | None:
    """Return an explanation by a factor, a constant or an order of channels; None if none fits."""
    for axis in dict.fromkeys((1, exact.ndim - 1)):
        expected = _channels_first(exact, axis)
        got = _channels_first(actual, axis)
        for find in (_find_factor, _find_shift, _find_order):
            fault = find(expected, got)
            if fault is not None:
                return fault
    return None


def _find_bias(exact: Array, actual: Array, ours: Array, theirs: Array) -> LayerExplanation | None:
    """Return an explanation if FP32's bias would remove more than half of the noise.

    A different bias alone is not a fault, because a quantizer may correct it for the rounding of
    the weights. Values that are 0 in FP32 or in the file do not count, because a ReLU after the
    layer may have cut them.
    """
    if exact.ndim < 2:
        return None
    axes = [axis for axis in (1, exact.ndim - 1) if exact.shape[axis] == len(ours)]
    if not axes:
        return None

    # Find the noise that is left with FP32's bias, where no ReLU may hide it
    expected = _channels_first(exact, axes[0])
    got = _channels_first(actual, axes[0])
    seen = (expected != 0) & (got != 0)
    shifts = (ours - theirs)[:, np.newaxis]
    signal = np.where(seen, expected, 0)
    noise = np.where(seen, got - expected, 0)
    left = np.where(seen, got + shifts - expected, 0)
    if np.square(left).sum() >= np.square(noise).sum() / 2:
        return None

    # Name the channels whose bias differs most
    differences = np.abs(ours - theirs)
    named = []
    for channel in np.argsort(-differences, kind="stable")[:NAMED]:
        if differences[channel] > LEFT * differences.max():
            named.append(f"{channel} ({theirs[channel]:.3g} instead of {ours[channel]:.3g})")
    left_db = to_db(power(signal), power(left))
    listed = ", ".join(named)
    words = f"its bias differs from FP32's, which would leave {left_db:.1f} dB: channel {listed}"
    return LayerExplanation(step_table.WRONG_BIAS, words, certain=True)


def _find_lost_weights(ours: Array, theirs: Array) -> LayerExplanation | None:
    """Return an explanation if weights are NaN, infinite, or all zero in the file only."""
    if not np.isfinite(ours).all() or not ours.any():
        return None
    is_finite = np.isfinite(_flatten(theirs)).all(axis=1)
    if not is_finite.all():
        channels = ", ".join(map(str, np.flatnonzero(~is_finite)[:NAMED]))
        words = f"its weights in the file are NaN or infinite: channel {channels}"
        return LayerExplanation(step_table.WRONG_WEIGHTS, words, certain=True)
    if not theirs.any():
        words = "its weights in the file are all zero"
        return LayerExplanation(step_table.WRONG_WEIGHTS, words, certain=True)
    return None


def _find_rounding(
    exact: Array, actual: Array, levels: Levels, fp32: Array
) -> LayerExplanation | None:
    """Return an explanation if rounding to the levels explains more than half of the noise.

    A range that holds FP32's own values is right, even if an error in an earlier layer pushes
    values beyond it.

    Args:
        fp32: see `explain`.
    """
    rounded = levels.round(exact)
    if power(actual - rounded) >= power(actual - exact) / 2:
        return None

    # Blame the ends of the range if they cause most of the rounding noise
    cut = power(np.clip(exact, levels.low, levels.high) - exact)
    if cut > power(rounded - exact) / 2:
        cut_fp32 = power(np.clip(fp32, levels.low, levels.high) - fp32)
        if cut_fp32 < LEFT * cut:
            return LayerExplanation("", "its range cuts values that an error before it makes")
        words = f"its range in the file, {levels}, cuts values of {exact.min():.4g} to "
        return LayerExplanation(step_table.CLIPPED, f"{words}{exact.max():.4g}")
    if max(-levels.low, levels.high) >= UNUSED * np.abs(exact).max(initial=0):
        words = f"its range in the file, {levels}, is far wider than its values, "
        return LayerExplanation("", f"{words}{exact.min():.4g} to {exact.max():.4g}")
    return LayerExplanation("", f"rounding to its levels, {levels.step:.3g} apart")


def _flatten(weights: Array) -> Matrix:
    """Return weights [channels, ...] as a matrix [channels, rest]."""
    return weights.reshape(len(weights), -1).astype(np.float64)


def _channels_first(values: Array, axis: int) -> Matrix:
    """Return values as a matrix [channels, rest]; a vector or a number has one channel."""
    if values.ndim < 2:
        return values.reshape(1, -1).astype(np.float64)
    return np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1).astype(np.float64)


def _find_factor(exact: Matrix, actual: Matrix, few: int = FEW) -> LayerExplanation | None:
    """Return an explanation if the values are FP32's times one factor, or one for each channel.

    Args:
        few: the least number of values with which a channel gets its own factor.
    """
    # Fit one factor by least squares
    noise = np.square(actual - exact).sum()
    whole = (exact * actual).sum() / max(np.square(exact).sum(), np.finfo(float).tiny)
    if abs(whole - 1) > OFF and np.square(actual - whole * exact).sum() < LEFT * noise:
        words = f"its values are {whole:.3g} times those of FP32: a scale"
        return LayerExplanation(step_table.WRONG_SCALE, words)

    # Otherwise fit a factor for each channel
    squares = np.maximum(np.square(exact).sum(axis=1), np.finfo(float).tiny)
    factors = (exact * actual).sum(axis=1) / squares
    left = np.square(actual - factors[:, np.newaxis] * exact).sum()
    if exact.shape[1] < few or left >= LEFT * noise:
        return None
    named = []
    for channel in _worst_channels(exact, actual):
        named.append(f"{channel} ({factors[channel]:.3g} times)")
    words = f"a scale of its channels is wrong: {', '.join(named)}"
    return LayerExplanation(step_table.WRONG_SCALE, words)


def _find_shift(exact: Matrix, actual: Matrix) -> LayerExplanation | None:
    """Return an explanation if the values differ by one constant in each channel.

    Values that are 0 in FP32 or in the file do not count, because a ReLU after the layer may have
    cut them.
    """
    seen = (exact != 0) & (actual != 0)
    counts = np.maximum(seen.sum(axis=1), 1)
    shifts = np.where(seen, actual - exact, 0).sum(axis=1) / counts
    rest = np.where(seen, actual - exact - shifts[:, np.newaxis], 0)
    noise = np.where(seen, actual - exact, 0)

    # Too few values say nothing about a constant
    if seen.sum() < FEW * len(exact) or np.square(rest).sum() >= LEFT * np.square(noise).sum():
        return None
    named = []
    for channel in _worst_channels(exact, actual):
        named.append(f"{channel} ({shifts[channel]:+.3g})")
    words = f"its channels differ by a constant, as of a wrong bias: {', '.join(named)}"
    return LayerExplanation(step_table.WRONG_BIAS, words)


def _find_order(exact: Matrix, actual: Matrix, few: int = FEW) -> LayerExplanation | None:
    """Return an explanation if the channels are those of FP32 in another order.

    Args:
        few: least number of values of a channel to recognize it.
    """
    channels = len(exact)
    if not 2 <= channels <= 4096 or exact.shape[1] < few:
        return None

    # Match the channels by correlation, which must pair all of them
    with np.errstate(invalid="ignore", divide="ignore"):
        alike = np.nan_to_num(np.corrcoef(exact, actual)[:channels, channels:])
    order = alike.argmax(axis=1)  # the file's channel for each channel of FP32
    if len({*order.tolist()}) < channels or (order == np.arange(channels)).all():
        return None
    noise = np.square(actual - exact).sum()
    if np.square(actual[order] - exact).sum() >= LEFT * noise:
        return None
    words = f"its channels are in another order: {order[:NAMED].tolist()} ..."
    return LayerExplanation(step_table.CHANNEL_ORDER, words)


def _worst_channels(exact: Matrix, actual: Matrix) -> list[int]:
    """Return the noisiest channels, at most `NAMED`, until they hold nine tenths of the noise."""
    noise = np.square(actual - exact).sum(axis=1)
    order = np.argsort(-noise, kind="stable")
    count = int(np.searchsorted(np.cumsum(noise[order]), (1 - LEFT) * noise.sum())) + 1
    worst: list[int] = order[: min(count, NAMED)].tolist()
    return worst
