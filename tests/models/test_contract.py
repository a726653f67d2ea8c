"""What a network takes, and how samples are laid out for it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.core.errors import ModelError
from resnet8ptq.core.records import pack
from resnet8ptq.data.preprocessing import RAW, Preprocessing
from resnet8ptq.models.contract import (
    Contract,
    Tensor,
    arrange,
    arranged,
    find_layout,
    match_samples,
)

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


def takes(*shape: int | None) -> Tensor:
    return Tensor("x", shape, "float32")


@pytest.mark.parametrize(
    ("sample", "shape", "layout"),
    [
        ((32, 32, 3), (32, 32, 3), None),
        ((32, 32, 3), (3, 32, 32), (2, 0, 1)),
        ((3, 32, 32), (32, 32, 3), (1, 2, 0)),
        ((32, 24, 3), (3, None, None), (2, 0, 1)),
        ((32, 24, 3), (None, None, None), None),
        ((28, 28), (1, 28, 28), (2, 0, 1)),
        ((28, 28), (28, 28, 1), (0, 1, 2)),
        ((28, 28, 1), (28, 28), (0, 1)),
        ((640,), (640,), None),
        ((49, 10, 1), (1, 49, 10), (2, 0, 1)),
        ((8, 32, 24, 3), (3, 8, 32, 24), (3, 0, 1, 2)),
    ],
)
def test_the_layout_is_found(sample, shape, layout):
    assert find_layout(sample, takes(*shape)) == layout


@given(shape=SIZES, moved=st.booleans())
def test_arranged_samples_fit_and_keep_their_values(shape, moved):
    samples = np.arange(2 * np.prod(shape), dtype=np.float32).reshape(2, *shape)
    wanted = np.moveaxis(samples, -1, 1) if moved else samples
    layout = find_layout(shape, takes(*wanted.shape[1:]))
    result = arrange(samples, layout)
    assert result.shape == wanted.shape == (2, *arranged(shape, layout))
    assert result.flags.c_contiguous
    if shape != wanted.shape[1:]:  # else they fit as they are
        assert np.array_equal(np.sort(result, axis=None), np.sort(samples, axis=None))
        assert np.array_equal(result, wanted) or len(set(shape)) < len(shape)


@given(shape=SIZES)
def test_a_channel_axis_of_1_is_added_or_left_out(shape):
    samples = np.arange(2 * np.prod(shape), dtype=np.float32).reshape(2, *shape)
    layout = find_layout(shape, takes(*shape, 1))
    assert arrange(samples, layout).shape == (2, *shape, 1)
    back = find_layout((*shape, 1), takes(*shape))
    assert np.array_equal(arrange(samples[..., None], back), samples)


@pytest.mark.parametrize(
    ("sample", "contract", "says"),
    [
        (
            (32, 32, 3),
            takes(1, 28, 28),
            "takes (1, 28, 28), the samples are (32, 32, 3); if they are pictures: "
            "preprocess.size=[28,28] preprocess.channels=grey",
        ),
        (
            (96, 64, 3),
            takes(32, 16, 3),
            "takes (32, 16, 3), the samples are (96, 64, 3); if they are pictures: "
            "preprocess.size=[32,16]",
        ),
        ((32, 32, 1), takes(28, 28, 3), "takes (28, 28, 3), the samples are (32, 32, 1)"),
        ((49, 10, 1), takes(49, 10, 8), "takes (49, 10, 8), the samples are (49, 10, 1)"),
        (
            (784,),
            takes(28, 28),
            "takes (28, 28), the samples are (784); "
            "if they are rows of a table: data.shape=[28,28]",
        ),
        ((5, 6), takes(None, 7), "takes (?, 7), the samples are (5, 6)"),
    ],
)
def test_samples_that_fit_in_no_layout_are_refused_with_both_shapes(sample, contract, says):
    with pytest.raises(ModelError) as caught:
        find_layout(sample, contract)
    assert str(caught.value) == says


# Records

IDS = Tensor("ids", (None,), "int64")
MASK = Tensor("mask", (None,), "int32")
TEXTS = pack({"mask": np.ones((2, 6), np.bool_), "ids": np.ones((2, 6), np.int32)})


def test_records_fill_inputs_by_name_in_the_networks_order_and_dtypes():
    fields = match_samples(TEXTS, RAW, Contract((IDS, MASK), ())).fields
    inputs = fields.prepare(TEXTS)
    assert inputs.dtype.names == ("ids", "mask")
    assert (inputs["ids"].dtype, inputs["mask"].dtype) == (np.int64, np.int32)
    assert fields.any_length == ("ids", "mask")


@pytest.mark.parametrize(
    "inputs",
    [
        (IDS,),  # without the mask, the network cannot know the padding
        (IDS, Tensor("mask", (6,), "int64")),
        (Tensor("ids", (6,), "int64"), Tensor("mask", (6,), "int64")),
    ],
)
def test_samples_keep_their_length_unless_the_network_takes_any_and_the_mask(inputs):
    fields = match_samples(TEXTS, RAW, Contract(inputs, ())).fields
    assert fields.prepare(TEXTS).dtype["ids"].shape == (6,)


@pytest.mark.parametrize("inputs", [("ids",), ("ids", "mask")])
def test_shorter_samples_are_padded_to_the_only_length_of_the_network(inputs):
    contract = Contract(tuple(Tensor(name, (9,), "int64") for name in inputs), ())
    fields = match_samples(TEXTS, RAW, contract).fields
    for prepared in (fields.prepare(TEXTS), fields.whole(TEXTS)):
        for name in inputs:
            assert prepared[name].tolist() == [[1] * 6 + [0] * 3] * 2


def test_only_texts_are_padded_and_only_to_one_length():
    """Padding of other values would change the result of a network that does not know of it."""
    numbers = pack({"numbers": np.ones((2, 6)), "mask": TEXTS["mask"]})
    with pytest.raises(ModelError, match=r"input numbers: takes \(9\), the samples are \(6\)"):
        match_samples(numbers, RAW, Contract((Tensor("numbers", (9,), "float32"),), ()))
    free = Contract((Tensor("ids", (None,), "int64"), Tensor("mask", (9,), "int64")), ())
    with pytest.raises(ModelError, match=r"input mask: takes \(9\), the samples are \(6\)"):
        match_samples(TEXTS, RAW, free)
    features = pack({"steps": np.ones((2, 6, 12)), "mask": TEXTS["mask"]})
    turned = Contract((Tensor("steps", (12, 6), "float32"), MASK), ())
    assert match_samples(features, RAW, turned).prepare(features, RAW)["steps"].shape == (2, 12, 6)


def test_pictures_among_the_inputs_are_preprocessed_and_laid_out():
    samples = pack({"picture": np.full((1, 4, 5, 3), 255, np.uint8), "size": np.ones((1, 2))})
    contract = Contract(
        (Tensor("picture", (3, 4, 5), "float32"), Tensor("size", (2,), "float32")), ()
    )
    inputs = match_samples(samples, Preprocessing(scale=1 / 255), contract).fields.prepare(samples)
    assert inputs["picture"].shape == (1, 3, 4, 5)
    assert inputs["picture"].max() == inputs["size"].max() == 1


@pytest.mark.parametrize(
    ("samples", "inputs", "says"),
    [
        (np.ones((2, 6)), (IDS, MASK), "takes 2 inputs (ids, mask), the samples are one array"),
        (TEXTS, (IDS, Tensor("types", (6,), "int64")), "takes an input 'types', the samples have"),
        (
            TEXTS,
            (Tensor("ids", (5,), "int64"), Tensor("mask", (5,), "int32")),
            "input ids: takes (5), the samples are (6); for texts, try data.max_tokens=5",
        ),
        (
            pack({"ids": TEXTS["ids"], "mask": TEXTS["mask"], "numbers": np.ones((2, 3))}),
            (IDS, Tensor("numbers", (4,), "float32")),
            "input numbers: takes (4), the samples are (3)",
        ),
    ],
)
def test_samples_that_lack_an_input_are_refused(samples, inputs, says):
    with pytest.raises(ModelError) as caught:
        match_samples(samples, RAW, Contract(inputs, ()))
    assert str(caught.value).startswith(says)
