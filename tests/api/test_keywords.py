"""Keywords of a Python call, and the words that Hydra reads back."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.api.keywords import to_words
from resnet8ptq.config import words
from resnet8ptq.core.errors import ConfigError

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1)
NAMES = st.from_regex(r"[a-z][a-z0-9_/:. ]*[a-z0-9]", fullmatch=True)  # of inputs and arguments
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**9), 10**9),
    st.floats(-1e9, 1e9),
    TEXTS,
    st.lists(st.one_of(st.integers(0, 9), TEXTS), max_size=3),
    st.dictionaries(NAMES, st.integers(0, 9), max_size=3),
)


def read_back(word: str) -> Any:
    return words.parse(word).value()


def plain(value: Any) -> Any:
    """Return a value of Hydra's parser as Python's own."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return getattr(value, "text", value)


@given(VALUES)
def test_hydra_reads_each_value_back_as_it_was(value):
    (word,) = to_words({"model__module_args": value})
    assert plain(read_back(word)) == value


@given(st.lists(st.one_of(st.integers(0, 99), TEXTS), min_size=2, max_size=4))
def test_a_sweep_has_the_values_of_the_list(values):
    (word,) = to_words({"calib__table": values}, swept=True)
    assert [plain(value) for value in words.values(words.parse(word))] == values


def test_a_list_in_a_list_is_one_value_of_a_sweep():
    assert to_words({"nodes_to_exclude": [["a", "b"], []]}, swept=True) == [
        "nodes_to_exclude=[a, b],[]"
    ]


def test_values_of_numpy_and_paths_are_plain():
    asked = {"seed": np.int64(3), "data__root": Path("/a b")}
    assert to_words(asked) == ["seed=3", "data.root=/a b"]


@pytest.mark.parametrize("value", [np.zeros(3), object()])
def test_a_value_that_no_setting_takes_is_refused_with_its_key(value):
    with pytest.raises(ConfigError, match="seed: got a"):
        to_words({"seed": value})


def test_an_empty_sweep_is_refused():
    with pytest.raises(ConfigError, match="dtype: got an empty list"):
        to_words({"dtype": []}, swept=True)
