"""Metrics against numbers worked out by hand, or by counting every case."""

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from mlflow.utils.validation import _validate_metric_name
from scipy.stats import binomtest
from sklearn.metrics import cohen_kappa_score, confusion_matrix
from statsmodels.stats.multitest import multipletests

from resnet8ptq.evaluation.result import RunResult
from resnet8ptq.tasks import classification
from resnet8ptq.tasks.classification import ClassScores, metric_names
from resnet8ptq.tasks.scoring.comparison import Comparison
from resnet8ptq.tasks.scoring.hits import Hits
from resnet8ptq.tasks.scoring.statistics import (
    above_chance,
    binomial_tail,
    holm,
    kappa,
    mcnemar,
    wilson,
)
from tests.helpers.results import make_result


def scores_of(rows: list[list[float]], labels: list[int]) -> ClassScores:
    return ClassScores(np.array(rows, dtype=np.float32), np.array(labels, dtype=np.int64))


def scores_for(predictions: list[int], labels: list[int], classes: int = 3) -> ClassScores:
    """Scores of a model that is certain of `predictions`."""
    return scores_of(np.eye(classes)[predictions].tolist(), labels)


def binary(hits: str) -> ClassScores:
    """Scores of a model that is right where `hits` has a 1; every label is class 0."""
    return scores_for([1 - int(hit) for hit in hits], [0] * len(hits))


compare = classification.build().compare
few_scores = (
    st.integers(1, 6)
    .flatmap(
        lambda count: st.tuples(
            arrays.arrays(np.float32, (count, 3), elements=st.sampled_from([0.0, 0.25, 0.5])),
            arrays.arrays(np.int64, count, elements=st.integers(0, 2)),
        )
    )
    .map(lambda pair: ClassScores(*pair))
)
twins = few_scores.flatmap(
    lambda ours: arrays.arrays(
        np.float32, ours.probabilities.shape, elements=st.sampled_from([0.0, 0.25, 0.5])
    ).map(lambda theirs: compare(ours, ClassScores(theirs, ours.labels)))
)


# One model


def test_accuracy_by_hand():
    scores = scores_for([0, 1, 2, 2], [0, 1, 2, 0])
    assert (scores.correct, scores.total, scores.value) == (3, 4, 0.75)
    assert scores.per_sample.predictions.tolist() == [0, 1, 2, 2]
    assert scores.per_sample.right.tolist() == [True, True, True, False]


def test_the_first_of_tied_classes_is_predicted():
    assert scores_of([[0.0, 0.5, 0.5]], [2]).per_sample.predictions.tolist() == [1]


@given(few_scores)
def test_expected_correct_is_the_mean_over_every_way_to_break_ties(scores):
    tops = [np.flatnonzero(row == row.max()).tolist() for row in scores.probabilities]
    ways = list(product(*tops))
    right = sum(
        guess == label for way in ways for guess, label in zip(way, scores.labels, strict=True)
    )
    assert scores.expected_correct == pytest.approx(float(Fraction(right, len(ways))))
    assert scores.tied == sum(len(top) > 1 for top in tops)


def test_class_accuracy_by_hand():
    scores = scores_for([0, 1, 1, 1], [0, 0, 1, 1])
    assert [scores.class_accuracy(label) for label in range(3)] == [0.5, 1.0, None]


def test_confusion_by_hand():
    scores = scores_for([0, 1, 1, 2], [0, 0, 1, 1])
    assert scores.confusion().tolist() == [[1, 1, 0], [0, 1, 1], [0, 0, 0]]


# Two models


def changed(comparison: Comparison) -> tuple[int, int]:
    """Return the images that turned wrong, and those that turned right."""
    metrics = classification.changes(comparison)
    return metrics["paired/right_to_wrong"], metrics["paired/wrong_to_right"]


def test_flips_by_hand():
    comparison = compare(binary("110010"), binary("101110"))
    assert changed(comparison) == (2, 1)
    assert comparison.delta == pytest.approx(-1 / 6)


@pytest.mark.parametrize(
    ("worse", "better", "p"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (2, 0, 0.5),  # 2 / 2**2
        (5, 0, 0.0625),  # 2 / 2**5
        (0, 5, 0.0625),
        (4, 1, 0.375),  # 2 * (1 + 5) / 2**5
        (3, 3, 1.0),
        (10, 2, 0.03857421875),  # 2 * (1 + 12 + 66) / 2**12
    ],
)
def test_mcnemar_by_hand(worse, better, p):
    agreed = "11100"
    model = binary("0" * worse + "1" * better + agreed)
    baseline = binary("1" * worse + "0" * better + agreed)
    assert compare(model, baseline).p_value == pytest.approx(p)


@given(twins)
def test_a_comparison_turned_round(comparison):
    turned = compare(comparison.baseline, comparison.model)
    assert turned.p_value == pytest.approx(comparison.p_value)
    assert turned.delta == pytest.approx(-comparison.delta)
    assert turned.loss(fair=True) == pytest.approx(-comparison.loss(fair=True))
    lost, won = changed(comparison)
    assert changed(turned) == (won, lost)
    ours, theirs = comparison.model, comparison.baseline
    assert ours.agreement(theirs) == theirs.agreement(ours)
    assert 0 < comparison.p_value <= 1 + 1e-12
    assert comparison.delta * ours.total == pytest.approx(won - lost)


def test_a_model_compared_with_itself():
    scores = scores_for([0, 1, 2, 2], [0, 1, 2, 0])
    same = compare(scores, scores)
    assert (same.delta, same.loss(fair=True), same.p_value) == (0, 0, 1)
    assert scores.agreement(scores) == 1
    assert changed(same) == (0, 0)


def test_agreement_counts_predictions_and_not_hits():
    labels = [0, 0, 0, 0]
    ours, theirs = scores_for([0, 1, 2, 2], labels), scores_for([0, 1, 1, 0], labels)
    assert ours.agreement(theirs) == 0.5


def test_the_fair_loss_takes_luck_out_on_both_sides():
    labels = [0, 0]
    lucky = scores_of([[0.5, 0.5], [0.5, 0.5]], labels)
    sure = scores_of([[0.9, 0.1], [0.1, 0.9]], labels)
    comparison = compare(lucky, sure)
    assert comparison.delta == 0.5
    assert comparison.loss(fair=True) == 0.0


def test_class_change_by_hand():
    labels = [0, 0, 1]
    ours, theirs = scores_for([0, 1, 1], labels), scores_for([0, 0, 2], labels)
    assert [ours.class_change(theirs, label) for label in range(3)] == [-0.5, 1.0, None]


# Against the libraries that take too long to import in a run

flips = st.tuples(st.integers(0, 600), st.integers(0, 600))
counts = st.integers(1, 20_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))
p_values = st.lists(st.floats(0, 1) | st.sampled_from([0.0, 0.01, 0.02, 0.5]), max_size=40)


@given(flips)
@example((7, 8))  # the tails meet: without care, 1 - 1e-16
def test_mcnemar_is_scipys_binomial_test(flips):
    ours, theirs = flips
    expected = binomtest(ours, ours + theirs).pvalue if ours + theirs else 1.0
    assert mcnemar(ours, theirs) == pytest.approx(expected, rel=1e-12)
    assert abs(ours - theirs) > 1 or mcnemar(ours, theirs) == 1


@given(counts)
@example((0, 10))  # without care, -3e-17
@example((16, 16))  # 1 + 2e-16
def test_wilson_is_scipys_interval(counts):
    expected = binomtest(*counts).proportion_ci(0.95, method="wilson")
    low, high = wilson(*counts)
    assert 0 <= low <= high <= 1
    assert (low, high) == pytest.approx((expected.low, expected.high), rel=1e-12, abs=1e-15)


@given(counts, st.integers(2, 1000))
@example((0, 10), 2)
@example((10, 10), 2)
def test_the_binomial_tail_is_scipys(counts, classes):
    expected = binomtest(*counts, 1 / classes, alternative="greater").pvalue
    assert binomial_tail(*counts, 1 / classes) == pytest.approx(expected, rel=1e-9, abs=1e-300)


@pytest.mark.parametrize("skill", [0.0, 0.1, 0.3])
def test_above_chance_is_the_permutation_test(skill):
    """Of unequal classes, which a constant answer hits more often than 1 / classes."""
    random = np.random.default_rng(int(100 * skill))
    labels = random.choice(3, 200, p=[0.7, 0.2, 0.1])
    predictions = np.where(random.random(200) < skill, labels, random.permutation(labels))
    orders = np.array([random.permutation(predictions) for _ in range(4000)])
    at_least = (orders == labels).sum(axis=1) >= (predictions == labels).sum()
    assert above_chance(labels, predictions, 3) == pytest.approx(at_least.mean(), abs=0.03)


def test_a_constant_answer_is_chance_however_often_it_hits():
    labels = np.repeat([0, 1], [95, 5])
    assert above_chance(labels, np.zeros(100, int), 2) == 1
    assert above_chance(labels, labels, 2) < 1e-9
    alone = np.zeros(20, int)  # of one class no order differs
    assert above_chance(alone, alone, 4) == pytest.approx(0.25**20)


def test_kappa_is_sklearns():
    random = np.random.default_rng(0)
    labels = random.choice(4, 300, p=[0.4, 0.3, 0.2, 0.1])
    predictions = np.where(random.random(300) < 0.3, labels, random.permutation(labels))
    expected = cohen_kappa_score(labels, predictions)
    assert kappa(labels, predictions, 4) == pytest.approx(expected)
    alone = np.zeros(20, int)
    assert kappa(alone, alone, 4) == 1
    assert kappa(alone, np.r_[alone[1:], (alone[:1] + 1) % 4], 4) > 0.5  # not of two raters


@given(p_values)
def test_holm_is_statsmodels_correction(p_values):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gc.collect", int)  # statsmodels collects garbage in each call: 0.2 s here
        expected = multipletests(p_values, method="holm")[1].tolist() if p_values else []
    assert holm(p_values) == expected


@given(arrays.arrays(np.int64, (2, 30), elements=st.integers(0, 4)))
def test_confusion_is_scikit_learns_matrix(classes):
    labels, predictions = classes
    expected = confusion_matrix(labels, predictions, labels=range(5))
    np.testing.assert_array_equal(Hits(predictions, labels).confusion(5), expected)


# Results


def measured(peak_memory_bytes: int | None = 1_000_000, names=("cat", "dog", "emu")) -> RunResult:
    labels = [0, 0, 1]  # and none of class 2
    comparison = compare(scores_for([0, 1, 1], labels), scores_for([0, 0, 1], labels))
    task = classification.build(names)
    return make_result(task, comparison, peak_memory_bytes=peak_memory_bytes)


def test_metrics_by_hand():
    metrics = measured().to_metrics()
    expected = {
        "accuracy": 2 / 3,
        "expected_accuracy": 2 / 3,
        "agreement": 2 / 3,
        "baseline/accuracy": 1,
        "baseline/size_bytes": 400_000,
        "drop": 1 / 3,
        "macro_f1": 2 / 3,
        "baseline/macro_f1": 1,
        "system/evaluate_s": 0.5,
        "system/evaluate_batch_size": 64.0,
        "system/evaluate_threads": 2.0,
        "paired/p_value": 1,
        "peak_memory_bytes": 1_000_000,
        "system/quantize_s": 2.5,
        "counts/quantized_layers": 11,
        "paired/right_to_wrong": 1,
        "size_bytes": 100_000,
        "counts/tied": 0,
        "counts/total": 3,
        "paired/wrong_to_right": 0,
        "class/cat/accuracy": 0.5,
        "class/cat/drop": 0.5,
        "class/dog/accuracy": 1,
        "class/dog/drop": 0,
    }
    low, high = metrics.pop("ci95/value_low"), metrics.pop("ci95/value_high")
    assert low < 2 / 3 < high
    assert metrics.pop("kl_divergence") > 0
    assert {key: metrics[key] for key in expected} == pytest.approx(expected)


def test_every_metric_is_a_finite_float():
    for key, value in measured().to_metrics().items():
        assert type(value) is float, key
        assert math.isfinite(value), key


def test_a_class_without_images_has_no_metric():
    assert not [key for key in measured().to_metrics() if "emu" in key]


def test_memory_that_cannot_be_measured_is_no_metric():
    with_memory, without = measured().to_metrics(), measured(None).to_metrics()
    assert set(with_memory) - set(without) == {"peak_memory_bytes"}


@pytest.mark.parametrize("name", ["low", "expected", "delta", "accuracy", "total"])
def test_a_class_name_does_not_take_the_place_of_a_metric(name):
    """Class names come from the data set's own files."""
    metrics = measured().to_metrics()
    plain = {key: value for key, value in metrics.items() if "/cat/" not in key}
    named = measured(names=(name, "dog", "emu")).to_metrics()
    assert named == {**plain, f"class/{name}/accuracy": 0.5, f"class/{name}/drop": 0.5}


@given(st.lists(st.text(max_size=300), max_size=12))
@example(["c++", "c--", "c##", "a/b", "a_b", "", ".", "..", "x" * 200, "x" * 201])
def test_any_class_names_make_metrics_that_mlflow_takes(names):
    clean = metric_names(names)
    assert len(set(clean)) == len(names)
    for name in clean:
        _validate_metric_name(f"class/{name}/accuracy")
        assert "/" not in name


@given(st.lists(st.from_regex(r"[\w.\- :]{1,100}", fullmatch=True), unique=True, max_size=12))
def test_class_names_that_mlflow_takes_stay_as_they_are(names):
    assume(not {".", ".."} & set(names))
    assert metric_names(names) == tuple(names)


def test_names_that_come_out_alike_are_numbered():
    assert metric_names(["c++", "c--", "c##", "a/b"]) == ("c__", "c--", "c___2", "a_b")
    assert metric_names(["x" * 101, "x" * 100]) == ("x" * 100, "x" * 100 + "_2")


def test_metrics_of_a_class_have_its_metric_name():
    metrics = measured(names=("c++", "c##", "emu")).to_metrics()
    assert {
        "class/c__/accuracy",
        "class/c___2/accuracy",
        "class/c__/drop",
        "class/c___2/drop",
    } <= set(metrics)


def test_an_unsupported_run_has_no_metrics():
    result = RunResult("unsupported", "no such kernel")
    assert result.to_metrics() == {}
    assert result.summary() == "unsupported: no such kernel"


def test_the_summary_is_one_line_with_the_figures():
    summary = measured().summary()
    assert summary == "2 of 3 correct (66.67%, -33.33 points), 100.0 kB"
