"""Samples taken lazily, from memory and from files, are those that copying would give."""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resnet8ptq.data import registry
from resnet8ptq.data.dataset import Split
from resnet8ptq.data.lazy import LazySamples
from resnet8ptq.data.sampling import draw_calibration, draw_held_out
from tests.helpers.cifar_files import write_folder

STORED = 35  # images: seven in each file


@pytest.fixture(scope="module")
def from_files(tmp_path_factory: pytest.TempPathFactory) -> Split:
    folder = write_folder(tmp_path_factory.mktemp("images"), train=STORED // 5)
    return registry.load("cifar10", str(folder)).train


@pytest.fixture(scope="module")
def in_memory(from_files: Split) -> Split:
    return Split(np.array(from_files.stored), from_files.labels, "here")


def copied(split: Split, indices: np.ndarray) -> Split:
    return Split(np.asarray(split.stored)[indices], split.labels[indices], split.source)


# Each take is by places in what the one before it left; any length, any order, some twice.
TAKES = st.lists(st.lists(st.integers(0, 10**6), min_size=1, max_size=60), max_size=3)


@pytest.mark.parametrize("store", ["from_files", "in_memory"])
@given(takes=TAKES, size=st.integers(1, 70), end=st.integers(0, 70), hashed=st.booleans())
@settings(max_examples=60)
def test_taken_images_are_the_copied_ones(request, in_memory, store, takes, size, end, hashed):
    lazy, eager = replace(request.getfixturevalue(store)), in_memory
    if hashed:
        assert len(lazy.pixel_hashes) == len(lazy)  # what is taken has its hashes from there
    for places in takes:
        length = len(lazy)
        indices = np.array(places) % (2 * length) - length  # negative ones count from the end
        lazy, eager = lazy.take(indices), copied(eager, indices)
    assert len(lazy) == len(eager) == len(lazy.stored)
    assert lazy.stored.shape == eager.stored.shape
    assert np.array_equal(lazy.stored, eager.stored)
    assert np.array_equal(lazy.labels, eager.labels)
    assert lazy.digest == eager.digest
    assert np.array_equal(lazy.pixel_hashes, eager.pixel_hashes)
    batches, expected = lazy.batches(size), eager.batches(size)
    assert len(batches) == len(expected)
    for batch, copy in zip(batches, expected, strict=True):
        assert batch.dtype == np.float32
        assert batch.flags["C_CONTIGUOUS"]
        assert np.array_equal(batch, copy)
    part = slice(end // 2, end)
    assert np.array_equal(lazy.stored[part], eager.stored[part])
    assert np.array_equal(lazy.stored[-1], eager.stored[-1])
    assert np.array_equal(list(lazy.stored), eager.stored)


def test_a_mask_takes_too(from_files, in_memory):
    mask = from_files.labels % 2 == 0
    assert np.array_equal(from_files.take(mask).stored, in_memory.stored[mask])
    assert len(from_files.take(np.arange(0)).stored[:]) == 0


def test_a_place_that_is_none_is_refused(from_files, in_memory):
    for split in (from_files, in_memory):
        with pytest.raises(IndexError):
            split.take(np.array([STORED]))
        with pytest.raises(IndexError):
            split.stored[np.array([STORED])]


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def go_through(split: Split, tested: Split, images: int) -> None:
    """What a run does with its calibration images, and as many times."""
    many = split.take(np.resize(np.arange(STORED), images))
    for _ in range(2):
        for batch in many.batches(64):
            assert batch.nbytes <= 64 * 4 * 3072
    assert len(many.digest) == 64
    assert not np.isin(many.pixel_hashes, tested.pixel_hashes).any()


@pytest.mark.parametrize("store", ["from_files", "in_memory"])
def test_memory_does_not_grow_with_the_images(request, store, tmp_path):
    """20,000 images have 61 MB; places, labels and hashes have 32 bytes for each."""
    split = request.getfixturevalue(store)
    tested = Split(np.zeros((3, 32, 32, 3), np.uint8), np.arange(3), "here")
    few, many = (peak_bytes(partial(go_through, split, tested, n)) for n in (1000, 20_000))
    assert many - few < 19_000 * 100
    assert many < 10 * 2**20


def test_a_draw_holds_no_training_image(tmp_path):
    folder = write_folder(tmp_path, train=200, test=3)
    registry.load("cifar10", str(folder))  # fills the cache
    registry._read.cache_clear()

    def draw() -> None:
        loaded = registry.load("cifar10", str(folder))
        held_out = draw_held_out(loaded, 100)
        drawn = draw_calibration(loaded, 90, 42, [held_out])
        assert isinstance(drawn.split.stored, LazySamples)
        assert len(held_out) == 100

    whole = 1000 * 3072
    assert peak_bytes(draw) < whole
