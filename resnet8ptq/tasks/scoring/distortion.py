"""Measures of the noise that quantization adds to outputs, such as SQNR and KL divergence."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

AT_ONCE = 2**19  # values held in memory, as outputs may be large and mapped from a file
VARIES = 0.1  # an output varies above this spread over samples, relative to the root mean square
UNITS = 10.0  # parts of an output in other units differ by this factor or more
MOST_PARTS = 2**12  # indices of an axis that may join such parts
KERNELS_DB = 30.0  # rounding in integer kernels alone leaves a higher SQNR of outputs

Array = NDArray[Any]
Transform = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def parts(values: Array) -> Iterator[slice]:
    """Yield slices of samples [n, ...] with at most `AT_ONCE` values, or with one sample."""
    rows = max(1, AT_ONCE // max(1, values[:1].size))
    for start in range(0, len(values), rows):
        yield slice(start, min(start + rows, len(values)))


def noise_ratio(signal: Array, values: Array, transform: Transform | None = None) -> float:
    """Return sum (signal - values)**2 / sum signal**2; NaN for a signal of zero.

    Args:
        signal, values: outputs [n, ...] of the baseline and of the model.
        transform: a function that is first applied to each part [k, ...] of both; None for none.
    """
    power = noise = 0.0
    for part in parts(signal):
        exact = signal[part].astype(np.float64)
        noisy = values[part].astype(np.float64)
        if transform is not None:
            exact = transform(exact)
            noisy = transform(noisy)
        power += float((exact**2).sum())
        noise += float(((exact - noisy) ** 2).sum())
    if not power:
        return math.nan
    return noise / power


def is_silent(signal: Array, values: Array) -> bool:
    """Return whether the values are the same for every sample, although the signal varies.

    If all values are zero, they are silent for any signal that is not zero. NaN equals NaN.

    A metric that averages over samples hides such an output if a few samples have most of the
    signal. For example, a network that returned only zeros had a mean error of 23%, and its verdict
    was undecided.

    Args:
        signal, values: an output [n, ...] of the baseline and of the model.
    """
    first = values[:1]
    for part in parts(values):
        held = values[part]
        both_nan = (held != held) & (first != first)
        if not ((held == first) | both_nan).all():
            return False
    if not first.any():
        return any(signal[part].any() for part in parts(signal))
    mean = signal.mean(axis=0, dtype=np.float64)
    return noise_ratio(signal, np.broadcast_to(mean, signal.shape)) > VARIES**2


def to_db(ratio: float) -> float | None:
    """Return the SQNR in dB of a noise ratio, see `noise_ratio`.

    The SQNR is -10 * log10(ratio), from the power of the noise over that of the signal (Jayant and
    Noll, Digital Coding of Waveforms, 1984). The result is None if the SQNR is not finite: without
    noise, with values that are not finite, or with a signal of zero.

    >>> to_db(0.001)
    30.0
    """
    if not 0 < ratio < math.inf:  # also refuses NaN
        return None
    return -10 * math.log10(ratio)


def find_units(signal: Array) -> list[tuple[slice, ...]]:
    """Return indices that cut an output [n, ...] into its parts of different units.

    Many detectors join coordinates in pixels with scores from 0 to 1, along the first or the last
    axis of a sample. In an SQNR over both, the noise of the scores vanishes: YOLO with all scores
    at 0 had 30 dB.

    The size of an index of the axis is the root mean square over samples and positions. A cut lies
    where all sizes on one side are at least `UNITS` times those on the other side, which are not
    all zero. Each side is cut again by the same rule. An axis is not cut if it is longer than
    `MOST_PARTS` or than the number of positions. Outputs of integers, or with fewer than two axes
    for each sample, are one part.

    >>> boxes = np.full((2, 4, 9), 100.0)
    >>> find_units(np.concatenate([boxes, np.full((2, 3, 9), 0.5)], axis=1))
    [(slice(None, None, None), slice(0, 4, None)), (slice(None, None, None), slice(4, 7, None))]
    """
    whole: list[tuple[slice, ...]] = [(slice(None),)]
    if signal.ndim < 3 or signal.dtype.kind != "f":
        return whole
    for axis in (1, signal.ndim - 1):
        count = signal.shape[axis]
        positions = signal[0].size // max(1, count)
        if not 1 < count <= min(positions, MOST_PARTS):
            continue

        # The first axis with a border has all the cuts
        borders = _find_borders(_sizes_along(signal, axis))
        if borders:
            ends = [0, *borders, count]
            before = (slice(None),) * axis
            return [(*before, slice(*pair)) for pair in itertools.pairwise(ends)]
    return whole


def _sizes_along(signal: Array, axis: int) -> NDArray[np.float64]:
    """Return the root mean square of an output [n, ...] at each index of an axis."""
    others = tuple(other for other in range(signal.ndim) if other != axis)
    total = np.zeros(signal.shape[axis])
    for part in parts(signal):
        total += (signal[part].astype(np.float64) ** 2).sum(axis=others)
    return np.sqrt(total * signal.shape[axis] / max(1, signal.size))


def _find_borders(sizes: NDArray[np.float64], start: int = 0) -> list[int]:
    """Return the sorted indices, plus `start`, that begin a part of another unit.

    The rule is that of `find_units`.
    """
    # Find the border with the largest factor
    best = UNITS
    border = 0
    for index in range(1, len(sizes)):
        left = sizes[:index]
        right = sizes[index:]
        smaller = right
        larger = left
        if left.max() < right.max():
            smaller = left
            larger = right
        if smaller.max() > 0 and larger.min() >= best * smaller.max():
            best = larger.min() / smaller.max()
            border = index
    if not border:
        return []

    # Both sides may have further borders
    left_borders = _find_borders(sizes[:border], start)
    right_borders = _find_borders(sizes[border:], start + border)
    return [*left_borders, start + border, *right_borders]


def split_units(
    signal: Sequence[Array], values: Sequence[Array]
) -> tuple[list[int], list[Array], list[Array]]:
    """Return output index, signal and values of each part of each output, see `find_units`.

    Args:
        signal, values: the outputs of the baseline and of the model.
    """
    indices = []
    exact = []
    noisy = []
    for index, (reference, output) in enumerate(zip(signal, values, strict=True)):
        for part in find_units(reference):
            indices.append(index)
            exact.append(reference[part])
            noisy.append(output[part])
    return indices, exact, noisy


def noise_ratios(signal: Sequence[Array], values: Sequence[Array]) -> list[float]:
    """Return the noise ratio of each output: that of its worst part, see `find_units`."""
    ratios = []
    for reference, output in zip(signal, values, strict=True):
        _, exact, noisy = split_units([reference], [output])
        of_parts = list(map(noise_ratio, exact, noisy))
        ratios.append(of_parts[worst_output(exact, of_parts)])
    return ratios


def has_fractions(output: Array) -> bool:
    """Return whether an output [n, ...] holds fractions; NaN counts as one.

    Classes, counts and masks are whole numbers, even as floats. Quantization changes them by whole
    steps or not at all, so an SQNR does not describe the change.
    """
    if output.dtype.kind != "f":
        return False
    for part in parts(output):
        values = output[part]
        if (np.trunc(values) != values).any():
            return True
    return False


def worst_output(signal: Sequence[Array], ratios: Sequence[float]) -> int:
    """Return the index of the output with the highest noise ratio.

    An output of whole numbers is chosen only if no output has fractions. NaN counts as the highest
    ratio, because it belongs to values that are not finite or to a signal of zero.

    Args:
        signal: the outputs of the baseline.
        ratios: the noise ratio of each output.
    """
    if len(ratios) == 1:
        return 0
    every = range(len(ratios))
    candidates = [index for index in every if has_fractions(signal[index])]

    def rank(index: int) -> tuple[bool, float]:
        return math.isnan(ratios[index]), ratios[index]  # NaN is the worst

    return max(candidates or every, key=rank)


def sqnr_db(signal: Sequence[Array], values: Sequence[Array]) -> float | None:
    """Return the SQNR in dB of the worst output; see `worst_output` and `to_db`."""
    ratios = noise_ratios(signal, values)
    return to_db(ratios[worst_output(signal, ratios)])


def sqnr_or_infinity(signal: Sequence[Array], values: Sequence[Array]) -> float:
    """Return `sqnr_db` as a number that can be compared.

    If `sqnr_db` is None, the result is infinite: minus infinity if the values are not finite but
    the signal is, and otherwise plus infinity.
    """
    value = sqnr_db(signal, values)
    if value is not None:
        return value
    return -math.inf if _is_finite(signal) and not _is_finite(values) else math.inf


def _is_finite(outputs: Sequence[Array]) -> bool:
    return all(np.isfinite(output).all() for output in outputs)


def sqnr_of_each(
    names: Sequence[str], signal: Sequence[Array], values: Sequence[Array]
) -> dict[str, float | None]:
    """Return the SQNR in dB of each output by metric name; empty with fewer than two names.

    Args:
        names: the outputs' names in MLflow; empty if they are not known.
    """
    if len(names) < 2:
        return {}
    ratios = zip(names, noise_ratios(signal, values), strict=True)
    return {f"output/{name}/sqnr_db": to_db(ratio) for name, ratio in ratios}


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return probabilities [n, classes] of logits [n, classes]."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True), dtype=np.float64)
    return (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)


def kl_divergence(
    probabilities: NDArray[np.float32], baseline: NDArray[np.float32], smallest: float
) -> float:
    """Return the mean of KL(baseline || model) over samples, in nats (Kullback and Leibler, 1951).

    Args:
        probabilities, baseline: [n, classes].
        smallest: both are first raised to at least this value and normalized, because an 8-bit
            softmax has exact zeros, and rows that do not sum to 1.
    """
    p = raise_to(baseline, smallest)
    q = raise_to(probabilities, smallest)
    return float((p * np.log(p / q)).sum(axis=1).mean())


def raise_to(probabilities: NDArray[np.floating], smallest: float) -> NDArray[np.float64]:
    """Return probabilities [n, classes], raised to at least `smallest` and normalized."""
    raised = np.maximum(probabilities.astype(np.float64), smallest)
    return np.asarray(raised / raised.sum(axis=1, keepdims=True))
