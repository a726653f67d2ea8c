"""The check of a doubtful FP32 network: usual preprocessings, and the order of the classes."""

from pathlib import Path

import numpy as np
import pytest

from resnet8ptq.data.dataset import Split
from resnet8ptq.experiment.preprocessing_check import find_class_order, usual
from resnet8ptq.tasks.classification import ClassScores
from tests.helpers.calling import REPO
from tests.helpers.configs import make_config

PRESETS = sorted(path.stem for path in Path(REPO, "conf", "preprocess").glob("*.yaml"))


@pytest.mark.parametrize("name", PRESETS)
def test_the_arithmetic_of_every_preset_is_tried(name):
    taken = make_config("data=shapes", f"preprocess={name}").preprocess
    pictures = Split(np.zeros((2, 8, 8, 3), np.uint8), None, "own")
    tried = []
    for _, steps in usual(pictures, sized=True):
        tried.append((steps.bgr, np.ravel(steps.mean).tolist(), np.ravel(steps.std).tolist()))
        tried[-1] += (pytest.approx(steps.scale),)
    wanted = (taken.channels == "bgr", taken.mean, taken.std, taken.scale)
    assert wanted in tried


def _score(predictions, labels, classes):
    probabilities = np.eye(classes, dtype=np.float32)[predictions]
    return ClassScores(probabilities, np.asarray(labels, np.int64))


def test_classes_in_the_order_of_the_alphabet_are_named_in_that_of_the_network():
    random = np.random.default_rng(0)
    labels = random.integers(0, 4, 200)
    outputs = np.array([3, 0, 2, 1])[labels]  # the output of each class
    outputs[:20] = random.integers(0, 4, 20)
    names = ("saw", "sine", "square", "triangle")
    text = find_class_order(_score(outputs, labels, 4), names)
    assert "data.classes='[sine,triangle,square,saw]'" in text


@pytest.mark.parametrize("predicted", ["constant", "random", "right"])
def test_no_order_is_named_for_a_network_that_guesses_or_is_right(predicted):
    random = np.random.default_rng(0)
    labels = random.integers(0, 4, 200)
    outputs = {
        "constant": np.zeros(200, np.int64),
        "random": random.integers(0, 4, 200),
        "right": labels,
    }[predicted]
    assert find_class_order(_score(outputs, labels, 4), ("a", "b", "c", "d")) == ""


def test_no_order_is_named_for_more_classes_than_samples():
    random = np.random.default_rng(0)
    scores = _score(random.integers(0, 900, 200), random.integers(0, 900, 200), 900)
    assert find_class_order(scores, tuple(map(str, range(900)))) == ""
