"""Ranges against ONNX Runtime's own on the same histograms, and properties that any method has."""

import contextlib
import io
import warnings
from dataclasses import fields, replace

import numpy as np
import pytest
import scipy.stats
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnxruntime.quantization.calibrate import HistogramCollector

from resnet8ptq.calibration import methods
from resnet8ptq.calibration.methods import find_range
from resnet8ptq.calibration.observer import TensorObserver
from resnet8ptq.calibration.statistics import Range, TensorStats
from resnet8ptq.config.schema import CalibConfig, DtypeConfig
from resnet8ptq.core import cache, machine
from resnet8ptq.data import locate, registry
from resnet8ptq.data.dataset import Split
from resnet8ptq.data.sampling import draw_calibration
from resnet8ptq.models import model
from tests.helpers.arrays import TENSORS
from tests.helpers.configs import make_config as make_run_config
from tests.helpers.factories import THREADS, quantize_network, quantizer_of

BINS, LEVELS = 512, 128


def make_config(
    name: str, percentile: float = 99.99, bins: int = BINS, levels: int = LEVELS
) -> CalibConfig:
    return CalibConfig(name=name, percentile=percentile, num_bins=bins, num_quantized_bins=levels)


def observe(*batches: np.ndarray, bins: int = BINS) -> TensorStats:
    """Take statistics as the backends do."""
    observer = TensorObserver(counting=True)
    for batch in batches:
        observer.observe(batch)
    return observer.stats(bins)


def draw(name: str, seed: int = 0, count: int = 20_000) -> np.ndarray:
    random = np.random.default_rng(seed)
    normal = random.standard_normal(count)
    match name:
        case "gaussian":
            values = normal
        case "relu":
            values = np.maximum(normal, 0)
        case "shifted":
            values = 3 * normal - 4
        case "heavy tail":
            values = random.standard_t(2, count)
        case "uniform":
            values = random.uniform(-1, 1, count)
        case "exponential":
            values = random.exponential(2.0, count)
        case "two spikes":
            values = np.where(normal > 0, 1.0, -0.25) + 0.001 * random.standard_normal(count)
        case "outlier":
            values = np.append(normal, 60.0)
        case _:
            raise ValueError(name)
    return values.astype(np.float32)


DISTRIBUTIONS = [
    *("gaussian", "relu", "shifted", "heavy tail", "uniform", "exponential"),
    *("two spikes", "outlier"),
]


def collector_of(stats: TensorStats, config: CalibConfig) -> HistogramCollector:
    """ONNX Runtime's own calibration, over the histogram in `stats`."""
    collector = HistogramCollector(
        method=config.name,
        symmetric=False,
        num_bins=config.num_bins,
        num_quantized_bins=config.num_quantized_bins,
        percentile=config.percentile,
        scenario="same",
    )
    low, high, threshold = (np.float64(v) for v in (stats.low, stats.high, stats.threshold))
    collector.histogram_dict = {"x": (stats.counts, stats.edges, low, high, threshold)}
    return collector


def range_of_onnxruntime(stats: TensorStats, config: CalibConfig) -> Range:
    with contextlib.redirect_stdout(io.StringIO()):
        result = collector_of(stats, config).compute_collection_result()["x"]
    return float(result[0]), float(result[1])


def entropy_range_of_onnxruntime(stats: TensorStats, config: CalibConfig) -> Range:
    """Return it, or skip the example: float32 sums of a sparse histogram can fail its asserts."""
    try:
        return range_of_onnxruntime(stats, config)
    except AssertionError:
        pytest.skip("ONNX Runtime asserts on this histogram")


def as_wide_as_its_histogram(stats: TensorStats) -> TensorStats:
    """Return statistics in which no candidate is cut to what was seen, so that it can be told."""
    return TensorStats(-stats.threshold, stats.threshold, stats.counts)


def divergence_of(stats: TensorStats, low: float, levels: int) -> float:
    """Score the candidate whose window begins at `low`."""
    middle = len(stats.counts) // 2
    start = int(np.abs(stats.edges - low).argmin())
    return methods._divergence(stats.counts, middle, middle - start, levels)


def squared_error(values: np.ndarray, low: float, high: float) -> float:
    """Quantize `values` to 256 levels, zero among them, and back; sum the squared differences."""
    low, high, exact = min(low, 0.0), max(high, 0.0), values.astype(np.float64)
    scale = (high - low) / 255
    zero_point = np.rint(-low / scale)
    levels = np.clip(np.rint(exact / scale) + zero_point, 0, 255)
    return float(np.square((levels - zero_point) * scale - exact).sum())


# Against ONNX Runtime


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_entropy_is_as_good_as_that_of_onnxruntime(name, seed):
    config = make_config("entropy")
    stats = as_wide_as_its_histogram(observe(draw(name, seed)))
    ours, theirs = find_range(stats, config), entropy_range_of_onnxruntime(stats, config)
    if ours != theirs:  # it sums in float32
        best = divergence_of(stats, ours[0], LEVELS)
        assert best == pytest.approx(divergence_of(stats, theirs[0], LEVELS), rel=1e-4, abs=2e-7)


@pytest.mark.parametrize("name", ["gaussian", "relu", "heavy tail"])
def test_entropy_cuts_to_what_was_seen_as_onnxruntime_does(name):
    config = make_config("entropy")
    stats = observe(draw(name))
    assert find_range(stats, config) == entropy_range_of_onnxruntime(stats, config)


@pytest.mark.slow
def test_entropy_agrees_at_the_default_number_of_bins():
    config = CalibConfig(name="entropy")
    stats = observe(draw("relu"), bins=config.num_bins)
    assert find_range(stats, config) == entropy_range_of_onnxruntime(stats, config)


@pytest.mark.parametrize("percentile", [51.0, 90.0, 99.0, 99.9, 99.99, 99.999])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_percentile_is_that_of_onnxruntime(name, percentile):
    """Of a prime number of values, no edge cuts exactly the share, where its rounding decides."""
    config = make_config("percentile", percentile=percentile)
    stats = observe(draw(name, count=19_996 if name == "outlier" else 19_997))
    assert find_range(stats, config) == range_of_onnxruntime(stats, config)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_middle_100_percent_are_all_values(name):
    stats = observe(draw(name))
    assert find_range(stats, make_config("percentile", percentile=100.0)) == (stats.low, stats.high)


# By definition


def smooth(counts: np.ndarray) -> np.ndarray | None:
    """Give each empty bin a ten-thousandth, taken evenly from the others; None if it is too much.

    J. Han et al., "Data Mining: Concepts and Techniques", 2011, section 2.4.8.
    """
    empty = counts == 0
    if empty.all() or empty.sum() >= 10_000 * (~empty).sum():
        return None
    return np.where(empty, 1e-4, counts - 1e-4 * empty.sum() / max((~empty).sum(), 1))


def divergence_by_definition(counts: np.ndarray, half: int, levels: int) -> float:
    """Score the candidate that keeps `half` bins on either side of the one in the middle."""
    start, end = len(counts) // 2 - half, min(len(counts) // 2 + half + 1, len(counts))
    window = counts[start:end]
    clipped, quantized = window.copy(), np.zeros(len(window))
    clipped[0] += counts[:start].sum()
    clipped[-1] += counts[end:].sum()
    width = len(window) // levels
    for first in range(0, levels * width, width):
        last = len(window) if first == (levels - 1) * width else first + width
        occupied = np.count_nonzero(clipped[first : first + width])
        total = window[first:last].sum()
        quantized[first : first + width] = total // occupied if occupied else 0
    p, q = smooth(clipped), smooth(quantized)
    return np.inf if p is None or q is None else float(scipy.stats.entropy(p, q))


histograms = st.sampled_from([32, 33, 40, 47]).flatmap(
    lambda bins: arrays.arrays(
        np.int64, bins, elements=st.one_of(st.just(0), st.just(0), st.integers(0, 1000))
    )
)


@given(counts=histograms, levels=st.sampled_from([4, 8, 16]))
@example(np.ones(32, np.int64), 16)
def test_entropy_is_the_least_divergence_of_all_candidates(counts, levels):
    middle = len(counts) // 2
    halves = range(levels // 2, middle + 1)
    expected = [divergence_by_definition(counts, half, levels) for half in halves]
    result = [methods._divergence(counts, middle, half, levels) for half in halves]
    assert result == pytest.approx(expected, rel=1e-9, abs=1e-12)
    stats = TensorStats(-1.0, 1.0, counts)
    low, high = find_range(stats, make_config("entropy", bins=len(counts), levels=levels))
    half = halves[int(np.argmin(result))]
    assert (low, high) == (
        stats.edges[middle - half],
        stats.edges[min(middle + half + 1, len(counts))],
    )


@pytest.mark.parametrize(("bins", "infinite"), [(10_000, False), (10_001, True), (20_001, True)])
def test_a_histogram_with_too_many_empty_bins_has_no_divergence(bins, infinite):
    counts = np.zeros(bins, np.int64)
    counts[0] = 2
    smoothed = methods._smooth(counts)
    assert (smoothed is None) is infinite
    if smoothed is not None:
        assert smoothed.sum() == pytest.approx(2)
    assert np.isinf(methods._divergence(counts, bins // 2, bins // 2, LEVELS)) == infinite


@given(
    counts=arrays.arrays(np.float64, 6, elements=st.integers(0, 9)),
    ends=st.tuples(st.floats(-4, 0), st.floats(0.01, 4)),
    threshold=st.floats(0.01, 8),
)
@example(np.ones(6), (-1.0, 0.5), 2.0)
@settings(max_examples=50)
def test_the_squared_error_is_that_of_values_spread_evenly_in_their_bins(counts, ends, threshold):
    edges = np.linspace(-threshold, threshold, 7)
    points = edges[:-1, None] + (edges[1] - edges[0]) * (np.arange(4000) + 0.5) / 4000
    expected = sum(
        count * squared_error(points_of_bin, *ends) / 4000
        for count, points_of_bin in zip(counts, points, strict=True)
    )
    assert methods._squared_error(edges, counts, *ends) == pytest.approx(expected, rel=1e-3)


@given(st.floats(1 / 1024, 1), st.floats(1 / 1024, 1))
@example(1.0, 1 / 1024)
@settings(max_examples=50)
def test_mse_finds_the_least_error_to_a_thousandth(low, high):
    def far_off(edges, counts, a, b):
        return (a + low) ** 2 + (b - 4 * high) ** 2

    stats = TensorStats(-1.0, 4.0, np.ones(64, np.int64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods, "_squared_error", far_off)
        ends = np.array(find_range(stats, CalibConfig(name="mse"))) / (-1, 4)
        patch.setattr(methods, "_squared_error", lambda *_: 1.0)
        assert find_range(stats, CalibConfig(name="mse")) == (-1, 4)  # minmax wins a tie
    assert (ends * 1024 % 1 == 0).all()
    np.testing.assert_allclose(ends, (low, high), atol=0.5001 / 1024)


# By hand


def test_a_tensor_may_be_empty():
    """As the boxes that a detector finds are, in a picture without any."""
    none = np.zeros((0, 4), np.float32)
    assert (observe(none).low, observe(none).high) == (0, 0)
    stats = observe(none, np.array([-1, 2], np.float32), none)
    assert (stats.low, stats.high, int(stats.counts.sum())) == (-1, 2, 2)


def test_minmax_is_what_was_seen():
    stats = observe(np.array([-1, 2], np.float32), np.array([[0.5], [-3.25]], np.float32))
    assert find_range(stats, make_config("minmax")) == (-3.25, 2.0)


def test_entropy_is_another_range_than_minmax_at_the_default_settings():
    """With as many bins as levels there would be one candidate only: minmax by another name."""
    config = CalibConfig(name="entropy")
    stats = observe(draw("heavy tail"), bins=config.num_bins)
    assert find_range(stats, config) != (stats.low, stats.high)


def range_in_one_pass(config: CalibConfig) -> Range:
    """Find the range of 700 samples as the backends do."""
    samples = Split(draw("heavy tail", count=700)[:, None], None, "here")
    observer = methods.make_observer(config)
    for batch, first in methods.run_pass(samples, config):
        observer.observe(batch, first)
    return find_range(observer.stats(config.num_bins), config)


@pytest.mark.parametrize("name", methods.SHARED)
def test_a_method_finds_its_range_in_what_its_own_observer_keeps(name):
    """Without a histogram, if the method reads none."""
    config = make_config(name)
    stats = observe(*np.array_split(draw("heavy tail", count=700), 7))
    assert range_in_one_pass(config) == find_range(stats, config)


@pytest.mark.parametrize("name", methods.SHARED)
def test_what_changes_a_range_is_in_the_description_of_its_method(name):
    """It is part of the key under which the cache keeps ranges, and nothing else is."""
    config = make_config(name, percentile=99)
    others = {
        "batch_size": 70,
        "percentile": 90.0,
        "num_bins": 256,
        "num_quantized_bins": 32,
        "averaging_constant": 0.5,
    }
    read = {key for item in methods.METHODS.values() for key in item.parameters}
    assert {*others} == read, "`others` has one value for each setting that a method reads"
    changed = {key: replace(config, **{key: value}) for key, value in others.items()}
    before = range_in_one_pass(config), methods.describe_method(config)
    for key, other in changed.items():
        after = range_in_one_pass(other), methods.describe_method(other)
        assert (after[0] != before[0]) == (after[1] != before[1]), key


@pytest.mark.parametrize("name", methods.METHODS)
def test_the_settings_of_a_method_count_as_having_an_effect(name):
    """`only` in the schema names the methods that read a setting; else the run warns of it."""
    for item in fields(CalibConfig):
        limit = item.metadata["only"].get("calib.name") if item.metadata else None
        if limit is not None:
            reads = item.name in methods.METHODS[name].parameters
            assert limit.holds(name) == reads, f"{item.name}: see `only` in CalibConfig"


@pytest.mark.parametrize("name", methods.METHODS)
def test_one_pass_takes_all_batches(name):
    images = np.arange(5, dtype=np.float32)[:, None]
    split = Split(images, None, "here")
    batches = list(methods.run_pass(split, CalibConfig(name=name, batch_size=2)))
    assert [len(batch) for batch, _ in batches] == [2, 2, 1]
    assert all(first for _, first in batches)
    assert np.array_equal(np.concatenate([batch for batch, _ in batches]), images)


def test_moving_average_by_hand():
    stats = observe(*(np.array(batch, np.float32) for batch in ([-1, 2], [-3, 6], [0, 0])))
    config = CalibConfig(name="moving_average", averaging_constant=0.25)
    assert find_range(stats, config) == (-1.125, 2.25)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_mse_is_as_good_as_a_search_over_the_values_themselves(name):
    values = draw(name)
    stats = observe(values, bins=2048)
    result = squared_error(values, *find_range(stats, CalibConfig(name="mse")))
    fractions = np.linspace(0.85, 1, 16)
    least = min(
        squared_error(values, low * stats.low, high * stats.high)
        for low in fractions
        for high in fractions
    )
    assert result <= 1.005 * least
    assert result <= 1.0001 * squared_error(values, stats.low, stats.high)


# Properties

METHODS = [
    *(make_config(name, bins=64, levels=16) for name in methods.SHARED),
    *(make_config("percentile", percentile, bins=64, levels=16) for percentile in (50.5, 90, 100)),
]
method = st.sampled_from(METHODS)


@given(values=TENSORS, config=method)
def test_a_range_lies_in_order_and_within_what_was_seen(values, config):
    stats = observe(values, bins=64)
    low, high = find_range(stats, config)
    assert stats.low <= low <= high <= stats.high


@pytest.mark.parametrize("config", METHODS, ids=lambda config: config.name)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_range_far_from_zero_lies_in_order(config, sign):
    """All of it falls into few bins at one end of the histogram."""
    values = (sign * np.linspace(0.995, 1, 1000)).astype(np.float32)
    stats = observe(values, bins=64)
    low, high = find_range(stats, config)
    assert stats.low <= low <= high <= stats.high


@given(values=TENSORS)
@settings(max_examples=30)
def test_mse_costs_no_more_than_minmax(values):
    """Two bins of slack: an error is a distance to a level, and each value moves within its bin."""
    assume(values.min() < values.max())
    stats = observe(values, bins=1024)
    mse, minmax = (
        np.sqrt(squared_error(values, *find_range(stats, CalibConfig(name=name))) / values.size)
        for name in ("mse", "minmax")
    )
    assert mse <= minmax + 2 * (2 * stats.threshold / 1024)


@given(values=TENSORS, power=st.integers(-6, 6))
@settings(max_examples=20)
def test_mse_goes_with_the_scale(values, power):
    config = make_config("mse", bins=64)
    scale = np.float32(2.0**power)
    low, high = find_range(observe(values, bins=64), config)
    assert find_range(observe(scale * values, bins=64), config) == (scale * low, scale * high)


@pytest.mark.parametrize("name", ["relu", "exponential"])
def test_mse_of_values_on_one_side_of_zero_keeps_the_other_end(name):
    for sign in (1, -1):
        stats = observe(sign * draw(name))
        low, high = find_range(stats, make_config("mse"))
        assert (low if sign == 1 else high) == (stats.low if sign == 1 else stats.high)


@pytest.mark.parametrize("bins", [276, 512])  # zero lies left of the middle of 276, by rounding
def test_mse_counts_no_error_for_zeros(bins):
    values = draw("relu")[:2000] * np.float32(0.7)
    padded = np.append(values, np.zeros(10**6, np.float32))
    without, among = (
        find_range(observe(v, bins=bins), make_config("mse")) for v in (values[values != 0], padded)
    )
    assert among[1] == without[1]


@pytest.mark.parametrize("sign", [1, -1])
def test_mse_keeps_zero_among_the_levels_of_values_far_from_it(sign):
    far = sign * (np.float32(4) + draw("exponential")[:2000])
    ranges = [
        find_range(observe(v, bins=512), make_config("mse"))
        for v in (far, np.append(far, np.float32(0)))
    ]
    outer = [high if sign == 1 else low for low, high in ranges]
    assert outer[0] == outer[1] != sign * np.abs(far).max()


batches = st.lists(TENSORS, min_size=1, max_size=6)


@given(values=batches)
@settings(max_examples=50)
def test_moving_average_with_constant_1_is_the_last_batch(values):
    config = CalibConfig(name="moving_average", averaging_constant=1.0)
    stats = observe(*values)
    assume(stats.low < stats.high)
    assert find_range(stats, config) == (values[-1].min(), values[-1].max())


@given(values=batches, constant=st.floats(0.001, 1))
@settings(max_examples=25)
def test_moving_average_is_that_of_torch(values, constant):
    torch = pytest.importorskip("torch")
    from torch.ao.quantization.observer import MovingAverageMinMaxObserver

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.ao is announced to go away
        warnings.simplefilter("ignore", FutureWarning)
        observer = MovingAverageMinMaxObserver(averaging_constant=constant)
    for batch in values:
        observer(torch.from_numpy(batch))
    stats = observe(*values)
    result = find_range(stats, CalibConfig(name="moving_average", averaging_constant=constant))
    theirs = (observer.min_val.item(), observer.max_val.item())
    assert result == pytest.approx(theirs, rel=1e-5, abs=1e-5 * stats.threshold)


@given(values=TENSORS, cuts=st.tuples(st.floats(50.01, 100), st.floats(50.01, 100)))
def test_a_higher_percentile_is_no_narrower(values, cuts):
    stats = observe(values, bins=64)
    narrow, wide = (
        find_range(stats, make_config("percentile", percentile, bins=64))
        for percentile in sorted(cuts)
    )
    assert wide[0] <= narrow[0]
    assert wide[1] >= narrow[1]


@pytest.mark.parametrize("config", METHODS, ids=lambda config: config.name)
@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 1e-30, -1e30])
def test_a_constant_tensor_keeps_its_value(config, value):
    values = np.full((3, 4), value, dtype=np.float32)
    assert find_range(observe(values, values, bins=64), config) == (values[0, 0], values[0, 0])


@pytest.mark.parametrize("config", METHODS, ids=lambda config: config.name)
@pytest.mark.parametrize("scale", [1e-30, 1e-40, 1e30])
def test_very_small_and_very_large_tensors_have_ranges(config, scale):
    """Denormal values among them: a layer may well be all but dead."""
    values = (np.linspace(-1, 2, 500) * scale).astype(np.float32)
    low, high = find_range(observe(values, bins=64), config)
    assert values.min() <= low <= high <= values.max()


# On the real network


def test_mse_and_moving_average_keep_more_of_the_logits_than_minmax(real_files, tmp_path):
    """On training samples that did not calibrate; per channel, where activations tell."""
    if not machine.has_vnni():
        pytest.skip("without VNNI 16-bit sums saturate, which drowns the difference")
    config = make_run_config("dtype=u8s8", "per_channel=true", "calib.samples_per_class=20")
    data = locate.find_data(config.data)
    dataset = registry.load(data.name, data.root)
    network = model.load_network(config.model, dataset, cache.folder(None))
    drawn = draw_calibration(dataset, 20, config.seed)
    others = np.setdiff1d(np.arange(700), drawn.indices)[:500]
    images = dataset.train.stored[others].astype(np.float32)

    def logits(dtype: str, name: str) -> np.ndarray:
        changed = replace(config, dtype=DtypeConfig(dtype), calib=replace(config.calib, name=name))
        quantizer = quantizer_of(changed)
        return quantizer.load(
            quantize_network(quantizer, network, drawn.split, tmp_path).path, THREADS
        ).logits(images)

    exact = logits("fp32", "minmax")
    noise = {
        name: np.square(logits("u8s8", name) - exact).sum()
        for name in ("minmax", "mse", "moving_average")
    }
    assert noise["mse"] < noise["minmax"]
    assert noise["moving_average"] < noise["minmax"]
