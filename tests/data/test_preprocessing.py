"""From stored samples to network inputs: arithmetic, layout, and what identifies them."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.config.schema import DataConfig, PreprocessConfig
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.data import registry
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.preprocessing import Preprocessing, arrange, make_preprocessing
from tests.helpers.configs import make_config

PIXELS = np.arange(256, dtype=np.uint8)
LABELS = np.zeros(2, np.int64)


def split_of(images, **settings) -> Split:
    return Split(images, np.zeros(len(images), np.int64), "here", **settings)


def test_without_settings_nothing_changes():
    """Neither the values nor the digest, under which baselines and statistics are kept."""
    images = np.random.default_rng(0).integers(0, 256, (2, 4, 3, 3), dtype=np.uint8)
    split = split_of(images)
    np.testing.assert_array_equal(split.inputs(slice(None)), images.astype(np.float32))
    content = str(images.shape).encode() + images.tobytes() + LABELS.tobytes()
    assert split.digest == hashlib.sha256(content).hexdigest()
    assert make_config("data=shapes").preprocess == PreprocessConfig()


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("raw", lambda pixel: pixel),
        ("unit", lambda pixel: pixel / np.float32(255)),
        ("symmetric", lambda pixel: pixel / 127.5 - 1),
        ("keras_mobilenet", lambda pixel: pixel / 127.5 - 1),
    ],
)
def test_presets_for_any_channels(preset, expected):
    config = make_config("data=shapes", f"preprocess={preset}").preprocess
    steps = make_preprocessing(config, (256, 1), 0.0, 1.0)
    result = steps.apply(PIXELS.reshape(1, 256, 1)).ravel()
    wanted = np.asarray(expected(PIXELS.astype(np.float32)), np.float32)
    np.testing.assert_allclose(result, wanted, rtol=2e-7, atol=1e-7)


@pytest.mark.parametrize("preset", ["raw", "torchvision_imagenet"])
def test_one_number_is_a_list_of_one(preset):
    """And numbers are floats, however they are written: the settings identify a run."""
    alone, listed = (
        make_config("data=shapes", f"preprocess={preset}", *given).preprocess
        for given in (
            ("preprocess.mean=127", "preprocess.std=1e2"),
            ("preprocess.mean=[127]", "preprocess.std=[100]"),
        )
    )
    assert repr(alone) == repr(listed)
    assert (repr(alone.mean), repr(alone.std)) == ("[127.0]", "[100.0]")


def test_presets_for_colours():
    pixel = np.array([[[[10, 100, 200]]]], np.uint8)  # red, green, blue

    def apply(preset):
        config = make_config("data=shapes", f"preprocess={preset}").preprocess
        return make_preprocessing(config, (1, 1, 3), 0.0, 1.0).apply(pixel).ravel()

    result = apply("torchvision_imagenet")
    wanted = (np.array([10, 100, 200]) / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(result, wanted, rtol=1e-6)
    np.testing.assert_allclose(
        apply("caffe"), [200 - 103.939, 100 - 116.779, 10 - 123.68], rtol=1e-6
    )


def test_stored_integers_stand_for_others():
    steps = Preprocessing(offset=83, step=0.5847029)
    result = steps.apply(np.array([[-128, 83, 127]], np.int8))
    np.testing.assert_array_equal(
        result, np.array([[-211 * 0.5847029, 0, 44 * 0.5847029]], np.float32)
    )


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4).flatmap(
        lambda shape: st.tuples(st.just(tuple(shape)), st.permutations(range(len(shape))))
    )
)
def test_layout_permutes_the_axes(drawn):
    shape, layout = drawn
    samples = np.arange(2 * np.prod(shape)).reshape(2, *shape)
    result = arrange(samples, layout)
    assert result.flags.c_contiguous
    assert result.shape == (2, *(shape[axis] for axis in layout))
    np.testing.assert_array_equal(arrange(result, np.argsort(layout)), samples)


def test_layout_adds_and_takes_away_a_channel_axis():
    grey = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    assert arrange(grey, (2, 0, 1)).shape == (2, 1, 3, 4)
    assert arrange(grey[..., np.newaxis], (0, 1)).shape == (2, 3, 4)


def test_inputs_of_all_kinds_are_the_same():
    images = np.random.default_rng(1).integers(0, 256, (5, 4, 3, 3), dtype=np.uint8)
    steps = Preprocessing(scale=1 / 255, bgr=True, mean=(0.1, 0.2, 0.3))
    split = split_of(images, preprocessing=steps, layout=(2, 0, 1))
    whole = split.inputs(slice(None))
    assert whole.shape == (5, *split.input_shape) == (5, 3, 4, 3)
    assert whole.dtype == np.float32
    np.testing.assert_array_equal(np.concatenate(list(split.batches(2))), whole)
    chosen = np.array([3, 0])
    np.testing.assert_array_equal(split.inputs(chosen), whole[chosen])
    np.testing.assert_array_equal(split.take(chosen).inputs(slice(None)), whole[chosen])


def test_preprocessing_and_dtype_are_part_of_the_identity():
    """The layout is not: it follows from the network, which every key names as well."""
    images = np.zeros((2, 3), np.uint8)
    splits = [
        split_of(images),
        split_of(images.astype(np.int8)),
        split_of(images, preprocessing=Preprocessing(scale=2.0)),
    ]
    assert len({split.digest for split in splits}) == 3
    assert split_of(images, layout=(0,)).digest == splits[0].digest


def test_both_splits_are_arranged():
    images = np.zeros((2, 4, 3, 3), np.uint8)
    plain = Dataset("made up", ("a",), split_of(images), split_of(images[:1]))
    result = plain.with_splits(lambda split: replace(split, layout=(2, 0, 1)))
    assert [split.layout for split in (result.train, result.test)] == [(2, 0, 1)] * 2
    assert (len(result.train), len(result.test)) == (2, 1)


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((2, 4, 3, 1), np.uint8, True),
        ((2, 4, 3), np.uint8, False),
        ((2, 4, 3, 3), np.float32, False),
    ],
)
def test_what_counts_as_pictures(shape, dtype, expected):
    assert split_of(np.zeros(shape, dtype)).has_pictures == expected


@pytest.mark.slow
def test_resizing_stored_pictures(cache_root):
    raw = registry.read(DataConfig("shapes"), PreprocessConfig(), cache_root)
    small = registry.read(DataConfig("shapes"), PreprocessConfig(size=[8, 16]), cache_root)
    assert small.image_shape == (8, 16, 3)
    grey = registry.read(DataConfig("shapes"), PreprocessConfig(channels="grey"), cache_root)
    assert grey.image_shape == (32, 32, 1)
    luminance = raw.test.stored[0] @ [0.299, 0.587, 0.114]  # ITU-R BT.601
    np.testing.assert_allclose(grey.test.stored[0][..., 0], luminance, atol=1)
    assert len({item.test.digest for item in (raw, small, grey)}) == 3


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("preprocess.size=[32]", "preprocess.size: got [32], expected null, a number of pixels"),
        ("preprocess.size=0", "preprocess.size: got 0, expected null"),
        ("preprocess.resize=stretch", "expected squash | fit | crop | letterbox"),
        ("preprocess.filter=best", "expected nearest | box | bilinear"),
        ("preprocess.channels=rgba", "expected rgb | bgr | grey"),
        ("preprocess.scale=0", "preprocess.scale: got 0.0, expected a number, not 0"),
        ("preprocess.std=[0.0]", "preprocess.std: got [0.0], expected numbers > 0"),
        ("preprocess.std=0", "preprocess.std: got 0, expected numbers > 0"),
        ("preprocess.mean=a", "preprocess.mean: got 'a', expected one number, or one for each"),
        ("preprocess.mean=[1,a]", "preprocess.mean: got [1, 'a'], expected one number"),
        ("preprocess.mean=null", "preprocess.mean: got null, expected one number"),
        ("preprocess.mean=true", "preprocess.mean: got true, expected one number"),
        ("preprocess.mean=[]", "preprocess.mean: got [], expected one number"),
    ],
)
def test_wrong_settings_are_refused(setting, message):
    with pytest.raises(ConfigError) as caught:
        make_config("data=shapes", setting)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mean": [1.0, 2.0]}, "preprocess.mean: got 2 numbers, expected one, or one for each"),
        ({"std": [1.0, 2.0]}, "preprocess.std: got 2 numbers"),
    ],
)
def test_settings_that_do_not_fit_the_samples(settings, message, cache_root):
    with pytest.raises(ConfigError) as caught:
        registry.read(DataConfig("shapes"), PreprocessConfig(**settings), cache_root)
    assert message in str(caught.value)
