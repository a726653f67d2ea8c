"""Which data set a run settles on, the calibration draw, and batches."""

import hashlib
import logging
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resnet8ptq.config.schema import DataConfig, PreprocessConfig
from resnet8ptq.core import cache, console
from resnet8ptq.core.errors import ConfigError, DataError, DataNotFoundError
from resnet8ptq.data import decoding, locate, registry
from resnet8ptq.data.dataset import Dataset, Split, hash_samples
from resnet8ptq.data.lazy import AT_ONCE
from resnet8ptq.data.sampling import (
    LEAST_TO_CHOOSE,
    draw_calibration,
    draw_held_out,
    draw_selection,
    halve,
    leave_out,
)
from resnet8ptq.data.sources import cifar10
from resnet8ptq.experiment.samples import draw
from tests.helpers.cifar_files import make_batch, pickle_published, write_folder
from tests.helpers.configs import make_config

CIFAR10 = DataConfig(name="cifar10")


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """No CIFAR-10 in any of the usual places; returns the tries to download it."""
    tries: list[Path] = []

    def refuse(folder: Path) -> Path:
        tries.append(folder)
        raise ConnectionError("no network in tests")

    monkeypatch.delenv("CIFAR10_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cifar10, "fetch", refuse)
    console.warn_once.cache_clear()
    return tries


def make_places(root: Path) -> dict[str, Path]:
    """Folders that stand for a data set each; they are told apart by path alone."""
    places = {
        "root": root / "given",
        "env": root / "named",
        "local": root / "data" / "cifar-10-batches-py",
    }
    for position in places.values():
        position.mkdir(parents=True)
    return places


# Which data set


def test_data_root_wins(nowhere, tmp_path, monkeypatch):
    places = make_places(tmp_path)
    monkeypatch.setenv("CIFAR10_DIR", str(places["env"]))
    settled = locate.find_data(DataConfig(name="cifar10", root=str(places["root"])))
    assert settled == DataConfig(name="cifar10", root=str(places["root"]))
    assert nowhere == []


def test_then_the_environment(nowhere, tmp_path, monkeypatch):
    places = make_places(tmp_path)
    monkeypatch.setenv("CIFAR10_DIR", str(places["env"]))
    assert locate.find_data(CIFAR10).root == str(places["env"])
    assert nowhere == []


def test_then_the_working_folder(nowhere, tmp_path):
    places = make_places(tmp_path)
    assert locate.find_data(CIFAR10).root == str(places["local"])
    assert nowhere == []


def test_a_named_folder_that_is_not_there_is_refused(nowhere, tmp_path, monkeypatch):
    """Results on other data than those that were named would mislead."""
    make_places(tmp_path)
    monkeypatch.setenv("CIFAR10_DIR", str(tmp_path / "gone"))
    with pytest.raises(
        ConfigError, match=r"^\$CIFAR10_DIR: got .*gone \(not there\), expected a folder"
    ):
        locate.find_data(CIFAR10)
    assert nowhere == []


def test_then_the_download_cache(tmp_path, monkeypatch):
    """What was downloaded once is found without a network."""
    archive = tmp_path / "downloads" / "cifar-10-python.tar.gz"
    archive.parent.mkdir()
    folder = write_folder(tmp_path / "packed" / cifar10.FOLDER)
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(folder, arcname=cifar10.FOLDER)
    monkeypatch.delenv("CIFAR10_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cifar10, "URL", "http://127.0.0.1:9/cifar-10-python.tar.gz")  # no server
    monkeypatch.setattr(cifar10, "MD5", hashlib.md5(archive.read_bytes()).hexdigest())
    monkeypatch.setattr(cache, "downloads_folder", lambda: archive.parent)

    settled = locate.find_data(CIFAR10)
    assert settled.name == "cifar10"
    assert Path(str(settled.root)).is_relative_to(archive.parent)
    loaded = registry.load(settled.name, settled.root)
    assert (len(loaded.train), len(loaded.test)) == (20, 3)


def test_a_relative_root_is_made_absolute(nowhere, tmp_path):
    (tmp_path / "here").mkdir()
    assert locate.find_data(DataConfig(name="cifar10", root="here")).root == str(tmp_path / "here")


def test_a_root_under_the_home_folder_is_found(nowhere, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate.find_data(DataConfig(name="cifar10", root="~/here")).root == str(
        tmp_path / "here"
    )


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_root_that_is_no_folder_is_refused(nowhere, tmp_path, kind):
    root = tmp_path / "root"
    if kind == "file":
        root.write_text("")
    with pytest.raises(
        ConfigError, match=rf"^data\.root: got {root}( \(not there\))?, expected a folder"
    ):
        locate.find_data(DataConfig(name="cifar10", root=str(root)))
    assert nowhere == []


def test_where_nothing_is_found_shapes_stands_in_and_says_so(nowhere, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        settled = locate.find_data(CIFAR10)
    assert (settled.name, settled.root) == ("shapes", None)
    [record] = caplog.records
    message = record.getMessage()
    assert record.levelno == logging.WARNING
    for part in ("shapes", str(tmp_path / "data"), cifar10.URL):
        assert part in message
    assert "ConnectionError" in message
    assert "\n" not in message


def test_where_nothing_is_found_error_refuses(nowhere, tmp_path):
    with pytest.raises(DataNotFoundError) as caught:
        locate.find_data(DataConfig(name="cifar10", on_missing="error"))
    message = str(caught.value)
    assert "data.root" in message
    assert str(tmp_path / "data") in message
    assert cifar10.URL in message


def test_a_download_is_tried_once_in_a_process(nowhere, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert locate.find_data(CIFAR10).name == "shapes"
    assert nowhere == [cache.downloads_folder()]
    assert len(caplog.records) == 1  # not a warning for each job of a sweep


def test_the_embedded_set_is_never_for_a_network_of_the_users_own(nowhere):
    with pytest.raises(DataNotFoundError) as caught:
        locate.find_data(CIFAR10, own_network=True)
    assert "CIFAR10_DIR" in str(caught.value)


def test_shapes_is_settled_without_a_search_or_a_root(nowhere, tmp_path):
    for root in (None, str(tmp_path)):
        assert locate.find_data(DataConfig(name="shapes", root=root)) == DataConfig(name="shapes")
    assert nowhere == []


# Loading


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


# The calibration draw


def make_dataset(per_class: int = 20, classes: int = 3) -> Dataset:
    random = np.random.default_rng(5)
    labels = random.permutation(np.repeat(np.arange(classes), per_class))

    def split(labels: np.ndarray) -> Split:
        images = random.integers(0, 256, (len(labels), 4, 4, 3), dtype=np.uint8)
        return Split(images, labels, "here")

    names = tuple("abcdefghij"[:classes])
    return Dataset("small", names, split(labels), split(np.arange(classes)))


SMALL = make_dataset()


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 20))
@settings(max_examples=50)
def test_a_draw_takes_n_of_each_class_once(seed, count):
    drawn = draw_calibration(SMALL, count, seed)
    assert np.bincount(drawn.split.labels, minlength=3).tolist() == [count] * 3
    assert (np.diff(drawn.indices) > 0).all()  # sorted, and none twice
    assert np.array_equal(drawn.split.stored, SMALL.train.stored[drawn.indices])
    assert np.array_equal(drawn.split.labels, SMALL.train.labels[drawn.indices])


def test_the_digest_is_of_the_indices():
    drawn = draw_calibration(SMALL, 2, 0)
    stored = np.array(drawn.indices.tolist(), dtype="<i8").tobytes()
    assert drawn.digest == hashlib.sha256(stored).hexdigest()


def test_more_than_a_class_has_is_refused_by_its_name():
    with pytest.raises(ConfigError) as caught:
        draw_calibration(SMALL, 21, 0)
    message = str(caught.value)
    assert message.startswith("calib.samples_per_class: got 21, expected at most 20")
    assert message.endswith("of class 'a' in small")


def test_a_class_with_fewer_images_gives_all_of_them(caplog):
    few = SMALL.train.take(np.flatnonzero(SMALL.train.labels != 1))
    drawn = draw_calibration(Dataset("small", SMALL.class_names, few, SMALL.test), 3, 0)
    assert np.bincount(drawn.split.labels).tolist() == [3, 0, 3]
    assert "got 3, but 1 of 3 classes of small have fewer training samples" in caplog.text


def test_a_training_image_that_is_a_test_image_does_not_calibrate():
    test = Split(SMALL.train.stored[[7, 9]], SMALL.train.labels[[7, 9]], "here")
    mixed = Dataset("small", SMALL.class_names, SMALL.train, test)
    assert not {7, 9} & {*draw_calibration(mixed, None, 0).indices.tolist()}
    same = Dataset("small", SMALL.class_names, SMALL.train, SMALL.train)
    with pytest.raises(DataError, match=f"small: {len(SMALL.train)} calibration samples are test"):
        draw_calibration(same, None, 0)


def test_many_classes_share_two_thousand_calibration_samples():
    labels = np.repeat(np.arange(50), 100)
    split = Split(np.arange(5000, dtype=np.float32)[:, None], labels, "here")
    test = Split(-1 - split.stored, labels, "here")
    many = Dataset("many", tuple(map(str, range(50))), split, test)
    drawn = draw_calibration(many, None, 0)
    assert np.bincount(drawn.split.labels).tolist() == [40] * 50
    assert len(draw_calibration(many, 60, 0).split) == 3000


def test_one_different_pixel_makes_another_image():
    images = SMALL.train.stored.copy()
    images[:, 0, 0, 0] ^= 1
    test = Split(images, SMALL.train.labels, "here")
    draw_calibration(Dataset("small", SMALL.class_names, SMALL.train, test), 20, 0)


# Splits and batches


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


def test_samples_of_their_own_calibrate_where_there_are_any():
    data = make_dataset()
    assert data.calibrating is data.train
    own = data.train.take(np.arange(5))
    given = replace(data, calibration=own)
    assert given.calibrating is own

    def limit(split: Split) -> Split:
        return replace(split, layout=(2, 0, 1), at_once=3)

    limited = given.with_splits(limit)
    for split in (limited.train, limited.test, limited.calibration):
        assert (split.layout, split.at_once) == ((2, 0, 1), 3)
    assert data.with_splits(limit).calibration is None


# Held-out images


def pixels(split: Split) -> set[bytes]:
    return {image.tobytes() for image in split.stored}


@given(images=st.integers(1, 140), taken=st.integers(0, 30))
@settings(max_examples=50)
def test_held_out_images_are_as_even_as_the_classes_allow(images, taken):
    """Seven classes of 30, or the last of fewer."""
    data = make_dataset(per_class=30, classes=7)
    last = data.train.take(np.flatnonzero(data.train.labels == 6)[:taken])
    drawn = draw_held_out(data, images, [last] if taken else [])
    assert len(drawn) == len(pixels(drawn)) == images
    counts = np.bincount(drawn.labels, minlength=7)
    assert counts[6] <= 30 - taken
    assert counts[:6].max() - counts[:6].min() <= 1
    assert counts[6] == 30 - taken or counts.max() - counts[6] <= 1


def test_held_out_images_are_neither_test_images_nor_taken():
    test = SMALL.train.take(np.arange(10))
    leaky = Dataset("small", SMALL.class_names, SMALL.train, test)
    scored = draw_held_out(leaky, 20)
    others = draw_held_out(leaky, 30, [scored])
    assert pixels(scored) | pixels(others) | pixels(test) == pixels(SMALL.train)
    with pytest.raises(ConfigError, match=r"held_out_images: got 31, expected at most 30"):
        draw_held_out(leaky, 31, [scored])


def test_what_is_held_out_leaves_some_to_calibrate_with():
    with pytest.raises(ConfigError, match=r"held_out_images: leaves none of the 60 training"):
        draw_calibration(SMALL, None, 0, [SMALL.train])


def test_a_draw_of_all_samples_says_that_the_seed_has_no_effect(caplog):
    caplog.set_level("INFO")
    for per_class, draws in ((None, 1), (2, 2)):
        console.log_once.cache_clear()
        caplog.clear()
        drawn = [draw_calibration(SMALL, per_class, seed).indices.tolist() for seed in (1, 2)]
        assert len({*map(tuple, drawn)}) == draws
        assert any("seed has no effect" in message for message in caplog.messages) == (draws == 1)


def test_few_images_are_held_out_by_halves(caplog):
    caplog.set_level("INFO")
    console.log_once.cache_clear()
    scored = draw_held_out(SMALL, None)
    others = draw_held_out(SMALL, None, [scored])
    free = len(SMALL.train)
    assert (len(scored), len(others)) == (free // 2, (free - free // 2) // 2)
    assert "small: 30 of 60 training samples are held out, half of them" in caplog.messages[0]
    [one] = draw_held_out(make_dataset(per_class=1, classes=1), None).labels
    assert one == 0


def test_2000_images_are_held_out_where_there_are_enough(shapes, caplog):
    caplog.set_level("INFO")
    scored = draw_held_out(shapes, None)
    assert scored.digest == draw_held_out(shapes, 2000).digest
    again = [draw_held_out(shapes, images, [scored]).digest for images in (None, 2000)]
    assert again[0] == again[1]
    assert caplog.messages == []


@pytest.mark.parametrize("count", [10, 20, 40])
def test_held_out_images_are_the_first_of_each_class_shuffled_by_seed_0(count):
    """So fewer are a part of more, whatever the machine."""
    random = np.random.default_rng(0)
    members = [random.permutation(np.flatnonzero(SMALL.train.labels == k)) for k in range(3)]
    turns = np.stack(members, axis=1).reshape(-1)
    expected = SMALL.train.stored[np.sort(turns[:count])]
    assert np.array_equal(draw_held_out(SMALL, count).stored, expected)


def test_what_is_left_out_is_every_copy_of_it():
    twice = SMALL.train.take(np.resize(np.arange(20), 40))
    left = leave_out(twice, [SMALL.train.take(np.arange(5)), SMALL.train.take(np.array([7]))])
    kept = [*range(5, 7), *range(8, 20)]
    assert np.array_equal(left.stored, SMALL.train.stored[kept + kept])


def test_scored_images_are_those_of_the_split():
    def draw_scored(split):
        words = ("calib.samples_per_class=5", "held_out_images=20", "evaluate.choice=none")
        config = make_config(*words, f"evaluate.split={split}")
        return draw(config, SMALL, False, lambda split: None).data

    assert draw_scored("test") is SMALL
    held_out = draw_scored("held_out")
    assert held_out.train is SMALL.train
    assert held_out.test.digest == draw_held_out(SMALL, 20).digest


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 10))
@settings(max_examples=25)
def test_held_out_images_do_not_calibrate(seed, count):
    held_out = draw_held_out(SMALL, 30)
    drawn = draw_calibration(SMALL, count, seed, [held_out])
    assert np.bincount(drawn.split.labels, minlength=3).tolist() == [count] * 3
    assert pixels(drawn.split).isdisjoint(pixels(held_out))
    assert np.array_equal(drawn.split.stored, SMALL.train.stored[drawn.indices])


def test_what_is_held_out_leaves_fewer_to_calibrate_with():
    message = (
        r"samples_per_class: got 11, expected at most 10: .*'a' in small that are not held out$"
    )
    with pytest.raises(ConfigError, match=message):
        draw_calibration(SMALL, 11, 0, [draw_held_out(SMALL, 30)])


def test_without_held_out_images_the_calibration_draw_is_the_plain_one():
    random = np.random.default_rng(42)
    members = [np.flatnonzero(SMALL.train.labels == label) for label in range(3)]
    plain = np.concatenate([random.choice(member, 5, replace=False) for member in members])
    assert draw_calibration(SMALL, 5, 42).indices.tolist() == sorted(plain.tolist())


# Groups, such as clips


def make_clips(sizes, classes=3, mixed=False):
    """Training clips of `sizes` windows in a random order, and four test samples."""
    groups = np.repeat(np.arange(len(sizes)), sizes)
    groups = np.random.default_rng(0).permutation(groups)
    labels = np.arange(len(groups)) % classes if mixed else groups % classes
    windows = np.arange(len(groups) + 4, dtype=np.float32)[:, None]
    train = Split(windows[4:], labels, "clips", groups=groups)
    test = Split(windows[:4], np.arange(4) % classes, "clips")
    return Dataset("clips", tuple("abcdef"[:classes]), train, test)


@given(
    sizes=st.lists(st.integers(1, 12), min_size=12, max_size=40),
    part=st.integers(3, 12),
    seed=st.integers(0, 99),
    mixed=st.booleans(),
)
@settings(max_examples=50)
def test_no_group_has_two_roles(sizes, part, seed, mixed):
    data = make_clips(sizes, mixed=mixed)
    count = max(1, sum(sizes) // part)
    scored = draw_held_out(data, count)
    others = draw_held_out(data, count, [scored])
    calibrating = draw_calibration(data, None, seed, [scored, others]).split
    left = leave_out(data.train, [scored, others])
    roles = [{*split.groups.tolist()} for split in (scored, others, calibrating)]
    assert sum(map(len, roles)) == len(set.union(*roles))
    for split, drawn in zip((scored, others, calibrating), roles, strict=True):
        assert len(split) == np.isin(data.train.groups, [*drawn]).sum()  # whole
    assert {*left.groups.tolist()} == {*data.train.groups.tolist()} - roles[0] - roles[1]


@given(count=st.integers(1, 20), seed=st.integers(0, 99), taken=st.booleans())
@settings(max_examples=25)
def test_groups_of_one_sample_are_drawn_as_samples(count, seed, taken):
    grouped = replace(SMALL, train=replace(SMALL.train, groups=np.arange(60)[::-1]))
    both = []
    for data in (SMALL, grouped):
        held_out = draw_held_out(data, count)
        drawn = draw_calibration(data, None, seed, [held_out] if taken else [])
        both.append((drawn.indices.tolist(), held_out.stored[:].tolist()))
    assert both[0] == both[1]


def test_groups_are_balanced_by_the_samples_of_each_class():
    data = make_clips([20, 5, 2] * 20)  # clips of class a have 20 windows, of b 5, of c 2
    counts = np.bincount(draw_held_out(data, 120).labels, minlength=3)
    assert counts.max() - counts.min() <= 20
    counts = np.bincount(draw_calibration(data, 40, 0).split.labels, minlength=3)
    assert counts.tolist() == [40] * 3
    few = draw_calibration(data, 3, 0).split  # a clip of each class at least, never a part
    assert np.bincount(few.labels, minlength=3).tolist() == [20, 5, 2]


def test_samples_of_other_arrays_have_other_groups():
    data = make_clips([4] * 10)
    other = Split(np.full((4, 1), 99, np.float32), None, "other", groups=np.arange(4))
    assert len(leave_out(data.train, [other])) == len(data.train)


def test_too_few_groups_are_refused():
    with pytest.raises(ConfigError, match=r"data\.groups: got 1 .* expected 2 groups or more"):
        draw_held_out(make_clips([30]), 5)
    assert draw_selection(make_clips([10] * 99), None, SMALL.test) is None
    assert len(draw_calibration(make_clips([10] * 9), None, 0).split) == 90


# Selection samples


def test_halves_have_as_many_of_each_class_and_keep_groups_together():
    labels = np.repeat(np.arange(3), 100)
    images = np.arange(300, dtype=np.float32)[:, None]
    groups = np.repeat(np.arange(150), 2)
    for grouped in (None, groups):
        split = Split(images, labels, "here", groups=grouped)
        one, other = halve(split, 3)
        assert np.bincount(one.labels).tolist() == np.bincount(other.labels).tolist() == [50] * 3
        places = np.concatenate([one.stored[:], other.stored[:]])[:, 0]
        assert sorted(places) == sorted(images[:, 0])
        again, _ = halve(split, 3)
        assert np.array_equal(one.stored[:], again.stored[:])
    assert not set(one.groups) & set(other.groups)


def test_too_few_samples_are_not_halved():
    images = np.zeros((99, 1), np.uint8)
    assert halve(Split(images, np.zeros(99, np.int64), "here"), 1) is None
    one, other = halve(Split(np.zeros((100, 1), np.uint8), None, "here"), 0)
    assert len(one) == len(other) == LEAST_TO_CHOOSE


def test_too_few_samples_for_a_selection_are_chosen_on_and_reported():
    assert len(SMALL.test) < 2 * LEAST_TO_CHOOSE
    config = make_config("evaluate.split=choice", "evaluate.choice=half")
    config = replace(config, calib=replace(config.calib, samples_per_class=5))
    drawn = draw(config, SMALL, False, lambda split: None)
    assert len(drawn.reported) == len(SMALL.test) and drawn.selection is None


def test_what_chooses_neither_calibrates_nor_tests_and_depends_little_on_the_draw():
    data = make_dataset(per_class=100)
    draws = [draw_calibration(data, 10, seed).split for seed in (1, 2)]
    first, second = (draw_selection(data, 120, drawn) for drawn in draws)
    assert pixels(first).isdisjoint(pixels(draws[0]) | pixels(data.test))
    whole = pixels(draw_held_out(data, 120))
    assert pixels(first) == whole - pixels(draws[0])
    assert len(pixels(first) & pixels(second)) > 80
    assert draw_selection(data, 50, draws[0]) is None  # some of them calibrate
    assert draw_selection(SMALL, None, draws[0]) is None
    bare = replace(data, train=replace(data.train, labels=None))
    assert draw_selection(bare, 120, draws[0]) is None


@pytest.mark.parametrize(("per_class", "left"), [(100, True), (180, True), (220, False)])
def test_of_few_samples_those_that_choose_do_not_calibrate(per_class, left):
    """Three classes, of which 100 each would calibrate: more than half, or less."""
    data = make_dataset(per_class=per_class)
    drawn = [draw_calibration(data, None, seed).split for seed in (1, 2)]
    calibrating = pixels(drawn[0]) | pixels(drawn[1])
    assert pixels(draw_held_out(data, None)).isdisjoint(calibrating) == left
    if left:
        chosen = [pixels(draw_selection(data, None, split)) for split in drawn]
        assert chosen[0] == chosen[1] == pixels(draw_held_out(data, None))
    # What is asked for is given.
    assert len(draw_calibration(data, per_class, 1).split) == 3 * per_class
