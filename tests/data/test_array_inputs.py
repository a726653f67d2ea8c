"""`data=arrays` with several inputs."""

import numpy as np
import pytest

from resnet8ptq.config.schema import ArraysConfig
from resnet8ptq.core.errors import ConfigError, PtqError
from resnet8ptq.data.sources import array_names
from tests.helpers.array_files import COUNT, IDS, INPUTS, LABELS, MASK, read
from tests.helpers.arrays import whole


def records(data):
    """Return the fields of both sides, in the order of the samples' labels and tokens."""
    images, labels = whole(data)
    order = np.lexsort(images["a"].T)
    return {name: images[name][order] for name in images.dtype.names}, labels[order]


@pytest.mark.parametrize("sided", [False, True])
def test_arrays_with_the_inputs_names_are_one_sample(tmp_path, sided):
    arrays = {"a": IDS, "b_mask": MASK, "y": LABELS}
    if sided:
        halves = [(slice(0, 8), "train"), (slice(8, COUNT), "test")]
        arrays = {f"{n}_{side}": v[part] for n, v in arrays.items() for part, side in halves}
    np.savez(tmp_path / "a.npz", **arrays)
    data = read(tmp_path / "a.npz")
    assert data.test.has_records
    if sided:
        assert (len(data.train), len(data.test)) == (8, 4)
    fields, labels = records(data)
    order = np.lexsort(IDS.T)
    np.testing.assert_array_equal(fields["a"], IDS[order])
    np.testing.assert_array_equal(fields["b_mask"], MASK[order])
    np.testing.assert_array_equal(labels, LABELS[order])


USUAL_NAMES = [*array_names.INPUTS, *array_names.LABELS, *array_names.GROUPS]


def name_inputs(path, find_takes):
    return array_names.name_inputs(ArraysConfig(root=str(path)), find_takes).inputs


@pytest.mark.parametrize("sided", [False, True])
@pytest.mark.parametrize("name", USUAL_NAMES)
def test_the_networks_names_come_before_the_usual_ones(tmp_path, name, sided):
    """Such as an input `images` beside `orig_target_sizes`, or `x` beside `mask`."""
    takes = [name, "mask", "images" if name == "x" else "x"]
    held = dict.fromkeys(takes, IDS) | {"mask": MASK}
    if sided:
        held = {f"{n}_{side}": array for n, array in held.items() for side in ("train", "test")}
    np.savez(tmp_path / "a.npz", **held)
    inputs = name_inputs(tmp_path / "a.npz", lambda: takes)
    data = read(tmp_path / "a.npz", inputs=inputs)
    assert set(data.test.stored.dtype.names) == set(takes)
    assert data.test.labels is None


@pytest.mark.parametrize("name", array_names.INPUTS)
@pytest.mark.parametrize("sided", [False, True])
def test_the_only_input_is_the_array_of_its_name(tmp_path, name, sided):
    held = {"input": INPUTS, name: INPUTS + 1, "y": LABELS}
    if sided:
        held = {f"{n}_{side}": array for n, array in held.items() for side in ("train", "test")}
    np.savez(tmp_path / "a.npz", **held)
    inputs = name_inputs(tmp_path / "a.npz", lambda: ["input"])
    images = read(tmp_path / "a.npz", inputs=inputs).test.stored[:]
    assert images.dtype.names is None
    assert all((image == INPUTS).all(axis=(1, 2)).any() for image in images)


def test_an_array_with_the_name_of_the_only_input_needs_no_word(tmp_path):
    np.savez(tmp_path / "a.npz", input_1=INPUTS)
    assert name_inputs(tmp_path / "a.npz", lambda: ["input_1"]) == "input_1"
    assert name_inputs(tmp_path / "a.npz", lambda: ["pixels"]) is None


@pytest.mark.parametrize("sided", [False, True])
def test_arrays_that_are_all_inputs_need_no_word_about_labels(tmp_path, sided):
    """Such as a feature and a state, in a file without labels."""
    held = {"feat": IDS, "h0": MASK}
    if sided:
        held = {f"{n}_{side}": array for n, array in held.items() for side in ("train", "test")}
    np.savez(tmp_path / "a.npz", **held)
    inputs = name_inputs(tmp_path / "a.npz", lambda: ["feat", "h0"])
    data = read(tmp_path / "a.npz", inputs=inputs)
    assert set(data.test.stored.dtype.names) == {"feat", "h0"}
    assert data.test.labels is None


def test_plain_files_and_other_names_are_no_reason_to_read_the_network(tmp_path):
    def find_takes():
        raise AssertionError

    np.savez(tmp_path / "plain.npz", X_train=1, Y_train=1, X_test=1, y_test=1, classes=1, scale=1)
    np.savez(tmp_path / "named.npz", input_ids=1, attention_mask=1, labels=1)
    for name in ("plain", "named"):
        assert name_inputs(tmp_path / f"{name}.npz", find_takes) is None
    np.savez(tmp_path / "other.npz", x=1, ids=1, y=1)
    assert name_inputs(tmp_path / "other.npz", lambda: ["pixels"]) is None


@pytest.mark.parametrize("suffix", ["", "_train"])
def test_inputs_are_named_by_a_dict(tmp_path, suffix):
    arrays = {f"ids{suffix}": IDS, f"mask{suffix}": MASK, f"y{suffix}": LABELS, "unused": 1}
    if suffix:
        arrays |= {"ids_test": IDS + 100, "mask_test": MASK, "y_test": LABELS}
    np.savez(tmp_path / "a.npz", **arrays)
    data = read(tmp_path / "a.npz", inputs={"a": "ids", "b": "mask"}, labels=None)
    assert data.train.stored.dtype.names == ("a", "b")


def test_the_sides_of_a_split_may_hold_their_inputs_in_another_order(tmp_path):
    train = {"ids_train": IDS, "train_mask": MASK, "y_train": LABELS}
    test = {"y_test": LABELS, "mask_test": MASK, "ids_test": IDS + 100}
    np.savez(tmp_path / "a.npz", **train, **test)
    data = read(tmp_path / "a.npz", labels=None)
    for split, ids in ((data.train, IDS), (data.test, IDS + 100)):
        assert split.stored.dtype.names == ("ids", "mask")
        np.testing.assert_array_equal(split.stored["ids"], ids)


@pytest.mark.parametrize(
    ("arrays", "inputs", "says"),
    [
        ({"ids": IDS, "mask": MASK[:5], "y": LABELS}, None, "has 5 for the input mask"),
        ({"ids": IDS, "mask": MASK.astype(str), "y": LABELS}, None, "expected numbers"),
        ({"ids": IDS, "mask": MASK, "y": LABELS}, {"a": "tokens"}, "expected a file, or one of"),
        (
            {"ids": IDS, "mask": np.full(MASK.shape, np.nan), "y": LABELS},
            None,
            "NaN or infinity in sample 0",
        ),
        ({"ids": IDS, "mask": MASK}, None, "expected the name of one"),
    ],
)
def test_inputs_that_do_not_belong_together_are_refused(tmp_path, arrays, inputs, says):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(PtqError, match=says):
        read(tmp_path / "a.npz", inputs=inputs)


def test_an_offset_is_refused_for_several_inputs(tmp_path):
    np.savez(tmp_path / "a.npz", a=IDS, b=MASK, y=LABELS)
    with pytest.raises(ConfigError, match=r"data\.offset, data\.scale: got 3 and 1"):
        read(tmp_path / "a.npz", offset=3.0)
