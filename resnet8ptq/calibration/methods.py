"""Calibration methods, which turn the statistics of an activation into a range [low, high].

The statistics of a tensor are its range in each batch of calibration samples and, for the methods
that need it, a histogram (`calibration.observer`).
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import rel_entr

from resnet8ptq.calibration.observer import TensorObserver
from resnet8ptq.calibration.statistics import Range, TensorStats
from resnet8ptq.calibration.tails import TAIL
from resnet8ptq.config.schema import CalibConfig
from resnet8ptq.core.console import track
from resnet8ptq.core.errors import QuantizationError
from resnet8ptq.core.registry import look_up
from resnet8ptq.data.dataset import Split

Batch = NDArray[np.float32]


def minmax(stats: TensorStats, config: CalibConfig) -> Range:
    """Return the smallest and the largest value."""
    return stats.low, stats.high


def moving_average(stats: TensorStats, config: CalibConfig) -> Range:
    """Return the exponential moving averages of each batch's smallest and largest value.

    `average <- (1 - c) * average + c * batch` with c = `config.averaging_constant`, starting with
    the first batch. The result depends on `config.batch_size` and on the order of the samples.
    Source: B. Jacob et al., "Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference", CVPR 2018, section 3.1. torch's MovingAverageMinMaxObserver
    does the same.
    """
    constant = config.averaging_constant
    low, high = stats.batches[0]
    for batch_low, batch_high in stats.batches[1:]:
        low = (1 - constant) * low + constant * batch_low
        high = (1 - constant) * high + constant * batch_high
    return _within(stats, low, high)


def percentile(stats: TensorStats, config: CalibConfig) -> Range:
    """Return the range of the middle `config.percentile` percent of the values.

    Half of the rest is cut on each side, at edges of the histogram's bins. On the same histogram,
    ONNX Runtime's percentile calibration chooses the same edges. Because it rounds its sums of
    shares, it may choose the next edge where an edge cuts exactly half of the rest.
    """
    if config.percentile == 100:
        return stats.low, stats.high
    below = np.cumsum(stats.counts)  # exact, so that bins between the tails have no effect
    total = int(below[-1])
    cut = _cut_share(config) * total
    edges = stats.edges
    low = edges[int(np.searchsorted(below, cut))]
    high = edges[int(np.searchsorted(below, total - cut))]
    return _within(stats, low, high)


def _cut_share(config: CalibConfig) -> float:
    """Return the share of the values that percentile cuts on each side."""
    return (100.0 - config.percentile) / 200.0


def _ends_in_tails(config: CalibConfig) -> bool:
    """Return whether the range of percentile usually ends in the tails that are counted."""
    return _cut_share(config) <= TAIL / 2


def entropy(stats: TensorStats, config: CalibConfig) -> Range:
    """Return the window around zero with the lowest KL divergence, within the observed range.

    For each candidate window, the distribution is clipped to the window, and is quantized to
    `config.num_quantized_bins` levels. The divergence is that of the clipped distribution from the
    quantized one. Source: S. Migacz, "8-bit Inference with TensorRT", GTC 2017. On the same
    histogram, this method gives the ranges of ONNX Runtime's entropy calibration.
    """
    # Compare windows of `half` bins on each side of the middle bin
    counts = stats.counts
    levels = config.num_quantized_bins
    middle = len(counts) // 2
    halves = range(levels // 2, middle + 1)
    divergences = [_divergence(counts, middle, half, levels) for half in halves]
    half = halves[int(np.argmin(divergences))]
    edges = stats.edges
    return _within(stats, edges[middle - half], edges[min(middle + half + 1, len(counts))])


def _divergence(counts: NDArray[np.int64], middle: int, half: int, levels: int) -> float:
    start = middle - half
    end = min(middle + half + 1, len(counts))
    window = counts[start:end]
    clipped = window.copy()  # the reference, where values outside count in the outermost bins
    clipped[0] += counts[:start].sum()
    clipped[-1] += counts[end:].sum()

    # Quantize the window, then give each level's total evenly to its bins that are not empty
    merged = len(window) // levels  # bins per level; the last level takes the remainder
    whole = merged * levels
    totals = window[:whole].reshape(levels, merged).sum(axis=1)
    totals[-1] += window[whole:].sum()
    occupied = (clipped[:whole] != 0).reshape(levels, merged).sum(axis=1)
    # As in ONNX Runtime, counts are integers, and the remainder of the bins has zeros.
    spread = np.divide(totals, occupied, out=np.zeros(levels), where=occupied > 0).astype(np.int64)
    quantized = np.zeros(len(window), dtype=np.int64)
    quantized[:whole] = np.repeat(spread, merged)
    p = _smooth(clipped)
    q = _smooth(quantized)
    if p is None or q is None:
        return np.inf
    return float(rel_entr(p / p.sum(), q / q.sum()).sum())


def _smooth(counts: NDArray[np.int64]) -> NDArray[np.float64] | None:
    """Move a small count to empty bins, so that the divergence stays finite.

    The result is None if all bins are empty, or if the other bins are so few that each would lose a
    whole count.
    """
    tiny = 0.0001
    empty = counts == 0
    filled = len(counts) - int(empty.sum())
    if not filled:
        return None
    removed = tiny * float(empty.sum()) / filled
    if removed >= 1.0:
        return None
    return counts.astype(np.float64) + np.where(empty, tiny, -removed)


def mse(stats: TensorStats, config: CalibConfig) -> Range:
    """Search the range with the smallest squared error between values and their 8-bit versions.

    Minimizes `sum (x - Q(x))^2` over both ends, where `s = (high - low) / 255`, `z = round(-low/s)`
    and `Q(x) = s * clip(round(x / s), -z, 255 - z)`: 256 levels, one of them zero. Without negative
    (positive) values the search keeps the lower (upper) end at zero. It tries 17 fractions of each
    end, then refines three times around the best. Source: M. Nagel et al., "A White Paper on Neural
    Network Quantization", 2021, section 3.1.
    """
    # Leave out the empty bins at both ends
    edges = stats.edges
    counts = stats.counts.astype(np.float64)
    counts[len(counts) // 2] -= stats.zeros  # zero is quantized without error in any range
    bins = np.flatnonzero(counts)
    start = bins[0]
    stop = bins[-1] + 1
    edges = edges[start : stop + 1]
    counts = counts[start:stop]
    ends = np.array([min(stats.low, 0.0), max(stats.high, 0.0)])

    # A grid of fractions of both ends, refined around the best
    best = np.ones(2)
    least = _squared_error(edges, counts, *ends)
    for spacing, reach in ((1 / 16, 16), (1 / 64, 4), (1 / 256, 4), (1 / 1024, 4)):
        offsets = spacing * np.arange(-reach, reach + 1)
        tried = [[1.0], [1.0]]  # an end at zero stays there
        for side in np.flatnonzero(ends):
            tried[side] = np.unique(np.clip(best[side] + offsets, 1 / 1024, 1)).tolist()
        for fractions in itertools.product(*tried):
            error = _squared_error(edges, counts, *(fractions * ends))
            if error < least:
                best = np.array(fractions)
                least = error
    return _within(stats, *(best * ends))


def _squared_error(
    edges: NDArray[np.float64], counts: NDArray[np.float64], low: float, high: float
) -> float:
    """Sum `(x - Q(x))^2` over the bins between `edges`, with values spread evenly within each.

    The integral has a closed form. With k the level of x and r = x - ks its error, each full cell
    adds s^3 / 12, and the last cell adds r^3 / 3. Beyond the ends of the range, r is not limited to
    s / 2.
    """
    step = (high - low) / 255
    zero_point = np.rint(-low / step)
    levels = np.clip(np.rint(edges / step), -zero_point, 255 - zero_point)
    errors = edges - levels * step
    integrals = levels * step**3 / 12 + errors * errors * errors / 3  # ** 3 is many times slower
    return float(counts @ (np.diff(integrals) / np.diff(edges)))


def _within(stats: TensorStats, low: float, high: float) -> Range:
    """Limit both ends to the observed range, because a bin's edge may lie outside that range."""
    low = min(max(float(low), stats.low), stats.high)
    high = min(max(float(high), stats.low), stats.high)
    return low, max(low, high)


@dataclass(frozen=True)
class Method:
    """A calibration method.

    Attributes:
        choose: returns the range for a tensor's statistics; None if torch chooses the range.
        parameters: the keys of `calib` that the method reads.
        histogram: whether the method reads the histogram of `TensorStats`.
        reads_tails: returns whether the bins near both ends of the histogram usually suffice.
    """

    choose: Callable[[TensorStats, CalibConfig], Range] | None
    parameters: tuple[str, ...] = ()
    histogram: bool = False
    reads_tails: Callable[[CalibConfig], bool] = lambda config: False


METHODS = {
    "minmax": Method(minmax),
    "moving_average": Method(moving_average, ("averaging_constant", "batch_size")),
    "entropy": Method(entropy, ("num_bins", "num_quantized_bins"), histogram=True),
    "percentile": Method(
        percentile, ("percentile", "num_bins"), histogram=True, reads_tails=_ends_in_tails
    ),
    "mse": Method(mse, ("num_bins",), histogram=True),
    "histogram": Method(None, ("batch_size",)),  # torch's own observer
}
SHARED = [name for name, method in METHODS.items() if method.choose]  # methods of every framework


def find_method(name: str) -> Method:
    """Return a method by name; raise `ConfigError` for an unknown name."""
    return look_up("calib.name", name, METHODS)


def describe_method(config: CalibConfig) -> dict[str, str | int | float]:
    """Return the method's name and the parameters that it reads."""
    description: dict[str, str | int | float] = {"name": config.name}
    for key in find_method(config.name).parameters:
        description[key] = getattr(config, key)
    return description


def make_observer(config: CalibConfig) -> TensorObserver:
    """Return an observer of the statistics that the method `config.name` reads."""
    return TensorObserver(counting=find_method(config.name).histogram)


def find_range(stats: TensorStats, config: CalibConfig) -> Range:
    """Return the range [low, high] that `config.name` chooses for a tensor.

    The range of a constant tensor starts and ends at its value.

    Raises:
        QuantizationError: a value is NaN or infinite.
    """
    if not stats.is_finite:
        raise QuantizationError("an activation of the calibration samples is NaN or infinite")
    if stats.low == stats.high:
        return stats.low, stats.high
    choose = find_method(config.name).choose
    assert choose is not None  # torch's own method does not call this
    return choose(stats, config)


def run_pass(
    calibration: Split, config: CalibConfig, at_once: int | None = None
) -> Iterator[tuple[Batch, bool]]:
    """Yield the calibration samples in batches [n, ...], with a progress bar.

    Args:
        config: has the batch size, which the network's largest batch limits.
        at_once: the largest number of samples at once; larger batches are split. None for the
            limits of the network and of the memory budget, see `Split.limit`.

    Yields:
        The samples, and whether they start a batch.
    """
    size = min(config.batch_size, calibration.at_once or config.batch_size)
    step = min(size, at_once or calibration.limit(size))

    # List the steps first, so that the progress bar knows their number
    every = np.arange(len(calibration))
    steps = []
    for part in calibration.parts(size, padded=False):
        indices = every[part]
        for start in range(0, len(indices), step):
            steps.append((indices[start : start + step], start == 0))
    for chosen, first in track(steps, "Calibrating"):
        yield calibration.inputs(chosen), first
