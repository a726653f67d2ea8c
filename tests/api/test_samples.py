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
    assert {*few} == {"x", "labels"}


def test_sides_stay_apart(tmp_path):
    words, _ = find_samples({"train": (X, Y), "test": (X[:2], Y[:2])}, tmp_path)
    written = read(words)
    assert {*written} == {"x_train", "labels_train", "x_test", "labels_test"}
    assert np.array_equal(written["x_test"], X[:2])


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
        ([], "got a list"),
        (42, "got a int"),
        (DataLoader(TensorDataset(torch.zeros(0, 3)), batch_size=2), "no sample"),
        (np.array(["a", "b"]), "expected numbers"),
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
    writer = _Writer(path)
    for start in range(0, len(values), batch):
        writer.append(values[start : start + batch])
    writer.close()
    mapped = np.load(path, mmap_mode="r")
    assert mapped.dtype == values.dtype
    assert np.array_equal(mapped, values, equal_nan=values.dtype.kind == "f")
