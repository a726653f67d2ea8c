"""From activation statistics to a range [low, high] for quantization; shared by the backends.

Statistics are taken in two passes over the calibration images: first the range of each tensor,
then, for the methods that need it, a histogram over that range. So the result does not depend on
the batch size or the order of the images (`moving_average` is the exception, by its nature), and
memory stays flat.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import rel_entr

from resnet8ptq.calibration.statistics import Range, TensorStats
from resnet8ptq.config.schema import CalibConfig
from resnet8ptq.core.console import track
from resnet8ptq.core.registry import look_up
from resnet8ptq.data.dataset import Split

Batch = NDArray[np.float32]


def minmax(stats: TensorStats, config: CalibConfig) -> Range:
    """The smallest and the largest value seen."""
    return stats.low, stats.high


def moving_average(stats: TensorStats, config: CalibConfig) -> Range:
    """An exponential moving average of each batch's smallest and largest value.

    `average <- (1 - c) * average + c * batch` with c = `config.averaging_constant`; the first batch
    starts it. So it depends on `config.batch_size` and on the order of the images. Source: B. Jacob
    et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
    Inference", CVPR 2018, section 3.1; as torch's MovingAverageMinMaxObserver.
    """
    constant = config.averaging_constant
    low, high = stats.batches[0]
    for batch_low, batch_high in stats.batches[1:]:
        low = (1 - constant) * low + constant * batch_low
        high = (1 - constant) * high + constant * batch_high
    return _within(stats, low, high)


def percentile(stats: TensorStats, config: CalibConfig) -> Range:
    """The middle `config.percentile` percent: half of the rest is cut on each side."""
    cdf = np.cumsum(stats.counts / stats.counts.sum())
    cut = (100.0 - config.percentile) / 200.0
    edges = stats.edges
    low = edges[int(np.searchsorted(cdf, cut))]
    high = edges[int(np.searchsorted(cdf, 1.0 - cut))]
    return _within(stats, low, high)


def entropy(stats: TensorStats, config: CalibConfig) -> Range:
    """The symmetric threshold of least KL divergence.

    Each candidate clips the distribution to a window around zero, quantizes it to
    `config.num_quantized_bins` levels, and is scored by the divergence of the clipped distribution
    from its quantized self. Source: S. Migacz, "8-bit Inference with TensorRT", GTC 2017; written
    to give the thresholds that ONNX Runtime's entropy calibration gives on the same histogram.
    """
    counts, levels = stats.counts, config.num_quantized_bins
    middle = len(counts) // 2
    halves = range(levels // 2, middle + 1)
    divergences = [_divergence(counts, middle, half, levels) for half in halves]
    half = halves[int(np.argmin(divergences))]
    edges = stats.edges
    return _within(stats, edges[middle - half], edges[min(middle + half + 1, len(counts))])


def _divergence(counts: NDArray[np.int64], middle: int, half: int, levels: int) -> float:
    start, end = middle - half, min(middle + half + 1, len(counts))
    window = counts[start:end]
    clipped = window.copy()  # the reference: what lies outside counts as the outermost bin
    clipped[0] += counts[:start].sum()
    clipped[-1] += counts[end:].sum()

    merged = len(window) // levels  # bins per level; the last level takes the remainder
    whole = merged * levels
    totals = window[:whole].reshape(levels, merged).sum(axis=1)
    totals[-1] += window[whole:].sum()
    occupied = (clipped[:whole] != 0).reshape(levels, merged).sum(axis=1)
    # Whole counts, and none for the remainder, as ONNX Runtime has it.
    spread = np.divide(totals, occupied, out=np.zeros(levels), where=occupied > 0).astype(np.int64)
    quantized = np.zeros(len(window), dtype=np.int64)
    quantized[:whole] = np.repeat(spread, merged)
    return _kl(_smooth(clipped), _smooth(quantized))


def _smooth(counts: NDArray[np.int64]) -> NDArray[np.float64] | None:
    """Give empty bins a little of what the others have, so that the divergence stays finite."""
    tiny = 0.0001
    empty = counts == 0
    filled = len(counts) - int(empty.sum())
    if filled == 0:
        return None
    taken = tiny * float(empty.sum()) / filled
    if taken >= 1.0:
        return None
    return counts.astype(np.float64) + np.where(empty, tiny, -taken)


def _kl(p: NDArray[np.float64] | None, q: NDArray[np.float64] | None) -> float:
    if p is None or q is None:
        return np.inf
    return float(rel_entr(p / p.sum(), q / q.sum()).sum())


def mse(stats: TensorStats, config: CalibConfig) -> Range:
    """The range of least squared error between the values and their 8-bit quantized selves.

    Minimizes `sum (x - Q(x))^2` over both ends, where `s = (high - low) / 255`, `z = round(-low/s)`
    and `Q(x) = s * clip(round(x / s), -z, 255 - z)`: 256 levels, zero among them. An end that was
    never beyond zero stays at zero. Tries 16 fractions of each end, then thrice closer around the
    best; minmax comes first, and wins a tie. Source: M. Nagel et al., "A White Paper on Neural
    Network Quantization", 2021, section 3.1.
    """
    edges, counts = stats.edges, stats.counts.astype(np.float64)
    counts[len(counts) // 2] -= stats.zeros  # zero is quantized without error in any range
    bins = np.flatnonzero(counts)
    seen = slice(bins[0], bins[-1] + 1)
    edges, counts = edges[seen.start : seen.stop + 1], counts[seen]
    ends = np.array([min(stats.low, 0.0), max(stats.high, 0.0)])

    best, least = np.ones(2), _squared_error(edges, counts, *ends)
    for spacing, reach in ((1 / 16, 16), (1 / 64, 4), (1 / 256, 4), (1 / 1024, 4)):
        offsets = spacing * np.arange(-reach, reach + 1)
        lows, highs = (
            np.unique(np.clip(fraction + offsets, 1 / 1024, 1)) if end else [1.0]
            for fraction, end in zip(best, ends, strict=True)
        )
        for fractions in itertools.product(lows, highs):
            error = _squared_error(edges, counts, *(fractions * ends))
            if error < least:
                best, least = np.array(fractions), error
    return _within(stats, *(best * ends))


def _squared_error(
    edges: NDArray[np.float64], counts: NDArray[np.float64], low: float, high: float
) -> float:
    """Sum `(x - Q(x))^2` over the bins between `edges`, the values lying evenly within each.

    Its integral is in closed form: with k the level of x and r = x - ks the error there, a cell
    that is crossed adds s^3 / 12, and the last one r^3 / 3; beyond the ends r just grows.
    """
    step = (high - low) / 255
    zero_point = np.rint(-low / step)
    levels = np.clip(np.rint(edges / step), -zero_point, 255 - zero_point)
    errors = edges - levels * step
    integrals = levels * step**3 / 12 + errors * errors * errors / 3  # ** 3 is many times slower
    return float(counts @ (np.diff(integrals) / np.diff(edges)))


def _within(stats: TensorStats, low: float, high: float) -> Range:
    """Keep both ends within what was seen: an edge may lie beyond, on either side."""
    low, high = (min(max(float(end), stats.low), stats.high) for end in (low, high))
    return low, max(low, high)


@dataclass(frozen=True)
class Method:
    """How a range is chosen.

    Attributes:
        choose: from what is known of a tensor; None where a framework does it by itself.
        parameters: what it reads of `calib` besides its name.
        histogram: whether it needs the second pass.
    """

    choose: Callable[[TensorStats, CalibConfig], Range] | None
    parameters: tuple[str, ...] = ()
    histogram: bool = False


METHODS = {
    "minmax": Method(minmax),
    "moving_average": Method(moving_average, ("averaging_constant", "batch_size")),
    "entropy": Method(entropy, ("num_bins", "num_quantized_bins"), histogram=True),
    "percentile": Method(percentile, ("percentile", "num_bins"), histogram=True),
    "mse": Method(mse, ("num_bins",), histogram=True),
    "histogram": Method(None, ("batch_size",)),  # torch's own observer
}
SHARED = [name for name, method in METHODS.items() if method.choose]  # by all but one framework


def find_method(name: str) -> Method:
    """Return the method of that name; raise `ConfigError` where there is none."""
    return look_up("calib.name", name, METHODS)


def describe_method(config: CalibConfig) -> dict[str, str | int | float]:
    """Return what a range depends on besides the images: the method and its own parameters."""
    parameters = find_method(config.name).parameters
    return {"name": config.name, **{key: getattr(config, key) for key in parameters}}


def find_range(stats: TensorStats, config: CalibConfig) -> Range:
    """Return the range [low, high] that `config.name` chooses for a tensor.

    A tensor that is constant, or never seen to differ from zero, keeps its own value.
    """
    if stats.low == stats.high:
        return stats.low, stats.high
    choose = find_method(config.name).choose
    assert choose is not None  # the framework with a method of its own does not ask
    return choose(stats, config)


def run_pass(
    stage: str, calibration: Split, config: CalibConfig, at_once: int | None = None
) -> Iterator[tuple[Batch, bool]]:
    """Yield the batches [n, ...] of the pass `stage`, with a bar.

    Args:
        at_once: samples at most; larger batches come in parts. None: whole batches.

    Yields:
        Samples, and whether they begin a batch.
    """
    size = min(config.batch_size, calibration.at_once or config.batch_size)
    step, count = min(size, at_once or calibration.limit(size)), len(calibration)
    starts = [
        (start, min(start + step, begin + size, count), start == begin)
        for begin in range(0, count, size)
        for start in range(begin, min(begin + size, count), step)
    ]
    for start, end, first in track(starts, f"Calibrating: {stage}"):
        yield calibration.inputs(slice(start, end)), first


def run_passes(calibration: Split, config: CalibConfig) -> Iterator[tuple[str, Batch]]:
    """Yield (stage, batch) of the passes that `config.name` takes.

    The stages are `ranges` and, where the method needs it, `histograms`. torch's own observer
    (`histogram`) takes one pass.
    """
    for stage in ["ranges", "histograms"] if find_method(config.name).histogram else ["ranges"]:
        for batch, _ in run_pass(stage, calibration, config):
            yield stage, batch
