"""`data=arrays`: files, names, labels and limits."""

import gzip
import io
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from resnet8ptq.config.schema import ArraysConfig
from resnet8ptq.core.errors import ConfigError, DataError, PtqError
from resnet8ptq.data.dataset import Split
from resnet8ptq.data.sampling import draw_calibration, draw_held_out
from resnet8ptq.data.sources import array_files, array_names, arrays
from resnet8ptq.data.splitting import split_one
from tests.helpers.array_files import COUNT, IDS, INPUTS, LABELS, MASK, read, same_samples, unpack
from tests.helpers.arrays import IDX_CODES, pack_idx, whole
from tests.helpers.configs import make_config


@pytest.mark.parametrize("inputs", array_names.INPUTS)
@pytest.mark.parametrize("labels", array_names.LABELS)
@pytest.mark.parametrize("change", [str, str.title])
def test_the_usual_names(tmp_path, inputs, labels, change):
    np.savez(tmp_path / "a.npz", **{change(inputs): INPUTS, change(labels): LABELS, "other": 3})
    data = read(tmp_path / "a.npz")
    same_samples(data)
    assert (data.name, data.class_names, data.named) == ("a", ("0", "1", "2"), False)
    assert data.test.stored.dtype == np.int8


@pytest.mark.parametrize("pattern", ["{}_{}", "{1}_{0}"])
def test_a_split_of_its_own_is_kept(tmp_path, pattern):
    arrays = {"x": INPUTS, "y": LABELS.reshape(-1, 1)}
    sides = {"train": slice(0, 8), "test": slice(8, COUNT)}
    named = {
        pattern.format(name, side): array[part]
        for name, array in arrays.items()
        for side, part in sides.items()
    }
    np.savez(tmp_path / "a.npz", **named)
    data = read(tmp_path / "a.npz")
    np.testing.assert_array_equal(data.train.stored, INPUTS[:8])
    np.testing.assert_array_equal(data.test.stored, INPUTS[8:])
    np.testing.assert_array_equal(data.test.labels, LABELS[8:])


def test_equal_samples_in_both_splits_are_reported(tmp_path, caplog):
    np.savez(
        tmp_path / "a.npz", x_train=INPUTS, y_train=LABELS, x_test=INPUTS[:2], y_test=LABELS[:2]
    )
    read(tmp_path / "a.npz")
    assert "2 of 2 test samples are training samples too" in caplog.text


@pytest.mark.parametrize("split", [True, False])
def test_repeated_test_samples_are_reported(split, tmp_path, caplog):
    samples = np.arange(60.0).reshape(20, 3)
    double = {"x": np.tile(samples, (2, 1)), "y": np.tile(np.arange(20) % 2, 2)}
    train = {"x_train": samples + 0.5, "y_train": np.arange(20) % 2}
    sides = {f"{name}_test": array for name, array in double.items()} | train
    np.savez(tmp_path / "a.npz", **(sides if split else double))
    read(tmp_path / "a.npz")
    assert f"{'20 of 40' if split else '10 of 20'} test samples repeat others" in caplog.text


def test_unnamed_classes_that_are_tested_but_not_trained_are_reported(tmp_path, caplog):
    labels = np.arange(COUNT) % 4
    rare = labels == 2
    sides = {"x_train": INPUTS[~rare], "y_train": labels[~rare], "x_test": INPUTS, "y_test": labels}
    np.savez(tmp_path / "a.npz", **sides)
    read(tmp_path / "a.npz")
    assert "1 of 4 classes have no training samples, such as '2'" in caplog.text


def test_names_that_are_given(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros(3), spectra=INPUTS, kind=LABELS)
    same_samples(read(tmp_path / "a.npz", inputs="spectra", labels="kind"))


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_gzipped_or_not(tmp_path, packed):
    for name, array in (("images", INPUTS), ("labels", LABELS.astype(np.uint8))):
        content = pack_idx(array)
        (tmp_path / name).write_bytes(gzip.compress(content) if packed else content)
    same_samples(read(tmp_path / "images", labels=str(tmp_path / "labels")))


MNIST = ("{}-images-idx3-ubyte", "{}-labels-idx1-ubyte")


@pytest.mark.parametrize("names", [MNIST, ("{}-images.idx3-ubyte.gz", "{}-labels.idx1-ubyte.gz")])
def test_the_names_of_mnist(tmp_path, names):
    for side, part in (("train", slice(0, 8)), ("t10k", slice(8, COUNT))):
        for name, array in zip(names, (INPUTS, LABELS.astype(np.uint8)), strict=True):
            content = pack_idx(array[part])
            path = tmp_path / name.format(side)
            path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    data = read(tmp_path)
    np.testing.assert_array_equal(data.train.stored, INPUTS[:8])
    np.testing.assert_array_equal(data.test.stored, INPUTS[8:])
    np.testing.assert_array_equal(data.test.labels, LABELS[8:])


@pytest.mark.parametrize("side", ["train", "t10k"])
def test_one_side_alone_is_no_split(tmp_path, side):
    for name, array in zip(MNIST, (INPUTS, LABELS.astype(np.uint8)), strict=True):
        (tmp_path / name.format(side)).write_bytes(pack_idx(array))
    same_samples(read(tmp_path))


def test_one_side_does_not_take_the_labels_of_the_other(tmp_path):
    np.savez(tmp_path / "a.npz", x_test=INPUTS, y_train=LABELS)
    with pytest.raises(ConfigError, match=r"data\.labels: got null"):
        read(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", x_test=INPUTS, x_train=INPUTS, y_test=LABELS)
    with pytest.raises(ConfigError, match=r"data\.inputs: got null"):
        read(tmp_path / "b.npz", labels="y_test")


def test_npy_files_are_mapped(tmp_path):
    np.save(tmp_path / "features.npy", INPUTS)
    np.save(tmp_path / "targets.npy", LABELS)
    by_file = read(tmp_path / "features.npy", labels=str(tmp_path / "targets.npy"))
    assert isinstance(by_file.test.stored.whole, np.memmap)
    same_samples(by_file)
    same_samples(read(tmp_path))  # the folder


@pytest.mark.parametrize("name", array_names.CLASSES)
def test_class_names(tmp_path, name):
    names = ["no", "yes", "maybe"]
    np.savez(tmp_path / "a.npz", x=INPUTS, y=LABELS, **{name: names})
    assert read(tmp_path / "a.npz").class_names == tuple(names)
    assert read(tmp_path / "a.npz", classes=["a", "b", "c"]).class_names == ("a", "b", "c")


def test_class_names_of_masks(tmp_path):
    """A mask may have 255, which is no class."""
    masks = np.resize(np.uint8([0, 1, 2, 255]), (COUNT, 2, 4))
    names = ["no", "yes", "maybe"]
    np.savez(tmp_path / "a.npz", x=INPUTS, y=masks)
    assert read(tmp_path / "a.npz").class_names == ()
    assert read(tmp_path / "a.npz", classes=names).class_names == tuple(names)
    np.savez(tmp_path / "b.npz", x=INPUTS, y=masks, classes=names)
    assert read(tmp_path / "b.npz").class_names == tuple(names)


def test_more_names_than_columns_of_labels_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=INPUTS, y=np.ones((COUNT, 2), np.uint8))
    with pytest.raises(DataError, match=r"labels up to 1, but 3 class names \(data\.classes\)"):
        read(tmp_path / "a.npz", classes=["a", "b", "c"])


@pytest.mark.parametrize("one_hot", ["train", "test"])
def test_several_labels_stay_several_if_one_side_is_one_hot(tmp_path, one_hot):
    sides = {}
    for side, offset in (("train", 0), ("test", 50)):
        sides[f"x_{side}"] = np.arange(12, dtype=np.float32).reshape(4, 3) + offset
        rows = np.tile([[1, 1], [0, 1]], (2, 1))
        sides[f"y_{side}"] = np.tile(np.eye(2, dtype=np.int64), (2, 1)) if side == one_hot else rows
    np.savez(tmp_path / "a.npz", **sides)
    data = read(tmp_path / "a.npz")
    for side, split in (("train", data.train), ("test", data.test)):
        assert split.labels.dtype == np.bool_
        np.testing.assert_array_equal(split.labels, sides[f"y_{side}"])


@pytest.mark.parametrize("shape", [(COUNT, 0), (COUNT, 0, 4)])
def test_labels_without_values_are_refused(tmp_path, shape):
    np.savez(tmp_path / "a.npz", x=INPUTS, y=np.zeros(shape, np.uint8))
    with pytest.raises(DataError, match="expected values for each sample"):
        read(tmp_path / "a.npz")


def test_pictures_of_two_sizes_do_not_ask_for_a_size(tmp_path):
    """Arrays are split before they are resized."""
    sides = {}
    for side, size in (("train", 8), ("test", 6)):
        sides[f"x_{side}"] = np.arange(2 * size * size * 3, dtype=np.uint8).reshape(2, size, -1, 3)
        sides[f"y_{side}"] = np.arange(2)
    np.savez(tmp_path / "a.npz", **sides)
    with pytest.raises(DataError, match="expected one shape for both"):
        read(tmp_path / "a.npz")


def test_equal_samples_stay_on_one_side(tmp_path):
    doubled = np.concatenate([INPUTS, INPUTS])
    np.savez(tmp_path / "a.npz", x=doubled, y=np.concatenate([LABELS, LABELS]))
    data = read(tmp_path / "a.npz")
    assert not set(data.train.pixel_hashes) & set(data.test.pixel_hashes)
    assert len(data.train) + len(data.test) == 2 * COUNT


def test_the_split_depends_on_the_seed_and_not_on_the_order(tmp_path):
    np.savez(tmp_path / "a.npz", x=INPUTS, y=LABELS)
    np.savez(tmp_path / "b.npz", x=INPUTS[::-1], y=LABELS[::-1])
    tests = [
        set(read(tmp_path / name, split_seed=seed, test_fraction=0.25).test.pixel_hashes)
        for name, seed in (("a.npz", 0), ("b.npz", 0), ("a.npz", 1))
    ]
    assert tests[0] == tests[1] != tests[2]
    assert [len(labels) for labels in tests] == [3, 3, 3]  # one of four, of each class


SHAPES = hnp.array_shapes(min_dims=1, max_dims=4, max_side=4)


@given(
    st.sampled_from(sorted(IDX_CODES)).flatmap(lambda dtype: hnp.arrays(np.dtype(dtype), SHAPES))
)
def test_any_idx_array_is_read_back(tmp_path_factory, array):
    result = unpack(pack_idx(array), tmp_path_factory.getbasetemp())
    assert (result.dtype, result.shape) == (array.dtype, array.shape)
    assert result.tobytes() == array.tobytes()


@given(st.integers(0, len(pack_idx(INPUTS)) - 1))
def test_a_part_of_an_idx_file_is_refused(tmp_path_factory, cut):
    with pytest.raises((ValueError, struct.error)):
        unpack(pack_idx(INPUTS)[:cut], tmp_path_factory.getbasetemp())


def test_more_than_an_idx_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="it holds more than"):
        unpack(pack_idx(INPUTS) + b"\0", tmp_path)


def wrong_files(folder):
    """Yield a file for each thing that may be wrong, and what is said of it."""

    def npz(name, **arrays):
        np.savez(folder / name, **arrays)
        return folder / name

    yield npz("labels.npz", x=INPUTS, y=LABELS.astype("S")), "[12], expected labels as integers"
    yield (
        npz("targets.npz", x=INPUTS, y=np.full(12, np.nan)),
        "targets.npz: y: NaN or infinity in sample 0",
    )
    yield npz("groups.npz", x=INPUTS, groups=LABELS / 2), "expected an integer or a name for each"
    yield npz("clips.npz", x=INPUTS, clips=LABELS[:3]), "clips is int64 [3]; expected 12 groups"
    yield npz("short.npz", x=INPUTS, y=LABELS[:5]), "y is int64 [5]; expected 12 labels"
    yield npz("negative.npz", x=INPUTS, y=LABELS - 1), "labels from -1 to 1; expected 0 to 999"
    yield npz("many.npz", x=INPUTS, y=LABELS * 5000), "labels from 0 to 10000; expected 0 to 999"
    yield npz("pairs.npz", x=INPUTS, y=np.full((12, 2), 2)), "a column of 0 and 1 for each class"
    yield npz("text.npz", x=np.array(["a"] * 12), y=LABELS), "expected numbers [N, ...]"
    yield npz("flat.npz", x=np.zeros(12), y=LABELS), "expected numbers [N, ...]"
    yield npz("none.npz", x=np.zeros((0, 3)), y=LABELS[:0]), "expected numbers [N, ...]"
    yield npz("single.npz", x=INPUTS[:1], y=LABELS[:1]), "has 1 different samples; expected 2"
    yield (
        npz("few.npz", x=INPUTS, y=LABELS, classes=["a", "b"]),
        "labels up to 2, but 2 class names",
    )
    yield npz("object.npz", x=np.array([{}, []], object), y=LABELS[:2]), "pickled Python objects"
    yield npz("unnamed.npz", a=INPUTS, b=LABELS), "data.inputs: got null"
    yield npz("both.npz", x=INPUTS, images=INPUTS, y=LABELS), "holds x and images"
    yield npz("no_labels.npz", x=INPUTS, kind=LABELS), "data.labels: got null"
    sides = {"x_train": INPUTS, "x_test": INPUTS + 100}
    yield (
        npz("misspelt.npz", **sides, lables_train=LABELS, lables_test=LABELS),
        "expected y_test | labels_test | targets_test | label_test | target_test, or data.labels",
    )
    yield npz("sides.npz", a_train=IDS, b_train=MASK, a_test=IDS, b_test=MASK), "data.labels: got"
    nan = INPUTS.astype(np.float32)
    nan[7, 0, 0] = np.nan
    yield npz("nan.npz", x=nan, y=LABELS), "nan.npz: x: NaN or infinity in sample 7"
    content = npz("whole.npz", x=INPUTS, y=LABELS).read_bytes()
    (folder / "cut.npz").write_bytes(content[: len(content) // 2])
    yield folder / "cut.npz", "cut.npz: cannot be read"
    (folder / "empty.npz").write_bytes(b"")
    yield folder / "empty.npz", "empty.npz: cannot be read"
    with zipfile.ZipFile(folder / "lies.npz", "w") as packed:  # ten billion values in 80 bytes
        header = io.BytesIO()
        shape = {"descr": "|u1", "fortran_order": False, "shape": (10**10, 1)}
        np.lib.format.write_array_header_1_0(header, shape)
        packed.writestr("x.npy", header.getvalue())
        packed.writestr("y.npy", header.getvalue())
    yield folder / "lies.npz", "lies.npz: x: cannot be read"
    (folder / "text.txt").write_text("no array")
    yield folder / "text.txt", "is not an array; expected an .npz, .npy or idx file"
    (folder / "text.npy").write_text("no array")
    yield folder / "text.npy", "text.npy: cannot be read (it is not in NumPy's format)"
    (folder / "packed.npy").write_bytes(content)
    yield folder / "packed.npy", "packed.npy: cannot be read (ValueError: it is an archive"
    with zipfile.ZipFile(folder / "inner.npz", "w") as packed:
        packed.writestr("x.npy", content)
    yield folder / "inner.npz", "inner.npz: x: cannot be read (ValueError: it is an archive"
    (folder / "cut.idx").write_bytes(pack_idx(INPUTS)[:-1])
    yield folder / "cut.idx", "lacks the last 1 bytes"
    yield folder / "gone.npz", "data.root: got "


def test_what_is_wrong_is_one_line_that_names_it(tmp_path):
    for path, message in wrong_files(tmp_path):
        with pytest.raises(PtqError) as caught:
            read(path)
        assert message in str(caught.value), path
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [np.bool_, np.int64, np.float32])
def test_columns_of_0_and_1_are_several_labels(tmp_path, dtype):
    several = np.arange(12)[:, None] % [2, 3] == 0
    np.savez(tmp_path / "several.npz", x=INPUTS, y=several.astype(dtype), classes=["two", "three"])
    data = read(tmp_path / "several.npz")
    assert data.class_names == ("two", "three")
    assert data.test.labels.dtype == np.bool_
    assert len(data.test.strata(2)) == 1


@pytest.mark.parametrize("key", ["inputs", "labels", "groups"])
def test_a_misspelt_name_of_an_array_is_reported(tmp_path, key):
    np.savez(tmp_path / "a.npz", x_train=INPUTS, y_train=LABELS, x_test=INPUTS, y_test=LABELS)
    with pytest.raises(
        ConfigError, match=rf"^data\.{key}: got x_tran, expected a file, or one of x_"
    ):
        read(tmp_path / "a.npz", **{key: "x_tran"})


def test_groups_of_one_name_do_not_fit_a_split(tmp_path):
    """They were ignored, and samples of one group counted as independent."""
    arrays = {f"{name}_{side}": LABELS for side in ("train", "test") for name in ("x", "y")}
    np.savez(tmp_path / "a.npz", **arrays, who=LABELS)
    with pytest.raises(ConfigError, match=r"^data\.groups: got who, .*expected groups \| clips"):
        read(tmp_path / "a.npz", groups="who")


def test_samples_without_labels(tmp_path):
    """They are asked for only where something might be labels."""
    half = COUNT // 2
    sides = {"x_train": INPUTS[:half], "x_test": INPUTS[half:]}
    np.savez(tmp_path / "bare.npz", x=INPUTS)
    np.savez(tmp_path / "more.npz", x=INPUTS, kind=LABELS)
    np.savez(tmp_path / "sides.npz", **sides)
    np.savez(tmp_path / "sides_more.npz", **sides, kind_train=LABELS[:half])
    labelled = ("more.npz", "sides_more.npz")
    for data in (
        *(read(tmp_path / name) for name in ("bare.npz", "sides.npz")),
        *(read(tmp_path / name, labels="none") for name in labelled),
    ):
        assert (data.test.labels, data.train.labels, data.class_names) == (None, None, ())
        assert len(data.test) == len(data.train) == half
    drawn = draw_calibration(data, None, 0)
    assert len(drawn.split) == half
    assert len(draw_held_out(data, 3)) == 3


def test_the_only_array_beside_the_labels_needs_no_usual_name(tmp_path):
    np.savez(tmp_path / "labelled.npz", pixel_values=INPUTS, y=LABELS)
    same_samples(read(tmp_path / "labelled.npz"), labels=LABELS)
    np.savez(tmp_path / "alone.npz", pixel_values=INPUTS)
    assert read(tmp_path / "alone.npz", labels="none").test.labels is None
    with pytest.raises(ConfigError, match=r"data\.inputs: got null"):  # it might be labels
        read(tmp_path / "alone.npz")


@pytest.mark.parametrize("shape", [(COUNT,), (COUNT, 1), (COUNT, 4)])
def test_values_to_predict(tmp_path, shape):
    targets = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    np.savez(tmp_path / "a.npz", x=INPUTS, y=targets)
    data = read(tmp_path / "a.npz")
    same_samples(data, labels=targets)
    assert data.class_names == ()


def test_training_samples_may_lack_what_the_test_samples_have(tmp_path):
    """As where only what is normal trains."""
    clips = np.array(list("aabbccddeeff"))
    half = COUNT // 2
    np.savez(
        tmp_path / "a.npz",
        **{"x_train": INPUTS[:half], "x_test": INPUTS[half:]},
        **{"y_test": LABELS[half:] > 0, "clips_test": clips[half:]},
    )
    data = read(tmp_path / "a.npz")
    assert data.train.labels is None
    assert data.train.groups is None
    np.testing.assert_array_equal(data.test.labels, LABELS[half:] > 0)
    np.testing.assert_array_equal(data.test.groups, [0, 0, 1, 1, 2, 2])


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.2, 0.5, 0.8]))
@settings(max_examples=20)
def test_a_group_is_not_split(seed, fraction):
    random = np.random.default_rng(seed)
    clips = random.integers(0, 30, 200)
    samples = random.normal(size=(200, 3))
    labels = clips % 2
    config = ArraysConfig(test_fraction=fraction, split_seed=seed)
    names = ("a", "b")
    whole = Split(samples, labels, "clips", groups=clips)
    data = split_one("clips", names, whole, Path("clips"), config)
    assert len(data.train) + len(data.test) == 200
    assert not set(data.train.groups) & set(data.test.groups)
    assert set(data.train.labels) == set(data.test.labels) == {0, 1}
    np.testing.assert_array_equal(data.test.labels, data.test.groups % 2)
    assert data.train.hashes is None  # no sample is read


def test_offset_and_scale_are_for_integers(tmp_path):
    np.savez(tmp_path / "a.npz", x=INPUTS.astype(np.float32), y=LABELS)
    with pytest.raises(ConfigError, match=r"data\.offset, data\.scale: got 83 and 1.*float32"):
        read(tmp_path / "a.npz", offset=83.0)
    np.savez(tmp_path / "b.npz", x=INPUTS, y=LABELS)
    data = read(tmp_path / "b.npz", offset=83.0, scale=0.5)
    stored = data.test.stored[:].astype(np.float64)
    np.testing.assert_array_equal(data.test.inputs(slice(None)), (stored - 83) * 0.5)


def test_a_scale_that_is_not_used_is_reported(tmp_path, caplog):
    beside = {"Scale": np.float32(0.5847029), "zero_point": np.int32(83), "offset": np.ones(2)}
    np.savez(tmp_path / "a.npz", x=INPUTS, y=LABELS, **beside)
    read(tmp_path / "a.npz")
    [messages] = caplog.messages
    assert "a.npz: holds Scale 0.5847029, zero_point 83, which are not used; " in messages
    assert messages.endswith("; data.scale=0.5847029 data.offset=83 applies them")
    caplog.clear()
    read(tmp_path / "a.npz", offset=83.0)
    np.savez(tmp_path / "b.npz", x=INPUTS.astype(np.float32), y=LABELS, **beside)
    read(tmp_path / "b.npz")
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.test_fraction=1", "data.test_fraction: got 1.0, expected a fraction, 0 < f < 1"),
        ("data.split_seed=-1", "data.split_seed: got -1, expected 0 <= seed < 2**32"),
        ("data.scale=0", "data.scale: got 0.0, expected a number, not 0"),
        ("data.classes=[a,a]", "expected null or two or more different names"),
    ],
)
def test_wrong_settings_are_refused(setting, message):
    with pytest.raises(ConfigError) as caught:
        make_config("data=arrays", setting)
    assert message in str(caught.value)


def test_calibration_takes_what_there_is():
    assert make_config("data=arrays").calib.samples_per_class is None
    assert make_config("data=arrays", "calib=percentile").calib.samples_per_class is None
    assert make_config("data=arrays", "calib.samples_per_class=7").calib.samples_per_class == 7


def test_one_hot_labels_of_too_many_classes_are_no_values(tmp_path):
    images = np.arange(40 * 4, dtype=np.uint8).reshape(40, 2, 2)
    np.savez(tmp_path / "a.npz", images=images, labels=np.eye(1001, dtype=np.float32)[:40])
    with pytest.raises(DataError, match=r"one-hot rows of 1,001 classes, expected at most 1,000"):
        read(tmp_path / "a.npz")


@pytest.mark.parametrize("dtype", ["float32", "uint8", "bool"])
def test_one_hot_labels_are_classes(tmp_path, dtype, caplog):
    caplog.set_level("INFO")
    classes = np.arange(40) % 4
    images = np.arange(40 * 4, dtype=np.uint8).reshape(40, 2, 2)
    np.savez(tmp_path / "a.npz", images=images, labels=np.eye(4, dtype=dtype)[classes])
    result, labels = whole(read(tmp_path / "a.npz"))
    assert labels.tolist() == [int(image[0, 0]) // 4 % 4 for image in result]
    assert "one-hot, taken as 4 classes" in caplog.text


def test_tokens_without_any_label_are_refused(tmp_path):
    tokens = np.arange(40).reshape(10, 4)
    np.savez(tmp_path / "a.npz", images=tokens, labels=np.full((10, 4), -100))
    with pytest.raises(DataError, match="every label is -100"):
        read(tmp_path / "a.npz")


def gzipped(path: Path, shape, count: int) -> Path:
    """An idx file of zeros whose header says `shape`."""
    with gzip.open(path, "wb") as file:
        file.write(struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape))
        file.write(bytes(count))
    return path


def test_a_packed_idx_file_is_unpacked_in_parts(tmp_path):
    count = 2**27
    path = gzipped(tmp_path / "a.gz", (2, count // 2), count)
    tracemalloc.start()
    try:
        with gzip.open(path) as file:
            array_files.unpack_idx(file, path.stat().st_size, tmp_path / "a.npy")
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < count / 2
    assert np.load(tmp_path / "a.npy", mmap_mode="r").shape == (2, count // 2)


def test_a_packed_file_that_holds_too_much_is_refused_by_its_header(tmp_path, monkeypatch):
    monkeypatch.setattr(array_files, "PACKED_BYTES", 10_000)
    path = gzipped(tmp_path / "a.gz", (10, 1000), 10_000)
    with pytest.raises(DataError, match="has 1 different"):
        read(path)
    path = gzipped(tmp_path / "b.gz", (11, 1000), 11_000)
    with pytest.raises(
        DataError, match=r"b\.gz: .*unpacks to 11,000 bytes, expected at most 10,000"
    ):
        read(path)
    with pytest.raises(
        DataError, match=r"c\.gz: .*it unpacks to [\d,]{38} bytes, expected at most 10,000 from"
    ):
        read(gzipped(tmp_path / "c.gz", (2**32 - 1,) * 3, 0))
    np.savez_compressed(tmp_path / "d.npz", x=np.zeros((11, 1000), np.uint8))
    with pytest.raises(
        DataError, match=r"d\.npz: x: .*it unpacks to 11,128 bytes, expected at most 11,000"
    ):
        read(tmp_path / "d.npz")


def test_more_samples_or_names_than_there_may_be(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "MAX_SAMPLES", 11)
    np.savez(tmp_path / "a.npz", x=INPUTS, y=LABELS)
    with pytest.raises(DataError, match=r"x: has 12 samples, expected at most 11"):
        read(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", x=INPUTS[:6], y=LABELS[:6], classes=np.zeros(1001, "U1"))
    with pytest.raises(DataError, match=r"classes is <U1 \[1001\]; expected at most 1000 names"):
        read(tmp_path / "b.npz")


@pytest.mark.parametrize(
    "shape", [(2**50, 2), (2**62, 4), (-1, 4), (2**70, 4), (2**32, 2**32), (1,) * 99]
)
@pytest.mark.filterwarnings("error")
def test_a_header_that_promises_more_than_there_is(tmp_path, shape):
    content = io.BytesIO()
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(content, header)
    (tmp_path / "a.npy").write_bytes(content.getvalue() + bytes(100))
    with pytest.raises(DataError, match=r"a\.npy: cannot be read"):
        read(tmp_path / "a.npy")


@pytest.mark.parametrize("side", ["val", "validation"])
def test_validation_arrays_are_the_test_side_where_there_is_no_other(tmp_path, side):
    train = {"x_train": INPUTS[:8], "y_train": LABELS[:8]}
    other = {f"x_{side}": INPUTS[8:], f"y_{side}": LABELS[8:]}
    np.savez(tmp_path / "a.npz", **train, **other)
    data = read(tmp_path / "a.npz")
    np.testing.assert_array_equal(data.train.stored, INPUTS[:8])
    np.testing.assert_array_equal(data.test.stored, INPUTS[8:])
    np.testing.assert_array_equal(data.test.labels, LABELS[8:])
    np.savez(tmp_path / "b.npz", **train, **other, x_test=INPUTS[6:], y_test=LABELS[6:])
    np.testing.assert_array_equal(read(tmp_path / "b.npz").test.stored, INPUTS[6:])
    assert len(read(tmp_path / "a.npz", inputs=f"x_{side}", labels=f"y_{side}").test) < 8


def test_array_files_of_one_name_are_refused(tmp_path):
    for side in ("train", "test"):
        np.save(tmp_path / f"x.{side}.npy", INPUTS)
        np.save(tmp_path / f"y.{side}.npy", LABELS)
    with pytest.raises(DataError, match=r"x\.train\.npy: has the name 'x', like x\.test\.npy"):
        read(tmp_path)


def test_an_unpacked_idx_file_beside_its_gz_is_one_array(tmp_path):
    for name, array in zip(MNIST, (INPUTS, LABELS.astype(np.uint8)), strict=True):
        packed = pack_idx(array)
        (tmp_path / name.format("t10k")).write_bytes(packed)
        (tmp_path / (name.format("t10k") + ".gz")).write_bytes(gzip.compress(packed))
    same_samples(read(tmp_path))


@pytest.mark.parametrize(
    ("train", "test", "expected"),
    [
        ([0, 255], [255], ([0, 1], [1])),
        ([0, 255], [0], ([0, 1], [0])),
        ([0, 1, 255], [0, 255], ([0, 1, 255], [0, 255])),
    ],
)
def test_masks_of_both_sides_are_black_and_white_together(tmp_path, train, test, expected):
    """Beside classes 0 and 1, 255 marks pixels without a class."""
    sides = {}
    for side, values in (("train", train), ("test", test)):
        sides[f"x_{side}"] = np.arange(4 * 6 * len(side), dtype=np.uint8).reshape(-1, 2, 3, 4)[:3]
        sides[f"y_{side}"] = np.resize(np.uint8(values), (len(sides[f"x_{side}"]), 2, 3))
    np.savez(tmp_path / "a.npz", **sides)
    data = read(tmp_path / "a.npz")
    assert tuple(np.unique(split.labels).tolist() for split in (data.train, data.test)) == expected
