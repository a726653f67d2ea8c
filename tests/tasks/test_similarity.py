"""`task=similarity`: correlations against SciPy, pairs, and the form of a network's outputs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from resnet8ptq.config.schema import TaskConfig
from resnet8ptq.core.errors import ConfigError, DataError, ModelError
from resnet8ptq.tasks import registry, similarity
from resnet8ptq.tasks.scoring.outputs import VALUES, Outputs, Targets, TaskContext

SCORES = np.array([0.0, 2.5, 5.0, 1.0])
small = st.integers(0, 4).map(float)  # with ties


def context(labels, **outputs) -> TaskContext:
    return TaskContext("pairs", labels, (), True, (), outputs, VALUES)


def make(data: TaskContext):
    return registry.make(similarity.SimilarityConfig(), data)


@given(st.lists(st.tuples(small, small), min_size=3, max_size=12), st.randoms())
def test_correlations_are_scipys_on_samples_with_ties(rows, random):
    one, other = np.array(rows).T
    chosen = np.array([random.randrange(len(one)) for _ in one])
    statistic = similarity._correlate_ranks(one, other)
    for items in (np.arange(len(one)), chosen):
        left, right = one[items], other[items]
        if np.ptp(left) == 0 or np.ptp(right) == 0:
            assert statistic(items) == similarity.correlate(left, right) == 0
            continue
        assert statistic(items) == pytest.approx(stats.spearmanr(left, right)[0], abs=1e-9)
        expected = stats.pearsonr(left, right)[0]
        assert similarity.correlate(left, right) == pytest.approx(expected, abs=1e-9)


def test_embeddings_are_compared_within_their_group_in_any_order():
    angles = np.deg2rad([0, 90, 0, 45, 0, 0, 0, 60])  # between the texts of a pair
    values = np.stack([np.cos(angles), np.sin(angles)], axis=1) * np.arange(1, 9)[:, None]
    order = np.array([5, 0, 3, 6, 7, 1, 2, 4])
    groups, labels = np.repeat(np.arange(4), 2), np.repeat(SCORES, 2)
    task = similarity.build(100, embeds=True)
    scores = task.score(Outputs((values[order],)), Targets(labels[order], groups[order]))
    assert scores.total == 4
    np.testing.assert_allclose(scores.per_item, np.cos(np.deg2rad([90, 45, 0, 60])), atol=1e-12)
    assert scores.value == pytest.approx(1 if np.argsort(SCORES)[1] == 3 else 0.8)
    alone = task.score(Outputs((values[:-1],)), Targets(labels[:-1], groups[:-1]))
    assert alone.total == 3  # the last text has no partner


@pytest.mark.parametrize(
    ("groups", "labels", "kind", "message"),
    [
        (None, [1, 1, 2, 2], ConfigError, "expected equal numbers for the two texts of a pair"),
        ([0, 0, 0, 1], [1, 1, 1, 1], DataError, "got groups of 3 samples, expected pairs"),
        ([0, 1, 2, 3], [1, 1, 2, 2], DataError, "got groups of 1 samples, expected pairs"),
        ([0, 0, 1, 1], [1, 2, 2, 2], DataError, "a pair has two scores; expected one"),
    ],
)
def test_samples_that_are_no_pairs_are_refused(groups, labels, kind, message):
    task = similarity.build(100, embeds=True)
    targets = Targets(np.array(labels), None if groups is None else np.array(groups))
    with pytest.raises(kind, match=message):
        task.score(Outputs((np.ones((4, 3)),)), targets)


def test_the_outputs_decide_the_form():
    for shape in ((), (1,)):
        assert not make(context(SCORES, score=shape)).scope.joins_groups
    task = make(context(SCORES, tokens=(None, 8), embedding=(8,)))
    assert task.scope.joins_groups
    values = np.random.default_rng(0).normal(size=(4, 8))
    outputs = Outputs((np.zeros((4, 5, 8)), values))
    scores = task.score(outputs, Targets(np.array([1, 1, 3, 3]), np.array([0, 0, 1, 1])))
    one, other = values[0], values[1]
    cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    assert scores.per_item[0] == pytest.approx(cosine)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ModelError, match="takes one output with a score"):
        make(context(SCORES, tokens=(None, 8)))
    with pytest.raises(ConfigError, match="labels of pairs are none, expected a score"):
        make(context(None, score=(1,)))
    with pytest.raises(ConfigError, match=r"are \[4, 1\], expected a score"):
        make(context(SCORES[:, None], score=(1,)))
    assert registry.make(TaskConfig(), context(SCORES, score=(1,))).name == "regression"
