"""Samples of a Python call as the arrays that `data=arrays` reads."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from torch.utils.data import DataLoader, TensorDataset

from resnet8ptq.api.samples import _Writer, find_samples
from resnet8ptq.core.errors import ConfigError, DataError
from resnet8ptq.data import registry

X = np.arange(24, dtype=np.float32).reshape(6, 4)
Y = np.arange(6) % 2
TENSORS = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))


class Pairs(torch.utils.data.IterableDataset):
    """A data set without a length."""

    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))


FORMS = {
    "tuple": (X, Y),
    "tensors": (torch.from_numpy(X), torch.from_numpy(Y)),
    "dict": {"x": X, "labels": Y},
    "dict_and_labels": ({"x": X}, Y),
    "dataset": TENSORS,
    "loader": DataLoader(TENSORS, batch_size=4),
    "iterable": Pairs(),
    "usual_names": {"image": X, "label": Y},
    "rows": ([*X], [*Y]),
}


def read(words: list[str]) -> dict[str, Any]:
    """Return the written arrays by file name."""
    (root,) = [word.partition("=")[2] for word in words if word.startswith("data.root=")]
    return {path.stem: np.load(path) for path in Path(root).glob("*.npy")}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_the_same_samples_is_the_same_entry(tmp_path, form):
    words, few = find_samples(FORMS[form], tmp_path)
    assert words == find_samples((X, Y), tmp_path)[0]
    written = read(words)
    assert np.array_equal(written["x"], X) and np.array_equal(written["labels"], Y)
    assert len(few) == 2 and "labels" in few


def test_a_loader_of_inputs_alone_has_no_labels(tmp_path):
    loader = DataLoader(TensorDataset(torch.from_numpy(X)), batch_size=4)
    words, few = find_samples(loader, tmp_path)
    assert "data.labels=none" in words and {*few} == {"x"}


def test_inputs_in_a_tuple_have_the_names_of_the_network(tmp_path):
    loader = DataLoader([((x, x[:2]), y) for x, y in zip(X, Y, strict=True)], batch_size=3)
    words, few = find_samples(loader, tmp_path, takes=["left", "right"])
    assert "data.inputs={left: input_0, right: input_1}" in words and few["right"].shape == (2, 2)
    with pytest.raises(ConfigError, match="2 inputs without names"):
        find_samples(((X, X[:, :2]), Y), tmp_path)


def test_a_batch_of_as_many_samples_as_inputs_holds_inputs(tmp_path):
    pairs = [((x, x), y) for x, y in zip(X[:2], Y[:2], strict=True)]
    _, few = find_samples(DataLoader(pairs, batch_size=2), tmp_path, takes=["left", "right"])
    assert {*few} == {"left", "right", "labels"}


def test_a_name_of_labels_may_be_an_input(tmp_path):
    words, _ = find_samples({"x": X, "y": X}, tmp_path, takes=["x", "y"])
    assert "data.inputs={x: input_0, y: input_1}" in words and "data.labels=none" in words


def test_texts_are_labels_of_any_length(tmp_path):
    texts = ["a", "bb", "ccc", "dd", "e", "f"]
    pairs = DataLoader([*zip(X, texts, strict=True)], batch_size=4)
    words, _ = find_samples(pairs, tmp_path)
    assert read(words)["labels"].tolist() == texts


def test_a_batch_of_tensorflow_shares_its_first_axis(tmp_path):
    tf = pytest.importorskip("tensorflow")
    one_hot = np.eye(3, dtype=np.int64)[Y]
    samples = tf.data.Dataset.from_tensor_slices((X, one_hot))
    for data in (samples, samples.batch(2, drop_remainder=True), samples.batch(4)):
        written = read(find_samples(data, tmp_path)[0])
        assert np.array_equal(written["x"], X) and np.array_equal(written["labels"], one_hot)


def test_sides_stay_apart(tmp_path):
    words, _ = find_samples({"train": (X, Y), "test": (X[:2], Y[:2])}, tmp_path)
    written = read(words)
    assert {*written} == {"x_train", "labels_train", "x_test", "labels_test"}
    assert np.array_equal(written["x_test"], X[:2])


def test_samples_in_memory_are_called_so(tmp_path):
    """The folder's name is a hash, which says nothing in a report."""
    words, _ = find_samples((X, Y), tmp_path)
    (root,) = [word.partition("=")[2] for word in words if word.startswith("data.root=")]
    assert registry.load("arrays", root, tmp_path).name == "samples in memory"


def test_both_sides_have_an_input_in_files_of_one_name(tmp_path):
    """The order of the names in a dict has no effect."""
    test = {"mask": X[:2] > 3, "ids": X[:2]}
    for sides in (("train", "test"), ("test", "train")):
        named = {"train": ({"ids": X, "mask": X > 3}, Y), "test": (test, Y[:2])}
        words, _ = find_samples({side: named[side] for side in sides}, tmp_path)
        assert "data.inputs={ids: input_0, mask: input_1}" in words
        assert np.array_equal(read(words)["input_0_test"], X[:2])


def test_sides_with_other_inputs_are_refused(tmp_path):
    with pytest.raises(DataError, match="got test samples with b, expected a"):
        find_samples({"train": {"a": X}, "test": {"b": X}}, tmp_path)


def test_test_samples_without_the_labels_that_training_samples_have_are_refused(tmp_path):
    with pytest.raises(DataError, match="got test samples without labels"):
        find_samples({"train": (X, Y), "test": X[:2]}, tmp_path)


def test_inputs_keep_their_names_in_the_settings(tmp_path):
    words, _ = find_samples(({"a/ids:0": X, "mask": X > 3}, Y), tmp_path)
    assert r"data.inputs={a/ids\:0: input_0, mask: input_1}" in words
    assert {*read(words)} == {"input_0", "input_1", "labels"}


def test_samples_without_labels_say_so(tmp_path):
    words, _ = find_samples(X, tmp_path)
    assert "data.labels=none" in words


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ((X, Y[:3]), "different numbers of samples"),
        ((X, 5), r"different numbers of samples \(x \[6, 4\], labels \[\]\)"),
        ([], "got a list"),
        (42, "got a int"),
        (DataLoader(TensorDataset(torch.zeros(0, 3)), batch_size=2), "no sample"),
        (np.array(["a", "b"]), "x: got values of <U1, expected numbers"),
        ({"x": X, "path": ["a"] * 6}, "path: got values"),
        ({"train": X, "val": X}, "got train, val, expected train and test"),
        ((X, X, Y), r"got 3 values .* expected \(x, y\)"),
        (([X, X[:, :2]], Y), "2 inputs without names"),
        (([[1, 2], [3]], Y[:2]), "x: got samples of several shapes"),
        (DataLoader([(X[0], 1), (X[0], 0.5)], batch_size=1), "labels: got int64, then float64"),
    ],
)
def test_other_data_is_refused_in_one_line(tmp_path, data, reason):
    with pytest.raises((ConfigError, DataError), match=reason):
        find_samples(data, tmp_path)
    assert not list(tmp_path.glob("samples_from_memory/*"))


@settings(max_examples=30)
@given(
    arrays_of.arrays(
        st.sampled_from([np.float32, np.int64, np.uint8, np.bool_]),
        arrays_of.array_shapes(min_dims=1, max_dims=4, max_side=5),
    ),
    st.integers(1, 4),
)
def test_numpy_reads_what_is_written_batch_by_batch(tmp_path_factory, values, batch):
    path = tmp_path_factory.mktemp("written") / "x.npy"
    with path.open("wb") as file:
        writer = _Writer(file, "x")
        for start in range(0, len(values), batch):
            writer.append(values[start : start + batch])
        writer.finish()
    mapped = np.load(path, mmap_mode="r")
    assert mapped.dtype == values.dtype
    assert np.array_equal(mapped, values, equal_nan=values.dtype.kind == "f")
