"""Loading a data set, once."""

import os
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from resnet8ptq.config.schema import ArraysConfig, PreprocessConfig
from resnet8ptq.core.errors import ConfigError, DataError
from resnet8ptq.data import decoding, registry
from resnet8ptq.data.dataset import hash_samples
from resnet8ptq.data.sampling import draw_calibration
from resnet8ptq.data.sources import cifar10
from tests.helpers.cifar_files import make_batch, pickle_published, write_folder


def test_loading_reads_both_splits_and_names(tmp_path):
    folder = write_folder(tmp_path / "batches", train=4, test=3)
    loaded = registry.load("cifar10", str(folder))
    assert (len(loaded.train), len(loaded.test)) == (20, 3)
    assert loaded.class_names == cifar10.CLASS_NAMES
    assert loaded.image_shape == (32, 32, 3)
    assert loaded.train.source == str(folder)


def test_loading_is_done_once(tmp_path):
    folder = write_folder(tmp_path / "batches")
    assert registry.load("cifar10", str(folder)) is registry.load("cifar10", str(folder))


def test_a_file_with_another_content_is_read_anew(tmp_path):
    """Though its length and its time of writing are those of before."""
    folder = write_folder(tmp_path / "batches", train=4)
    before = registry.load("cifar10", str(folder)).train
    path = folder / "data_batch_3"
    changed = pickle_published(make_batch(4, seed=50))
    time = path.stat().st_mtime_ns
    assert len(changed) == path.stat().st_size
    path.write_bytes(changed)
    os.utime(path, ns=(time, time))
    registry._read.cache_clear()
    after = registry.load("cifar10", str(folder)).train
    assert (before.pixel_hashes != after.pixel_hashes).tolist() == [False] * 8 + [True] * 4 + [
        False
    ] * 8


def test_one_content_in_two_places_is_kept_once(tmp_path):
    kept = []
    for name in ("a", "b"):
        folder = write_folder(tmp_path / name)
        registry.load("cifar10", str(folder), tmp_path / "cache")
        kept.append(sorted((tmp_path / "cache" / "cifar10").iterdir()))
    assert kept[0] == kept[1] != []


def test_an_image_that_changes_in_the_cache_is_read_again_from_its_file(tmp_path):
    folder = write_folder(tmp_path / "batches")
    before = registry.load("cifar10", str(folder), tmp_path / "cache").train.digest
    for path in (tmp_path / "cache" / "cifar10").glob("*/images.npy"):
        path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    registry._read.cache_clear()
    assert registry.load("cifar10", str(folder), tmp_path / "cache").train.digest == before


def test_kept_hashes_are_those_of_the_samples(tmp_path):
    data = registry.load("cifar10", str(write_folder(tmp_path / "batches")), tmp_path / "cache")
    arranged = replace(data.test, layout=(2, 0, 1)).take(np.array([1, 0]))
    smaller = decoding.resize(data.test, PreprocessConfig(size=[8, 8]), tmp_path / "cache")
    for split in (data.train, data.test, arranged, smaller):
        assert split.pixel_hashes.tolist() == hash_samples(split.stored).tolist()


def test_an_empty_folder_is_refused_by_the_file_it_lacks(tmp_path):
    with pytest.raises(DataError, match="data_batch_1: missing"):
        registry.load("cifar10", str(tmp_path))


def test_shapes_has_ten_classes_and_no_test_image_among_the_training_images(shapes):
    assert len(shapes.class_names) == 10
    assert shapes.image_shape == (32, 32, 3)
    assert set(shapes.train.labels) == set(shapes.test.labels) == set(range(10))
    draw_calibration(shapes, samples_per_class=1000, seed=0)  # all of them


@pytest.mark.usefixtures("real_files")
def test_the_real_set():
    loaded = registry.load("cifar10", os.environ["CIFAR10_DIR"])
    assert (len(loaded.train), len(loaded.test)) == (49927, 9980)
    drawn = draw_calibration(loaded, 100, 42)
    assert np.bincount(drawn.split.labels).tolist() == [100] * 10


@pytest.mark.parametrize(("pictured", "targeted"), [(3, 1), (1, 3)])
def test_resized_targets_keep_their_channels(tmp_path, pictured, targeted):
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (8, 6, 6, pictured), np.uint8)
    targets = random.integers(0, 256, (8, 6, 6, targeted), np.uint8)
    np.savez(tmp_path / "pairs.npz", x=images, y=targets)
    config = ArraysConfig(root=str(tmp_path / "pairs.npz"))
    test = registry.read(config, PreprocessConfig(size=4), tmp_path / "cache").test
    assert test.stored.shape[1:] == (4, 4, pictured)
    assert test.labels.shape[1:] == (4, 4, targeted)


def test_a_folder_does_not_calibrate_arrays_with_channels_first(tmp_path):
    """The axes of a picture file, [H, W, C], are others."""
    images = np.random.default_rng(0).integers(0, 256, (8, 3, 6, 6), np.uint8)
    np.savez(tmp_path / "first.npz", x=images, y=np.arange(8) % 2)
    others = tmp_path / "others"
    others.mkdir()
    Image.fromarray(images[0].transpose(1, 2, 0)).save(others / "one.png")
    config = ArraysConfig(root=str(tmp_path / "first.npz"))
    with pytest.raises(ConfigError, match=r"calib\.images: .* are \(3, 6, 6\); expected \[height"):
        registry.read(config, PreprocessConfig(), tmp_path / "cache", calibrating=str(others))
