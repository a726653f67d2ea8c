"""Metrics against those of scikit-learn."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from sklearn.metrics import f1_score, mean_absolute_error, roc_auc_score, top_k_accuracy_score
from sklearn.metrics import root_mean_squared_error as sklearn_rmse

from resnet8ptq.tasks import binary, classification, regression
from resnet8ptq.tasks.scoring import statistics
from resnet8ptq.tasks.scoring.outputs import LOGITS, Outputs, Targets
from tests.helpers.task_cases import CLASSES, TARGETS, TWO, noisy_classes, noisy_two, noisy_values


def test_classification_agrees_with_scikit_learn():
    scores = classification.score(noisy_classes(2.0), Targets(CLASSES))
    more, predictions = scores.more(), scores.per_sample.predictions
    assert more["macro_f1"] == pytest.approx(f1_score(CLASSES, predictions, average="macro"))
    expected = top_k_accuracy_score(CLASSES, scores.probabilities, k=5)
    assert more["top5_accuracy"] == pytest.approx(expected)


def test_regression_agrees_with_scikit_learn():
    scores = regression.build().score(noisy_values(0.5), Targets(TARGETS))
    [values] = noisy_values(0.5).values
    assert scores.value == pytest.approx(mean_absolute_error(TARGETS, values), rel=1e-5)
    of_all = sklearn_rmse(TARGETS.ravel(), values.ravel())
    assert scores.more()["rmse"] == pytest.approx(of_all, rel=1e-5)


@given(
    arrays.arrays(np.float64, 30, elements=st.sampled_from([0.0, 0.25, 0.5, 0.75])),
    arrays.arrays(np.bool_, 30).filter(lambda labels: 0 < labels.sum() < 30),
)
@settings(max_examples=50)
def test_auc_is_scikit_learns_with_ties(scores, positive):
    area = statistics.auc(scores, positive)
    assert area.value == pytest.approx(roc_auc_score(positive, scores))
    turned = statistics.auc(-scores, positive)
    assert turned.value == pytest.approx(1 - area.value)
    low, high = area.interval
    assert 0 <= low <= area.value <= high <= 1


def test_one_output_is_two_classes():
    """A sigmoid, its logit, and a softmax of both say the same."""
    [one] = noisy_two(0.5).values
    logit = np.log(one / (1 - one))
    same = (
        Outputs((one,)),
        Outputs((logit,), None, LOGITS),
        Outputs((np.concatenate([1 - one, one], axis=1),)),
        Outputs((np.concatenate([0 * logit, logit], axis=1),), None, LOGITS),
    )
    task = binary.build(("no", "yes"), threshold=0.3)
    for outputs in same:
        scores = task.score(outputs, Targets(TWO))
        assert scores.more()["accuracy"] == ((one[:, 0] > 0.3) == TWO).mean()
        assert scores.value == pytest.approx(roc_auc_score(TWO, one[:, 0]))
