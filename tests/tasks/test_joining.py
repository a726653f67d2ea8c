"""Samples that are joined for a group."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import special
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    f1_score,
    mean_absolute_error,
    roc_auc_score,
)

from resnet8ptq.config.schema import RegressionConfig, TaskConfig
from resnet8ptq.core.errors import ConfigError, DataError
from resnet8ptq.tasks import anomaly, binary, classification, multilabel, registry, regression
from resnet8ptq.tasks.joining import join
from resnet8ptq.tasks.scoring.outputs import LOGITS, Outputs, Targets
from tests.helpers.task_cases import (
    CLASSES,
    CLIPS,
    ITEMS,
    NAMES,
    WINDOWS,
    context,
    drawn,
    noisy_windows,
    windows,
)


@pytest.mark.parametrize("groups", [None, CLIPS])
def test_anomaly_scores_are_means_over_clips(groups):
    outputs = noisy_windows(0.3)
    task = join(anomaly.build(max_fpr=0.2), "mean")
    scores = task.score(outputs, Targets(CLIPS % 2, groups, windows))
    errors, labels = ((outputs.values[0] - WINDOWS) ** 2).mean(axis=1), CLIPS % 2
    if groups is not None:
        errors, labels = errors.reshape(-1, 2).mean(axis=1), np.arange(ITEMS // 2) % 2
    np.testing.assert_allclose(scores.scores, errors, rtol=1e-5)
    assert scores.value == pytest.approx(roc_auc_score(labels, errors))
    assert scores.more()["pauc"] == pytest.approx(roc_auc_score(labels, errors, max_fpr=0.2))


def test_the_windows_of_a_clip_have_one_label():
    task = join(anomaly.build(), "mean")
    with pytest.raises(DataError, match="a group has samples of several labels"):
        task.score(noisy_windows(0.3), Targets(np.arange(ITEMS) % 2, CLIPS, windows))


@pytest.fixture(scope="module")
def clips() -> tuple[np.ndarray, Outputs]:
    """Group numbers of 1 to 4 windows in any order, and their logits of 7 classes."""
    numbers = drawn(2).permutation(np.repeat(np.arange(48), np.arange(48) % 4 + 1))
    return numbers, Outputs((drawn(3).normal(size=(ITEMS, 7)).astype(np.float32),), None, LOGITS)


def by_group(values: np.ndarray, numbers: np.ndarray, reduce: Any) -> np.ndarray:
    return np.stack([reduce(values[numbers == number], axis=0) for number in range(48)])


@pytest.mark.parametrize(("how", "reduce"), [("mean", np.mean), ("max", np.max), ("vote", np.mean)])
def test_joined_classes_are_those_of_numpy(clips, how, reduce):
    numbers, outputs = clips
    labels = drawn(4).integers(0, 7, 48)
    scores = join(classification.build(NAMES), how).score(
        outputs, Targets(labels[numbers], numbers)
    )
    values = special.softmax(outputs.values[0].astype(float), axis=1)
    if how == "vote":
        values = np.eye(7)[values.argmax(axis=1)]
    expected = by_group(values, numbers, reduce)
    np.testing.assert_allclose(scores.probabilities, expected, atol=1e-6)
    assert scores.total == 48
    assert scores.value == accuracy_score(labels, expected.argmax(axis=1))
    np.testing.assert_array_equal(scores.logits, outputs.values[0])  # of the windows, for the SQNR


@pytest.mark.parametrize(("how", "reduce"), [("mean", np.mean), ("max", np.max), ("vote", np.mean)])
def test_joined_labels_and_two_classes_are_those_of_scikit_learn(clips, how, reduce):
    numbers, outputs = clips
    labels = drawn(4).random((48, 7)) < 0.4
    task = join(multilabel.build(NAMES, threshold=0.4), how)
    scores = task.score(outputs, Targets(labels[numbers], numbers))
    values = special.expit(outputs.values[0].astype(float))
    expected = by_group(values > 0.4 if how == "vote" else values, numbers, reduce)
    precision = average_precision_score(labels, expected, average="macro")
    assert scores.value == pytest.approx(precision, abs=1e-6)
    f1 = f1_score(labels, expected > 0.4, average="macro", zero_division=0)
    assert scores.more()["macro_f1"] == pytest.approx(f1, abs=1e-6)
    task = join(binary.build(("no", "yes"), threshold=0.4), how)
    one = Outputs((outputs.values[0][:, :1],), None, LOGITS)
    scores = task.score(one, Targets(labels[numbers, 0].astype(int), numbers))
    assert scores.value == pytest.approx(roc_auc_score(labels[:, 0], expected[:, 0]), abs=1e-6)
    right = accuracy_score(labels[:, 0], expected[:, 0] > 0.4)
    assert scores.more()["accuracy"] == pytest.approx(right)


@pytest.mark.parametrize(("how", "reduce"), [("mean", np.mean), ("max", np.max)])
def test_joined_values_are_those_of_scikit_learn(clips, how, reduce):
    numbers, outputs = clips
    targets = drawn(4).normal(size=(48, 7))
    scores = join(regression.build(), how).score(outputs, Targets(targets[numbers], numbers))
    expected = by_group(outputs.values[0].astype(float), numbers, reduce)
    assert scores.value == pytest.approx(mean_absolute_error(targets, expected), abs=1e-6)


@pytest.mark.parametrize(
    ("config", "grouped", "message"),
    [
        (TaskConfig("classification", join="mean"), False, "got mean, expected null: pets has no"),
        (RegressionConfig(join="vote"), True, "got vote, expected null, mean or max with"),
        (TaskConfig("top5", join="max"), True, "got max, expected null with task=top5"),
    ],
)
def test_samples_that_cannot_be_joined_are_refused(config, grouped, message):
    labels = np.eye(7)[CLASSES] if config.name == "regression" else CLASSES
    data = replace(context(labels, {"out": (7,)}, names=NAMES), grouped=grouped)
    with pytest.raises(ConfigError, match=f"task.join: {message}"):
        registry.make(config, data)


def test_the_chosen_task_joins_samples_too():
    data = replace(context(CLASSES, {"out": (7,)}, names=NAMES), grouped=True)
    assert registry.make(TaskConfig(join="vote"), data).scope.joins_groups
    assert not registry.make(TaskConfig(), data).scope.joins_groups
