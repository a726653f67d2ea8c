"""Records keep the values, shapes and order of their arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from resnet8ptq.core.records import feed, find_mask, names_of, pack, unpack

SHAPES = st.lists(npst.array_shapes(min_dims=0, max_dims=3, max_side=4), min_size=1, max_size=4)


@given(shapes=SHAPES, count=st.integers(1, 5), data=st.data())
def test_packed_arrays_come_back(shapes, count, data):
    kinds = st.sampled_from([np.float32, np.int64, np.bool_, np.uint8])
    arrays = {
        f"input {i}": np.arange(count * np.prod(shape, dtype=int))
        .reshape(count, *shape)
        .astype(kind)
        for i, (shape, kind) in enumerate((shape, data.draw(kinds)) for shape in shapes)
    }
    records = pack(arrays)
    assert records.shape == (count,)
    assert names_of(records.dtype) == tuple(arrays)
    for name, values in unpack(records).items():
        np.testing.assert_array_equal(values, arrays[name])
        assert values.dtype == arrays[name].dtype
        assert values.strides == np.zeros_like(arrays[name]).strides  # also those of one record


def test_a_network_is_fed_by_name_and_a_single_array_fills_its_first_input():
    records = pack({"a": np.zeros((2, 3)), "b": np.ones((2, 1))})
    assert list(feed(records, ["b"])) == ["b"]
    values = np.zeros((2, 3))
    assert feed(values, ["x", "y"]) == {"x": values}


@pytest.mark.parametrize(
    ("names", "mask"),
    [
        (("ids", "attention_mask"), "attention_mask"),
        (("ids", "mask"), "mask"),
        (("a_mask", "b_mask"), None),
        (("a_mask", "attention_mask"), "attention_mask"),
        (("ids", "types"), None),
    ],
)
def test_the_mask_is_found_by_its_name(names, mask):
    assert find_mask(pack({name: np.ones((1, 3), np.int64) for name in names}).dtype) == mask
