"""`task=top5`, which is also the example of a new task in docs/tasks.md."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import top_k_accuracy_score

from resnet8ptq.config.schema import TaskConfig
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.tasks import registry, top5
from resnet8ptq.tasks.scoring.outputs import LOGITS, Outputs, Targets, TaskContext


@given(classes=st.integers(6, 12), seed=st.integers(0, 2**32 - 1))
def test_the_value_is_that_of_scikit_learn(classes, seed):
    random = np.random.default_rng(seed)
    labels, values = random.integers(0, classes, 40), random.normal(size=(40, classes))
    scores = top5.build().score(Outputs((values,), None, LOGITS), Targets(labels))
    expected = top_k_accuracy_score(labels, values, k=5, labels=range(classes))
    assert scores.value == pytest.approx(expected)


@given(seed=st.integers(0, 2**32 - 1))
def test_a_hit_is_a_label_among_the_top_five(seed):
    """Ties included: a sample that is not hit has another class as its prediction."""
    random = np.random.default_rng(seed)
    labels, values = random.integers(0, 8, 40), random.integers(0, 4, (40, 8)).astype(np.float32)
    hits = top5.build().score(Outputs((values,)), Targets(labels)).per_sample
    better = (values > values[np.arange(40), labels][:, np.newaxis]).sum(axis=1)
    assert not hits.right[better >= 5].any()
    assert hits.right[(values >= values[np.arange(40), labels][:, np.newaxis]).sum(1) <= 5].all()


def test_five_classes_are_too_few():
    names, labels = tuple("abcde"), np.arange(5)
    context = TaskContext("flowers", labels, names, True, (4,), {"logits": (5,)}, LOGITS)
    with pytest.raises(ConfigError, match="task=top5: flowers has 5 classes"):
        registry.make(TaskConfig("top5"), context)


@given(shape=st.sampled_from([(10, 1, 1), (1, 1, 10)]), seed=st.integers(0, 2**32 - 1))
def test_axes_of_size_one_change_nothing(shape, seed):
    random = np.random.default_rng(seed)
    labels, values = random.integers(0, 10, 40), random.normal(size=(40, 10))
    task = top5.build()
    flat = task.score(Outputs((values,)), Targets(labels))
    shaped = task.score(Outputs((values.reshape(40, *shape),)), Targets(labels))
    assert shaped.value == flat.value
    assert task.doubt(shaped, 1.0) == task.doubt(flat, 1.0)
