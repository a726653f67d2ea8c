"""The embedded data set `phrases` and the network shipped with it."""

import hashlib

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.core.records import unpack
from resnet8ptq.data import phrases, registry
from resnet8ptq.data.phrases import writing
from resnet8ptq.data.phrases.writing import PADDING, START, TOKENS, UNKNOWN, VOCABULARY
from resnet8ptq.graph.session import open_runner
from tests.helpers.configs import make_config

DIGEST = "861f2a673037860f403dc67361fa4e3bd40aea60023ded92b03ea30c334ceba7"

words = st.sampled_from(VOCABULARY) | st.text("abc", min_size=1, max_size=9)
texts = st.lists(words, max_size=2 * TOKENS).map(" ".join)


@pytest.mark.slow
def test_same_phrases_everywhere():
    digest = hashlib.sha256()
    for side in ("train", "test"):
        written, labels = writing.write(side)
        digest.update("\n".join(written).encode() + labels.astype("<i8").tobytes())
    assert digest.hexdigest() == DIGEST


@pytest.mark.slow
def test_balance_lengths_and_sides_that_share_no_tokens():
    sides = {}
    for side, per_class in (("train", 1000), ("test", 500)):
        written, labels = writing.write(side)
        assert np.bincount(labels).tolist() == [per_class] * len(writing.CLASS_NAMES)
        lengths = {len(phrase.split()) for phrase in written}
        assert (min(lengths), max(lengths)) == (2, TOKENS - 1)
        sides[side] = set(map(writing.tokenize, written))
    assert not sides["train"] & sides["test"]


@given(st.lists(texts, min_size=1, max_size=5))
def test_tokens_are_words_in_order_and_the_mask_marks_them(some):
    arrays = unpack(writing.encode(some))
    assert {values.dtype.name for values in arrays.values()} == {"int64"}
    for ids, mask, text in zip(*arrays.values(), some, strict=True):
        kept = text.split()[: TOKENS - 1]
        assert mask.tolist() == [1] * (1 + len(kept)) + [0] * (TOKENS - 1 - len(kept))
        assert ids[0] == START and set(ids[mask == 0]) <= {PADDING}
        known = [word if word in writing.IDS else None for word in kept]
        named = [None if n == UNKNOWN else VOCABULARY[n - START - 1] for n in ids[1 : mask.sum()]]
        assert named == known


def test_the_shipped_network_is_small_and_right_on_19_of_20_phrases(cache_root):
    assert phrases.NETWORK.stat().st_size < 400_000
    proto = onnx.load(phrases.NETWORK)
    test = registry.load("phrases", None, cache_root).test
    run, right = open_runner(proto), 0
    for part in np.array_split(np.arange(len(test)), 8):
        stored = test.images[part]
        right += int((run(stored)[0].argmax(1) == test.labels[part]).sum())
    assert 0.93 <= right / len(test) <= 0.97


def test_the_network_has_a_name_of_its_own():
    assert make_config("data=phrases").model.name == "encoder"
    assert make_config("data=shapes").model.name == "resnet8"
