"""Samples of any length: cut to the longest of a batch, in batches by length."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.core.records import pack
from resnet8ptq.data.dataset import Split
from resnet8ptq.data.fields import Field, Fields, lengths

LONGEST = 7
FIELDS = Fields((Field("ids", "int64"), Field("mask", "int64")), "mask", ("ids", "mask"))


def texts(counts: list[int], fields: Fields | None = FIELDS) -> Split:
    """Return samples whose tokens are their index + 1, as many as `counts` says, then zeros."""
    mask = (np.arange(LONGEST) < np.array(counts)[:, None]).astype(np.int64)
    ids = mask * np.arange(1, len(counts) + 1)[:, None]
    return Split(pack({"ids": ids, "mask": mask}), None, "here", fields=fields)


COUNTS = st.lists(st.integers(0, LONGEST), min_size=1, max_size=20)


@given(counts=COUNTS, size=st.integers(1, 8), padded=st.booleans())
def test_every_sample_comes_once_and_none_is_cut_short(counts, size, padded):
    split = texts(counts)
    assert split.lengths.tolist() == counts
    batches = split.batches(size, padded)
    inputs = list(batches)
    assert len(inputs) == len(batches)
    assert all(1 <= len(batch) <= size for batch in inputs)
    sums = batches.restore(np.concatenate([batch["ids"].sum(axis=1) for batch in inputs]))
    assert sums.tolist() == [count * (i + 1) for i, count in enumerate(counts)]
    for batch in inputs:
        held = batch["mask"].sum(axis=1)
        assert batch["mask"].shape[1] == max(held.max(), 1)
        assert padded or len(set(held)) == 1


def test_no_batch_is_cut_where_the_network_takes_one_length():
    fixed = Fields(FIELDS.inputs, "mask")
    [batch] = texts([1, 2], fixed).batches(5)
    assert batch["ids"].shape == (2, LONGEST)


def test_the_zeros_that_trace_a_network_have_the_whole_length():
    assert texts([1, 2]).zeros["ids"].shape == (1, LONGEST)


def test_a_taken_sample_has_its_own_length():
    assert texts([5, 1, 3]).take(np.array([2, 1])).lengths.tolist() == [3, 1]


def test_the_length_ends_at_the_last_value_wherever_the_padding_is():
    mask = np.array([[0, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    assert lengths(mask).tolist() == [4, 1, 0]


def test_the_digest_depends_on_the_names_and_shapes_of_the_inputs():
    values = np.arange(6).reshape(1, 6)
    named = Split(pack({"a": values[:, :3], "b": values[:, 3:]}), None, "")
    other = Split(pack({"b": values[:, :3], "a": values[:, 3:]}), None, "")
    longer = Split(pack({"a": values[:, :4], "b": values[:, 4:]}), None, "")
    assert len({named.digest, other.digest, longer.digest}) == 3
