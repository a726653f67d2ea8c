"""Counts in one pass, without knowing the range: exact, and independent of batches and order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resnet8ptq.calibration.methods import find_range
from resnet8ptq.calibration.observer import HALF, TensorObserver
from resnet8ptq.calibration.statistics import TensorStats
from resnet8ptq.config.schema import CalibConfig
from resnet8ptq.core.errors import QuantizationError
from tests.helpers.arrays import NUMBERS, TENSORS

batches = st.lists(TENSORS, min_size=1, max_size=6)


def observe(*batches: np.ndarray) -> TensorObserver:
    observer = TensorObserver(counting=True)
    for batch in batches:
        observer.observe(batch)
    return observer


@given(values=batches)
def test_fine_bins_hold_what_lies_between_their_edges(values):
    observer, every = observe(*values), np.concatenate(values)
    edges = observer.width * np.arange(-HALF, HALF + 1)
    assert edges[0] <= every.min()
    assert every.max() < edges[-1]
    assert np.array_equal(observer.counts, np.histogram(every, edges)[0])


@given(values=TENSORS, data=st.data())
def test_statistics_do_not_depend_on_batches_or_order(values, data):
    whole = observe(values)
    shuffled = np.array(data.draw(st.permutations(values.tolist())), dtype=np.float32)
    places = sorted(data.draw(st.sets(st.integers(1, max(1, len(values) - 1)), max_size=4)))
    split = observe(*(part for part in np.split(shuffled, places) if part.size))
    assert np.array_equal(split.counts, whole.counts)
    ours, theirs = split.stats(64), whole.stats(64)
    assert (ours.low, ours.high, ours.zeros) == (theirs.low, theirs.high, theirs.zeros)
    assert np.array_equal(ours.counts, theirs.counts)


@given(values=batches, parts=st.integers(1, 4))
@settings(max_examples=50)
def test_ranges_of_batches_are_the_same_in_parts_and_from_their_ends(values, parts):
    observer = TensorObserver()
    for batch in values:
        for position, part in enumerate(np.array_split(batch, min(parts, batch.size))):
            observer.observe(part, new_batch=position == 0)
    ends = [(batch.min(), batch.max()) for batch in values]
    whole = min(low for low, _ in ends), max(high for _, high in ends)
    for stats in (observer.stats(64), TensorStats.of_batches(np.array(ends, np.float64))):
        assert (stats.low, stats.high) == whole
        assert stats.batches == ends
        assert stats.counts.size == stats.zeros == 0
        assert stats.counts.dtype == np.int64


@given(values=TENSORS)
def test_a_histogram_counts_every_value_once(values):
    stats = observe(values).stats(64)
    assert stats.counts.sum() == values.size
    assert stats.counts.min() >= 0
    assert stats.counts.dtype == np.int64


@given(values=TENSORS, bins=st.sampled_from([2, 64, 276, 2048]))
def test_a_histogram_is_that_of_numpy_but_for_a_fine_bin_at_each_edge(values, bins):
    observer = observe(values)
    stats = observer.stats(bins)
    below = np.cumsum(stats.counts)[:-1]
    for edge, number in zip(stats.edges[1:-1], below, strict=True):
        assert (values < edge - observer.width).sum() <= number
        assert number <= (values <= edge + observer.width).sum()


@given(values=batches, ends=st.tuples(NUMBERS, NUMBERS).map(sorted))
def test_a_clipped_tensor_is_counted_as_if_it_had_been_observed(values, ends):
    observer = observe(*values)
    clipped = observer.clipped(*ends)
    alone = [np.clip(batch, np.float32(ends[0]), np.float32(ends[1])) for batch in values]
    assert clipped.batches == observe(*alone).batches
    edges = clipped.width * np.arange(-HALF, HALF + 1)
    limits = edges[0], np.nextafter(edges[-1], 0)  # an end may lie beyond the bins
    expected = np.histogram(np.clip(np.concatenate(alone), *limits), edges)[0]
    assert np.array_equal(clipped.counts, expected)
    assert clipped.counts.sum() == observer.counts.sum()


def test_a_tensor_that_is_only_moved_has_the_same_observer():
    observer = observe(np.array([-1, 2], np.float32))
    assert observer.clipped(-np.inf, np.inf) is observer


def test_a_sliver_of_a_tensor_needs_an_observer_of_its_own():
    observer = observe(np.array([-1, 2], np.float32))  # fine bins of 2**-13
    assert not observer.is_coarse(2048)
    assert not observer.clipped(0, 2**-3).is_coarse(2048)
    assert observer.clipped(0, 2**-4).is_coarse(2048)
    assert not observer.clipped(0, 0).is_coarse(2048)  # a constant


def test_blocks_add_up():
    values = np.random.default_rng(0).standard_normal(400_001).astype(np.float32)
    observer = observe(values)
    edges = observer.width * np.arange(-HALF, HALF + 1)
    assert np.array_equal(observer.counts, np.histogram(values, edges)[0])


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_do_not_go_unseen(wrong):
    """A range taken without them would quantize a broken network as if it were sound."""
    observer = observe(np.ones(3, dtype=np.float32))
    observer.observe(np.array([1.0, wrong, 2.0], dtype=np.float32))
    observer.observe(np.ones(3, dtype=np.float32), new_batch=False)
    for seen in (observer, observer.clipped(0, 1)):
        assert seen.is_coarse(16)
        assert not seen.stats(16).is_finite
        with pytest.raises(QuantizationError, match="is NaN or infinite"):
            find_range(seen.stats(16), CalibConfig(name="percentile"))
