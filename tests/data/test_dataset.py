"""Splits, their batches and their hashes."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.lazy import AT_ONCE
from resnet8ptq.data.sampling import draw_calibration
from tests.helpers.datasets import SMALL


def test_one_different_pixel_makes_another_image():
    images = SMALL.train.stored.copy()
    images[:, 0, 0, 0] ^= 1
    test = Split(images, SMALL.train.labels, "here")
    draw_calibration(Dataset("small", SMALL.class_names, SMALL.train, test), 20, 0)


@given(count=st.integers(0, 50), size=st.integers(1, 60))
@settings(max_examples=50)
def test_batches_hold_every_image_once_and_in_order(count, size):
    images = np.arange(count * 12, dtype=np.uint32).astype(np.uint8).reshape(count, 2, 2, 3)
    batches = Split(images, np.zeros(count, dtype=np.int64), "here").batches(size)
    result = list(batches)
    assert len(result) == len(batches)
    assert all(len(batch) == size for batch in result[:-1])
    assert all(0 < len(batch) <= size for batch in result)
    assert all(batch.dtype == np.float32 for batch in result)
    assert np.array_equal(np.concatenate([*result, np.zeros((0, 2, 2, 3))]), images)


def test_batches_can_be_gone_through_twice():
    batches = SMALL.train.batches(7)
    assert sum(map(len, batches)) == sum(map(len, batches)) == len(SMALL.train)


@pytest.mark.parametrize("count", [0, 1, AT_ONCE, 2 * AT_ONCE + 7])
def test_hashes_are_of_every_byte(count):
    """Whatever is read at once: shape, pixels and labels, and each image by itself."""
    random = np.random.default_rng(count)
    images = random.integers(0, 256, (count, 2, 1, 3), dtype=np.uint8)
    labels = random.integers(0, 3, count)
    split = Split(images, labels, "here")
    whole = f"({count}, 2, 1, 3)".encode() + images.tobytes() + labels.tobytes()
    assert split.digest == hashlib.sha256(whole).hexdigest()
    hashes = [hashlib.blake2b(image.tobytes(), digest_size=16).digest() for image in images]
    assert split.pixel_hashes.tolist() == [
        value.rstrip(b"\0") for value in hashes
    ]  # as numpy has it


def test_a_digest_has_the_dtype_and_the_groups_and_not_the_order_in_memory():
    images = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    labels, groups = np.arange(4), np.array([0, 0, 1, 1])
    head = b"(4, 3, 2)<f4" + images.tobytes()
    for stored in (images, np.asfortranarray(images)):
        bare = Split(stored, None, "here")
        assert bare.digest == hashlib.sha256(head).hexdigest()
        grouped = Split(stored, labels, "there", groups=groups).digest
        assert grouped == hashlib.sha256(head + labels.tobytes() + groups.tobytes()).hexdigest()
    strided = Split(images, np.repeat(labels, 2)[::2], "here", groups=np.repeat(groups, 2)[::2])
    assert strided.digest == grouped


def test_samples_of_samples_keep_their_labels_and_groups():
    images = np.arange(10, dtype=np.uint8)[:, None]
    labels, groups = np.arange(10) % 3, np.arange(10) // 2
    chosen = Split(images, labels, "here", groups=groups).take(np.array([7, 2, 9]))
    again = chosen.take(np.array([2, 0]))
    assert np.asarray(again.stored).ravel().tolist() == [9, 7]
    assert again.labels.tolist() == [0, 1]
    assert again.groups.tolist() == [4, 3]
    bare = Split(images, None, "here").take(np.array([1]))
    assert (bare.labels, bare.groups) == (None, None)


def test_only_classes_are_strata():
    images = np.zeros((4, 2, 2, 3), np.uint8)
    of_classes = Split(images, np.array([0, 2, 0, 1]), "here").strata(3)
    assert [members.tolist() for members in of_classes] == [[0, 2], [3], [1]]
    for labels in (None, np.zeros(4, np.float32)):
        [every] = Split(images, labels, "here").strata(3)
        assert every.tolist() == [0, 1, 2, 3]


def test_a_batch_has_no_more_than_the_network_takes_at_once():
    split = Split(np.zeros((7, 2), np.uint8), None, "here")
    for at_once, size, expected in ((None, 4, [4, 3]), (3, 4, [3, 3, 1]), (3, 2, [2, 2, 2, 1])):
        assert [len(batch) for batch in replace(split, at_once=at_once).batches(size)] == expected
