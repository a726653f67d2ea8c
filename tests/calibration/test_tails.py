"""The counts of the tails: ranges by percentile as with the counts of all values."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resnet8ptq.calibration import tails
from resnet8ptq.calibration.methods import find_range
from resnet8ptq.calibration.observer import TensorObserver
from resnet8ptq.calibration.tails import TailObserver
from resnet8ptq.config.schema import CalibConfig
from tests.helpers.arrays import NUMBERS

BINS = 64
LIMITS = st.tuples(NUMBERS, NUMBERS).map(sorted) | st.just((-np.inf, np.inf))


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first 500 values set the tails."""
    monkeypatch.setattr(tails, "_FIRST_VALUES", 500)
    monkeypatch.setattr(tails, "_FIRST_SAMPLES", 1)
    monkeypatch.setattr(tails, "_BLOCK", 128)


def observe(observer: Any, calls: Sequence[np.ndarray]) -> Any:
    for values in calls:
        observer.observe(values)
    return observer


def draw_calls(seed: int, kind: str, sizes: Sequence[int], scale: float) -> list[np.ndarray]:
    """Return the values of calls, the later ones `scale` times as large as the first."""
    random = np.random.default_rng(seed)
    calls = []
    for number, size in enumerate([500, *sizes]):
        values = random.standard_normal(size).astype(np.float32)
        if kind == "relu":
            values = np.maximum(values, 0)
        if kind == "steps":
            values = np.round(values)
        calls.append(values * np.float32(scale if number else 1))
    return calls


@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["normal", "relu", "steps"]),
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=4),
    scale=st.sampled_from([0.0, 0.01, 0.9, 1.0, 1.1, 5.0, 1000.0]),
    percentile=st.sampled_from([99.0, 99.9, 99.99, 100.0]),
    limits=LIMITS,
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_range_lies_between_those_of_the_bounds(seed, kind, sizes, scale, percentile, limits):
    calls = draw_calls(seed, kind, sizes, scale)
    config = CalibConfig(name="percentile", percentile=percentile)
    every = observe(TensorObserver(counting=True), calls).clipped(*limits)
    some = observe(TailObserver(counting=True), calls).clipped(*limits)
    assert some.batches == every.batches
    assert some.counts.sum() + some.uncounted == every.counts.sum()
    expected = find_range(every.stats(BINS), config)
    first, last = [find_range(stats, config) for stats in some.bounds(BINS)]
    assert first[0] <= expected[0] <= last[0]
    assert first[1] <= expected[1] <= last[1]


def test_an_edge_that_cuts_exactly_the_share_is_the_same_with_any_middle():
    """Here, 20 of 4,000 values lie above an edge, and sums of rounded shares missed 0.5%."""
    random = np.random.default_rng(20)
    calls = list(random.standard_normal((8, 500)).astype(np.float32))
    config = CalibConfig(name="percentile", percentile=99.0)
    every = observe(TensorObserver(counting=True), calls)
    some = observe(TailObserver(counting=True), calls)
    ranges = {find_range(stats, config) for stats in some.bounds(BINS)}
    assert ranges == {find_range(every.stats(BINS), config)}


@pytest.mark.parametrize("kind", ["normal", "relu", "steps"])
def test_like_samples_are_decided_and_few_values_are_counted(kind):
    calls = draw_calls(seed=0, kind=kind, sizes=[500] * 40, scale=1.0)
    some = observe(TailObserver(counting=True), calls)
    config = CalibConfig(name="percentile", percentile=99.9)
    first, last = [find_range(stats, config) for stats in some.bounds(BINS)]
    assert first == last
    assert some.uncounted > 0.8 * sum(map(len, calls))


def test_calls_without_values_count_nothing():
    """Such as the boxes of empty pictures."""
    empty = np.zeros(0, np.float32)
    calls = draw_calls(seed=0, kind="normal", sizes=[500], scale=1.0)
    some = observe(TailObserver(counting=True), [*calls, empty])
    assert some.middle is not None
    assert some.counts.sum() + some.uncounted == 1000


@pytest.mark.filterwarnings("error")
def test_the_middle_may_reach_the_largest_magnitudes():
    """Masked scores are -3.4e38, and their bin begins at -2**128."""
    values = np.array([np.finfo(np.float32).min, 0, np.finfo(np.float32).max], np.float32)
    call = np.repeat(values, 500)
    some = observe(TailObserver(counting=True), [call, call])
    assert some.middle == (-(2.0**128), 2.0**128)
    assert some.uncounted == len(call)
