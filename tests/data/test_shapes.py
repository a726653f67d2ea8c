"""The embedded data set `shapes` and the weights shipped with it."""

import hashlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from resnet8ptq.data.shapes import drawing
from tests.helpers.configs import make_config
from tests.helpers.factories import THREADS, quantizer_of

Split = tuple[NDArray[np.uint8], NDArray[np.int64]]

WEIGHTS = Path(drawing.__file__).with_name("resnet8.h5")
DIGEST = "42ebaa7c55b6ec72a0addb6a0fec3e8ec9730e64ac87c6280409d8e7e1141829"


@pytest.fixture(scope="module")
def train() -> Split:
    return drawing.draw("train")


@pytest.fixture(scope="module")
def test() -> Split:
    return drawing.draw("test")


@pytest.mark.slow
def test_same_pictures_everywhere(train, test):
    digest = hashlib.sha256()
    for array in (*train, *test):
        digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    assert digest.hexdigest() == DIGEST


def test_drawing_leaves_no_trace_in_global_random_state():
    before = np.random.get_state(legacy=False)["state"]
    drawing.draw_seeded(seed=7, per_class=2)
    after = np.random.get_state(legacy=False)["state"]
    assert before["pos"] == after["pos"]
    assert np.array_equal(before["key"], after["key"])


@pytest.mark.parametrize(("name", "per_class"), [("train", 1000), ("test", 500)])
def test_layout_and_balance(name, per_class, request):
    images, labels = request.getfixturevalue(name)
    assert images.shape == (10 * per_class, 32, 32, 3)
    assert images.dtype == np.uint8
    assert images.flags.c_contiguous
    assert labels.shape == (10 * per_class,)
    assert labels.dtype == np.int64
    assert np.bincount(labels).tolist() == [per_class] * 10
    assert np.unique(labels[:100]).size == 10  # shuffled, not class after class


def test_class_names():
    assert len(set(drawing.CLASS_NAMES)) == 10
    assert all(name.isidentifier() and name.islower() for name in drawing.CLASS_NAMES)


def test_no_picture_in_both_splits(train, test):
    train_images = {image.tobytes() for image in train[0]}
    test_images = {image.tobytes() for image in test[0]}
    assert len(train_images) == 10_000
    assert len(test_images) == 5_000
    assert not train_images & test_images


def test_weights_are_small():
    assert WEIGHTS.stat().st_size < 400_000


def test_parameters_of_the_weights():
    sizes = []
    with h5py.File(WEIGHTS) as file:
        file["model_weights"].visititems(lambda _, item: sizes.append(getattr(item, "size", 0)))
    assert sum(sizes) == 78_666


@pytest.mark.slow
def test_accuracy_of_the_weights(test, shapes_model):
    """As they were converted, which is checked against Keras."""
    images, labels = test
    predictor = quantizer_of(make_config("data=shapes")).load(shapes_model.onnx_path, THREADS)
    scores = predictor.predict(images.astype(np.float32))[0]
    assert 0.85 < np.mean(np.argmax(scores, axis=1) == labels) < 0.93
