"""`task=multilabel` against scikit-learn."""

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, f1_score

from resnet8ptq.core.errors import ConfigError, ModelError
from resnet8ptq.tasks import multilabel
from resnet8ptq.tasks.scoring.outputs import LOGITS, PROBABILITIES, Outputs, Targets, TaskContext
from resnet8ptq.tasks.task import Task


def scored(values: np.ndarray, labels: np.ndarray) -> multilabel.MultilabelScores:
    return multilabel.build(resamples=100).score(Outputs((values,)), Targets(labels))


@pytest.mark.parametrize("digits", [6, 1])  # with one digit, many scores are equal
def test_the_values_of_scikit_learn(digits):
    random = np.random.default_rng(0)
    labels = random.random((300, 5)) < 0.3
    values = np.round(np.clip(0.4 * labels + 0.6 * random.random(labels.shape), 0, 1), digits)
    scores = scored(values, labels)
    expected = average_precision_score(labels, values, average=None)
    assert scores.of_class == pytest.approx(expected, abs=1e-9)
    assert scores.value == pytest.approx(expected.mean(), abs=1e-9)
    macro = f1_score(labels, values > 0.5, average="macro", zero_division=0)
    assert scores.more()["macro_f1"] == pytest.approx(macro, abs=1e-9)
    logits = 20 * (values - 0.5)  # as the sigmoid's input, they are cut at 0
    assert scored(logits, labels).more()["macro_f1"] == pytest.approx(macro, abs=1e-9)


def test_probabilities_beyond_1_by_a_quantization_step_are_no_logits():
    random = np.random.default_rng(2)
    labels = random.random((300, 5)) < 0.3
    values = 0.4 * labels + 0.6 * random.random(labels.shape)
    values[0, 0] = 1.002
    values[1, 0] = -0.002
    macro = f1_score(labels, values > 0.5, average="macro", zero_division=0)
    assert scored(values, labels).more()["macro_f1"] == pytest.approx(macro, abs=1e-9)


def test_weights_stand_for_repeated_samples():
    random = np.random.default_rng(1)
    labels = random.random((50, 3)) < 0.3
    values = np.round(random.random((50, 3)), 1)
    chosen = random.integers(0, 50, 50)
    weighted = multilabel.rank(values, labels)(np.bincount(chosen, minlength=50))
    expected = average_precision_score(labels[chosen], values[chosen], average=None)
    assert weighted == pytest.approx(expected, abs=1e-9)


def test_a_score_of_nan_counts_as_wrong():
    """As of a network in float16 that overflows; the order of the samples must not count."""
    labels = np.repeat(np.eye(2, dtype=np.bool_), 50, axis=0)
    assert scored(np.full((100, 2), np.nan), labels).value == 0.5
    values = np.where(labels, 2.0, -2.0)
    values[:2] = np.nan
    # Positives of class 0 come last, and negatives of class 1 first
    assert scored(values, labels).of_class == pytest.approx([(48 + 2 * 50 / 100) / 50, 50 / 52])


def test_logits_with_a_nan_are_still_logits():
    labels = np.repeat(np.eye(2, dtype=np.bool_), 50, axis=0)
    values = np.where(labels, 0.4, -0.4)  # above and below a probability of 0.5
    values[0, 1] = np.nan
    assert scored(values, labels).more()["macro_f1"] == 1


def test_a_class_without_samples_is_left_out():
    labels = np.array([[True, False], [False, False], [True, False]])
    values = np.array([[0.9, 0.1], [0.2, 0.3], [0.8, 0.5]])
    scores = scored(values, labels)
    assert scores.value == 1
    assert np.isnan(scores.of_class[1])


def make(labels: np.ndarray | None, classes: int, final: str = PROBABILITIES) -> Task:
    names = ("a", "b")
    data = TaskContext("sounds", labels, names, True, (4,), {"out": (classes,)}, final)
    return multilabel.MULTILABEL.make(multilabel.MultilabelConfig(), data)


def test_what_does_not_fit_is_refused():
    some = np.array([[True, False], [False, True]])
    assert make(some, 2, LOGITS).class_names == ("a", "b")
    with pytest.raises(ConfigError, match="the labels of sounds are none, expected a matrix"):
        make(None, 2)
    with pytest.raises(ModelError, match="has labels of 2 classes"):
        make(some, 3)
    with pytest.raises(ConfigError, match="no class of sounds has samples with and without"):
        make(np.ones((3, 2), np.bool_), 2)
