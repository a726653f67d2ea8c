"""`task=ctc`: decoding, error rates against a recursive edit distance, and alphabets."""

import json
import os
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.config.schema import CtcConfig, TaskConfig
from resnet8ptq.core.errors import ConfigError, ModelError
from resnet8ptq.tasks import ctc, registry
from resnet8ptq.tasks.scoring.outputs import VALUES, Outputs, Targets, TaskContext


def recursive_distance(one, other) -> int:
    """The definition of Levenshtein's distance, without a table."""

    @cache
    def distance(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        changed = distance(i - 1, j - 1) + (one[i - 1] != other[j - 1])
        return min(changed, distance(i - 1, j) + 1, distance(i, j - 1) + 1)

    return distance(len(one), len(other))


WORDS = st.text("ab ", max_size=12)


@given(WORDS, WORDS)
def test_the_edit_distance_of_its_definition(one, other):
    assert ctc.count_errors(one, other) == recursive_distance(one, other)
    assert ctc.count_errors(one.split(), other.split()) == recursive_distance(
        one.split(), other.split()
    )


def test_error_rates_are_ratios_of_sums():
    alphabet = ctc.Alphabet(("", "a", "b", " "), 0, 2)
    frames = np.array([[1, 1, 0, 1, 3, 2], [2, 2, 2, 0, 0, 0]])  # "aa b" and "b"
    outputs = Outputs(alphabet([np.eye(4)[frames]]))
    scores = ctc.build("cer", alphabet, 100).score(outputs, Targets(np.array(["ab b", "bb b"])))
    assert scores.texts == ["aa b", "b"]
    assert scores.value == (1 + 3) / 8
    assert scores.more()["wer"] == (1 + 1) / 4


def test_spaces_around_a_line_are_no_errors():
    alphabet = ctc.Alphabet(("", "a", "b", " "), 0, 2)
    assert alphabet.decode(np.array([3, 0, 1, 3, 2, 3, 3], np.int32)) == "a b"


def test_frames_behind_the_end_of_a_line_are_not_decoded():
    alphabet = ctc.Alphabet(("", "a", "b"), 0, 2)
    frames = np.array([[1, 0, 2, 0], [1, 0, 2, 2]], np.int32)
    targets = Targets(np.array(["ab", "a"]), lengths=np.array([8, 4]), whole_length=8)
    scores = ctc.build("cer", alphabet, 100).score(Outputs((frames,)), targets)
    assert scores.texts == ["ab", "a"]


def test_padding_is_blank_whatever_its_class():
    alphabet = ctc.Alphabet(("a", "b", ""), 0, 2, 2)
    frames = alphabet([np.eye(3)[[[0, 2, 0, 1]]]])[0]
    assert alphabet.decode(frames[0]) == "aab"
    assert alphabet.decode(np.append(frames[0], [0, 0])) == "aab"  # as shorter batches are padded


def test_a_line_ends_by_the_length_of_the_input_not_of_the_longest_line():
    alphabet = ctc.Alphabet(("", "a", "b"), 0, 2)
    frames = np.array([[1, 0, 2, 1], [1, 0, 2, 2]], np.int32)
    targets = Targets(np.array(["a", "a"]), lengths=np.array([4, 4]), whole_length=8)
    scores = ctc.build("cer", alphabet, 100).score(Outputs((frames,)), targets)
    assert scores.texts == ["a", "a"]


def make(labels, outputs, alphabet, **settings):
    data = TaskContext("lines", labels, (), True, (4,), outputs, VALUES)
    path = None if alphabet is None else str(alphabet)
    return ctc.CTC.make(CtcConfig(alphabet=path, **settings), data)


LINES = np.array(["ab", "b"])


def test_the_alphabet_fits_the_outputs(tmp_path):
    path = tmp_path / "symbols.txt"
    path.write_text("a\nb\n \n")
    task = make(LINES, {"out": (7, 4)}, path)
    assert task.scope.reduction == ctc.Alphabet(("", "a", "b", " "), 0, 2)
    task = make(LINES, {"other": (5,), "out": (4, 7)}, path, blank=-1)
    assert task.scope.reduction == ctc.Alphabet(("a", "b", " ", ""), 1, 1, 3)
    task = make(LINES, {"out": (7, 3)}, path)  # with a line for the blank
    assert task.scope.reduction == ctc.Alphabet(("", "b", " "), 0, 2)
    vocabulary = tmp_path / "vocab.json"
    vocabulary.write_text(json.dumps({"<pad>": 0, "|": 1, "A": 2, "B": 3}))
    task = make(LINES, {"out": (7, 4)}, vocabulary)
    assert task.scope.reduction == ctc.Alphabet(("", " ", "A", "B"), 0, 2)


def test_what_does_not_fit_is_refused(tmp_path):
    path = tmp_path / "symbols.txt"
    path.write_text("a\nb")
    with pytest.raises(ConfigError, match=r"task\.alphabet: got null.*try task=ctc"):
        make(LINES, {"out": (7, 3)}, None)
    with pytest.raises(ConfigError, match="expected a file with a symbol in each line"):
        make(LINES, {"out": (7, 3)}, tmp_path / "none.txt")
    with pytest.raises(ModelError, match=r"has 2 symbols; expected one output \[frames, 3\]"):
        make(LINES, {"out": (7, 9)}, path)
    with pytest.raises(ConfigError, match="labels of lines are none, expected the text"):
        make(None, {"out": (7, 3)}, path)
    with pytest.raises(ConfigError, match=r"task\.blank: got 3, expected one of .* 3 classes"):
        make(LINES, {"out": (7, 3)}, path, blank=3)
    vocabulary = tmp_path / "vocab.json"
    vocabulary.write_text('{"a": 5}')
    with pytest.raises(ConfigError, match="its numbers are not 0, 1"):
        make(LINES, {"out": (7, 3)}, vocabulary)


def test_an_alphabet_that_never_ends_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"task\.alphabet: got .*not a regular file"):
        make(LINES, {"out": (7, 3)}, tmp_path / "pipe")


def test_auto_takes_texts_by_the_outputs(caplog):
    caplog.set_level("INFO")
    data = TaskContext("lines", LINES, (), True, (4,), {"out": (7, 3)}, VALUES)
    assert registry.choose(data) == "ctc"
    with pytest.raises(ConfigError, match=r"task\.alphabet: got null"):
        registry.make(TaskConfig(), data)
