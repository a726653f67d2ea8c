"""The statistics against published values, references and simulations."""

import math

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import stats
from scipy.special import gammaln

from resnet8ptq.core import console
from resnet8ptq.tasks import anomaly, perplexity, regression
from resnet8ptq.tasks.scoring import roc_plot, statistics
from resnet8ptq.tasks.scoring.bootstrap import Replicates
from resnet8ptq.tasks.scoring.metric import UNDEFINED, Metric
from resnet8ptq.tasks.scoring.outputs import VALUES, Outputs, Targets
from resnet8ptq.tasks.scoring.ranking import AUC, Ranking
from resnet8ptq.tasks.scoring.statistics import SIGNIFICANCE
from resnet8ptq.tasks.scoring.values import Paired
from tests.helpers.task_cases import drawn


def hits(cells):
    """Return whether each of two models is right, from counts: both, the first, the other, none."""
    ours = np.repeat([True, True, False, False], cells)
    return ours, np.repeat([True, False, True, False], cells)


def margin(ours, theirs, limit):
    won, lost = statistics.flips(ours, theirs)
    return statistics.tango(lost, won, len(ours), limit)


def test_tango_as_published():
    """Without the correction: Newcombe (1998), table II, 36, 12, 2, 0; and the study of Bentur et
    al. (2009), 1, 1, 7, 12, as Fagerland, Lydersen and Laake work it out (2014)."""
    for cells, low, high in (((36, 12, 2, 0), 0.0611, 0.3447), ((1, 1, 7, 12), -0.517, -0.026)):
        ours, theirs = hits(cells)
        for limit, z in ((-low, -statistics.Z95), (-high, statistics.Z95)):
            assert margin(ours, theirs, limit).z == pytest.approx(z, abs=0.01)


@given(st.tuples(*[st.integers(0, 40)] * 4), st.floats(-0.9, 0.9))
@example((0, 0, 0, 1), 0.3)
@settings(max_examples=60)
def test_tango_takes_the_likeliest_probabilities_under_the_limit(cells, limit):
    """Against a search over the multinomial likelihood."""
    both, lost, won, none = cells
    assume(sum(cells) and (lost + won or abs(limit) > 1e-3))
    total = sum(cells)
    won_at = np.linspace(max(0, -limit), (1 - limit) / 2, 200_001)[1:-1]
    likely = won * np.log(won_at) + lost * np.log(won_at + limit)
    likely += (both + none) * np.log(1 - limit - 2 * won_at)
    chosen = won_at[likely.argmax()]
    error = np.sqrt(total * (2 * chosen + limit - limit**2))
    margin = statistics.tango(lost, won, total, limit)
    assert margin.z == pytest.approx((lost - won - total * limit) / error, rel=2e-3, abs=2e-3)
    assert margin.correction == pytest.approx(0.5 / error, rel=2e-3)


@given(st.tuples(*[st.integers(0, 60)] * 4))
@example((0, 0, 1, 0))
@example((0, 1, 0, 0))
@settings(max_examples=60)
def test_tango_s_interval_is_what_its_test_does_not_reject(cells):
    assume(sum(cells))
    ours, theirs = hits(cells)
    low, high = statistics.tango_interval(ours, theirs)
    delta = ours.mean() - theirs.mean()
    assert -1 <= low <= delta <= high <= 1
    mirrored = statistics.tango_interval(theirs, ours)
    assert mirrored == pytest.approx((-high, -low), abs=1e-9)
    for end, side in ((low, "p_within"), (high, "p_beyond")):
        if abs(end) < 1 - 1e-6:
            assert (
                getattr(margin(ours, theirs, -end), side) == pytest.approx(0.025, abs=1e-3)
                or delta == end
            )


def test_wrong_passes_and_fails_are_no_more_than_the_level():
    """By all outcomes of 400 samples with 1% of wins, where the loss is the limit itself."""
    total, limit, won_at = 400, 0.01, 0.01
    wrong_pass = wrong_fail = 0.0
    for lost in range(60):
        for won in range(60):
            kept = 1 - 2 * won_at - limit
            logs = gammaln(total + 1) - gammaln(lost + 1) - gammaln(won + 1)
            logs += -gammaln(total - lost - won + 1) + won * np.log(won_at)
            logs += lost * np.log(won_at + limit) + (total - lost - won) * np.log(kept)
            margin = statistics.tango(lost, won, total, limit)
            wrong_pass += np.exp(logs) * (margin.p_within <= 0.05)
            wrong_fail += np.exp(logs) * (margin.p_beyond <= 0.05)
    assert 0.02 < wrong_pass <= 0.05
    assert 0.02 < wrong_fail <= 0.05


def test_margins_of_means_are_student_s():
    """Against scipy's t-test of one sample."""
    losses = np.random.default_rng(3).normal(0.01, 0.05, 12)
    error = losses.std(ddof=1) / np.sqrt(12)
    margin = statistics.Margin.student(losses.mean() - 0.02, error, 12)
    expected = stats.ttest_1samp(losses, 0.02, alternative="less").pvalue
    assert margin.p_within == pytest.approx(expected)
    assert margin.p_beyond == pytest.approx(1 - expected)
    nothing = statistics.Margin.student(-0.01, 0.0, 12)  # no spread, so nothing to judge it by
    assert nothing.p_within == nothing.p_beyond == 1
    assert math.isnan(nothing.items_needed(12, 0.05))
    assert statistics.Margin.student(-0.01, 0.001, 1).p_within == 1
    constant = np.full(1000, 0.03) + 1e-18 * np.arange(1000)
    assert statistics.bootstrap_margin(constant - 0.01, 50).p_beyond == 1


def test_fewer_than_five_items_decide_nothing_and_a_far_margin_stays_finite():
    few = statistics.Margin.student(-1.0, 1e-6, 4)
    assert few.p_within == few.p_beyond == 1
    assert few.items_needed(4, 0.05) == 5
    five = statistics.Margin.student(-0.01, 0.005, 5)
    assert five.p_within == pytest.approx(stats.t.cdf(-2, 4))
    far = statistics.Margin.student(-1.0, 1e-3, 10_000)
    assert -40 < far.z < -37


def test_as_many_items_as_needed_tell_four_times_in_five():
    margin = statistics.tango(30, 10, 1000, 0.01)
    for level in (0.05, 0.01):
        items = margin.items_needed(1000, level)
        # A margin grows with the root of the items, and its correction shrinks with it.
        root = math.sqrt(items / 1000)
        z = margin.z * root - margin.correction / root
        assert stats.norm.cdf(z - stats.norm.ppf(1 - level)) == pytest.approx(0.8)
    assert statistics.Margin(0.0).items_needed(1000, 0.05) == math.inf


@pytest.mark.parametrize("level", [0.05, 0.01])
def test_fewer_items_than_named_do_not_pass_a_model_without_changes(level):
    """The named size suffices; otherwise 2 samples would name 9, and 9 would name 30."""
    for items in (2, 50, 300):
        fewest = statistics.tango(0, 0, items, 0.01).items_needed(items, level)
        passes, fails = (math.ceil(fewest), math.floor(fewest))
        assert statistics.tango(0, 0, passes, 0.01).p_within <= level
        assert statistics.tango(0, 0, fails, 0.01).p_within > level


@pytest.mark.parametrize("items", [2, 3, 50])
def test_a_margin_of_replicates_has_the_error_of_the_items(items):
    """A bootstrap sample of n items varies less than n items do, by (n - 1) / n."""
    excess = np.array([-0.03, -0.01, -0.02, 0.0])  # symmetric
    error = np.sqrt(np.square(excess - excess.mean()).sum() / 3 * items / (items - 1))
    expected = statistics.Margin.student(excess.mean(), error, items, skewness=0.0)
    assert statistics.bootstrap_margin(excess, items).z == pytest.approx(expected.z)
    assert math.isinf(statistics.bootstrap_margin(excess, 1).correction)


def test_skewed_losses_at_the_limit_pass_in_at_most_five_percent():
    """Most losses are small and some are large; Student's test passes 9%."""
    items = 50
    weights = np.stack([np.bincount(d, minlength=items) for d in statistics.resample(items, 1000)])
    losses = drawn(0).exponential(size=(items, 2000))  # of mean 1
    margins = [statistics.bootstrap_margin(r, items) for r in (weights @ losses / items - 1).T]
    plain = stats.ttest_1samp(losses, 1, alternative="less").pvalue
    assert (plain <= 0.05).mean() > 0.08
    of_items = [statistics.Margin.of_mean(column, skewed=True) for column in losses.T - 1]
    for tested in (margins, of_items):
        assert 0.02 < np.mean([margin.p_within <= 0.05 for margin in tested]) < 0.06
        assert 0.02 < np.mean([margin.p_beyond <= 0.05 for margin in tested]) < 0.06


@given(st.floats(-40, 40), st.floats(-2, 2), st.floats(0.01, 1))
@example(-8.0, 1.0, 0.5)  # the cubic term outweighs the correction
@settings(max_examples=50)
def test_more_skewness_never_makes_a_pass_easier(t, skewness, more):
    corrected = statistics.correct_skewness(t, skewness)
    assert corrected <= statistics.correct_skewness(t, skewness + more) + 1e-9
    assert corrected <= statistics.correct_skewness(t + more, skewness) + 1e-9
    if abs(t) > 3:
        assert corrected / t > 0.16


@pytest.mark.parametrize("items", [10, 20, 50])
def test_skewed_losses_that_do_not_pass_need_more_items(items):
    margin = statistics.Margin.student(-1.0, 0.35, items, 6.0)
    assert margin.p_within > 0.05
    assert margin.items_needed(items, 0.05) > items


def test_a_rare_class_makes_a_mean_over_classes_less_certain():
    excess = drawn(0).normal(-0.02, 0.01, 1000)
    whole = statistics.bootstrap_margin(excess, 50)
    assert statistics.bootstrap_margin(excess, 50, np.array([50])) == whole
    even = statistics.bootstrap_margin(excess, 50, np.array([25, 25, 25]))
    rare = statistics.bootstrap_margin(excess, 50, np.array([50, 50, 3]))
    assert whole.z < even.z < rare.z < 0
    for few in ([1, 1], [4], [30, 1]):  # fewer than five effective items
        assert statistics.bootstrap_margin(excess, 50, np.array(few)).p_within == 1


@pytest.mark.parametrize(
    ("counts", "passes"), [(None, True), ([300, 300], True), ([300, 0], True), ([300, 100], False)]
)
def test_replicates_equal_to_fp32_s_pass_with_enough_samples(counts, passes):
    """None of 300 items changed: a loss of 1% would have changed one with a probability of 95%."""
    counts = None if counts is None else np.array(counts)
    values = Replicates(drawn(0).normal(0.5, 0.1, 1000), class_counts=counts)
    assert (values.margin(values, AUC, 0.01, 300).p_within <= 0.05) == passes
    assert values.margin(values, AUC, 0.01, 290).p_within == 1
    assert values.margin(values, regression.build().metric, 0.01, 300) != statistics.UNKNOWN


@given(st.integers(0, 40), st.floats(0.05, 0.95))
@example(1, 0.5)
@example(10, 0.5)  # of 1000: at most a hundredth
@example(11, 0.5)
@settings(max_examples=30)
def test_interval_test_and_verdict_leave_out_the_same_samples(undefined, level):
    """They all have a value, from the samples that do, or none of them has one."""
    values = drawn(0).normal(level, 0.1, 1000)
    before = drawn(1).normal(0.5, 0.1, 1000)
    values[:undefined] = np.nan
    model, fp32 = Replicates(values), Replicates(before)
    kept = Replicates(values[undefined:]), Replicates(before[undefined:])
    interval, (delta, p_value) = model.interval, model.against(fp32)
    margin = model.margin(fp32, AUC, 0.01, 100)
    if undefined <= 10:
        assert (interval, (delta, p_value)) == (kept[0].interval, kept[0].against(kept[1]))
        assert margin == kept[0].margin(kept[1], AUC, 0.01, 100)
    else:
        assert np.isnan([*interval, *delta]).all()
        assert (p_value, margin) == (1.0, statistics.UNKNOWN)
    share = undefined / 1000
    assert model.metrics(fp32) == ({UNDEFINED: share} if share else {})


def test_samples_without_a_value_are_at_most_a_hundredth():
    excess = np.arange(-300, -100) / 1000
    for unknown, outcome in ((0, True), (2, True), (3, False)):
        excess[:unknown] = np.nan
        assert np.isfinite(statistics.bootstrap_margin(excess, 50).correction) == outcome


@pytest.mark.parametrize(
    ("differences", "p_value"),
    [
        (np.arange(1, 20), 0.1),
        (np.append(np.arange(1, 19), -1), 0.2),
        (np.append(np.arange(1, 100), -np.arange(10)), 0.2),
        (np.append(np.arange(1, 100), np.nan), 2 * stats.norm.cdf(-1.5746)),
        (np.append(np.arange(1, 100), np.full(2, np.nan)), 1.0),  # more than 1% are unknown
        (np.ones(99), 0.02),  # no spread to judge by
        (np.array([-1, 0, 1, 2, 3]), 1.0),
        (np.zeros(9), 1.0),
    ],
)
def test_p_values_of_replicates_by_hand(differences, p_value):
    for sign in (1, -1):
        assert statistics.bootstrap_p(sign * differences) == pytest.approx(p_value, rel=1e-3)


@given(st.integers(0, 2**32 - 1), st.integers(100, 3000))
@settings(max_examples=20)
def test_a_p_value_falls_with_the_difference_without_a_jump(seed, resamples):
    """Also where the counted tail ends and the normal one begins."""
    replicates = np.random.default_rng(seed).normal(size=resamples)
    p_values = [statistics.bootstrap_p(replicates + shift) for shift in np.arange(0.5, 8, 0.05)]
    assert np.diff(p_values).max() <= 0
    assert p_values[-1] < 1e-6
    edge = np.sort(replicates)[statistics.COUNTABLE - 1]
    counted, continued = (statistics.bootstrap_p(replicates - edge + d) for d in (-1e-9, 1e-9))
    assert counted == pytest.approx(2 * (statistics.COUNTABLE + 1) / (resamples + 1))
    assert continued == pytest.approx(counted, rel=1e-6)


def test_p_values_near_the_floor_keep_their_level():
    """Simulated without a difference: Student's test is exact, and counts end at 2 / 200."""
    random = np.random.default_rng(5)
    items, resamples, sweeps = 100, 199, 20_000
    weights = np.stack([np.bincount(d, minlength=items) for d in statistics.resample(items, 199)])
    assert len(weights) == resamples
    values = random.normal(size=(items, sweeps))
    p_values = np.array([statistics.bootstrap_p(column) for column in (weights @ values / items).T])
    exact = stats.ttest_1samp(values, 0).pvalue
    for level in (0.05, 0.01, 0.002, 0.0005):
        assert 0.4 < (p_values <= level).sum() / (exact <= level).sum() < 2.5


def test_a_difference_can_be_significant_among_hundreds_of_models():
    """AP 1 beside 50 others: counted, Holm's smallest p-value was 0.051."""
    random = np.random.default_rng(0)
    best, other = Replicates(np.ones(2000)), Replicates(0.5 + 0.02 * random.normal(size=2000))
    assert max(statistics.holm([best.against(other)[1]] * 51)) < 1e-6


def test_a_limit_that_is_a_fraction_is_as_uncertain_as_the_baseline():
    """With errors of exactly 1.5 times FP32's, a limit of 0.5 is met by none or all replicates."""
    random = np.random.default_rng(1)
    base = 1 + 0.1 * random.normal(size=1000)
    model = 1.5 * base + 1e-3 * random.normal(size=1000)
    paired = Paired(Replicates(model), Replicates(base))
    metric = regression.build().metric
    near, beyond = (paired.margin(metric, drop, 200) for drop in (0.5, 0.49))
    assert abs(near.z) < 0.5
    assert beyond.z > 5


def test_hard_windows_that_multiply_both_perplexities_do_not_change_a_margin():
    random = np.random.default_rng(1)
    base = 1 + 0.01 * random.normal(size=1000)
    model = 1.1 * base + 0.01 * random.normal(size=1000)
    hard = np.exp(0.2 * random.normal(size=1000))
    metric = perplexity.METRIC
    plain, scaled = (
        Paired(Replicates(model * by), Replicates(base * by)).margin(metric, 0.1, 200)
        for by in (1, hard)
    )
    assert scaled.z == pytest.approx(plain.z)


@given(
    arrays.arrays(np.float64, (2, 12), elements=st.sampled_from([0.0, 0.25, 0.5, 0.75])),
    st.integers(1, 11),
)
@settings(max_examples=50)
def test_delong_s_variance_is_that_of_the_structural_components(scores, positives):
    """By all pairs of a positive and a negative; the variance of a single value counts as 0."""

    def variance(pairs):
        """Of pairs [positives, negatives]."""
        of = (pairs.mean(axis=1), pairs.mean(axis=0))
        return sum(values.var(ddof=1) / values.size for values in of if values.size > 1)

    positive = np.arange(12) < positives
    areas = [statistics.auc(row, positive) for row in scores]
    pairs = [(np.sign(row[positive][:, None] - row[~positive]) + 1) / 2 for row in scores]
    value, half_width = pairs[0].mean(), statistics.Z95 * np.sqrt(variance(pairs[0]))
    assert areas[0].value == pytest.approx(value)
    assert areas[0].of_positives == pytest.approx(pairs[0].mean(axis=1))
    assert areas[0].of_negatives == pytest.approx(pairs[0].mean(axis=0))
    ends = max(value - half_width, 0), min(value + half_width, 1)
    assert areas[0].interval == pytest.approx(ends, abs=1e-7)

    difference, error = pairs[0].mean() - pairs[1].mean(), np.sqrt(variance(pairs[0] - pairs[1]))
    assert statistics.delong_error(*areas) == pytest.approx(error, abs=1e-7)
    (low, high), p_value = statistics.delong(*areas)
    assert (low + high) / 2 == pytest.approx(difference, abs=1e-7)
    assert (high - low) / 2 == pytest.approx(statistics.Z95 * error, abs=1e-7)
    if error > 1e-7:
        assert p_value == pytest.approx(2 * stats.norm.sf(abs(difference) / error))


def test_delong_without_spread_takes_the_difference_for_certain():
    positive = np.arange(6) < 3
    best, worst = (statistics.auc(sign * positive, positive) for sign in (1.0, -1.0))
    assert statistics.delong(best, best) == ((0, 0), 1)
    assert statistics.delong(best, worst) == ((1, 1), 0)


@pytest.mark.parametrize(("pairs", "passes"), [(298, False), (299, True)])
def test_rankings_without_a_change_pass_with_enough_pairs(pairs, passes):
    """0.99 to the power of 299 is below 5%; DeLong's variance is 0 and shows nothing."""
    labels = np.repeat([0, 1], [1000, pairs])
    ours, theirs = (Ranking(scale * (labels + 0.1), labels) for scale in (1.0, 2.0))
    margin = ours.margin(theirs, AUC, 0.01, len(labels))
    assert (margin.p_within <= SIGNIFICANCE) == passes
    assert margin.p_beyond > 0.5
    worse = Ranking(np.where(np.arange(len(labels)) == 5, 9.0, labels + 0.1), labels)
    assert np.isfinite(worse.margin(theirs, AUC, 0.01, len(labels)).z)


@pytest.mark.parametrize("lost", [0, 1])
def test_nan_of_one_label_ranks_as_wrong(lost):
    """A sort puts all NaN at one end, which would be the right one for one of the labels."""
    labels = np.repeat([0, 1], 50)
    ranking = Ranking(np.where(labels == lost, np.nan, 0.5), labels)
    assert ranking.auc.value == 0
    figure = roc_plot.draw(ranking, ranking, "title")
    assert figure.axes[0].lines[0].get_xydata().tolist() == [[0, 0], [1, 0], [1, 1]]
    outputs = Outputs((ranking.scores[:, np.newaxis],), None, VALUES)
    scores = anomaly.build().score(outputs, Targets(labels))
    assert scores.more()["pauc"] < 0.5


def test_delong_keeps_its_level():
    """Of two equally good rankings, one in twenty differs at 5%."""
    positive = np.arange(200) % 2 == 0
    p_values = []
    for seed in range(400):
        random = np.random.default_rng(seed)
        scores = positive + random.normal(size=(3, 200))
        pair = [statistics.auc(scores[2] + row, positive) for row in scores[:2]]
        p_values.append(statistics.delong(*pair)[1])
    assert 0.02 < (np.array(p_values) < 0.05).mean() < 0.09


def test_a_bootstrap_shows_its_progress():
    shown = []

    def score(chosen: np.ndarray) -> float:
        shown.append(console._watch.steps[-1].describe())
        return 0.0

    statistics.bootstrap(score, 2, 3)
    assert "Scoring bootstrap samples: 2 of 3 samples" in shown[-1]


@pytest.mark.parametrize("shift", [0.0, 0.08])
def test_the_bootstrap_is_scipys(shift):
    random = np.random.default_rng(3)
    ours, theirs = random.normal(size=300) + shift, random.normal(size=300)
    ours += theirs
    replicates = [
        statistics.bootstrap(lambda chosen, v=values: float(v[chosen].mean()), 300, 4000)
        for values in (ours, theirs)
    ]
    expected = stats.bootstrap(
        (ours, theirs),
        lambda a, b, axis: a.mean(axis) - b.mean(axis),
        paired=True,
        method="percentile",
        n_resamples=4000,
        rng=0,
    )
    interval = statistics.bootstrap_interval(replicates[0] - replicates[1])
    width = expected.confidence_interval.high - expected.confidence_interval.low
    assert interval == pytest.approx(expected.confidence_interval, abs=0.06 * width)
    p_value = statistics.bootstrap_p(replicates[0] - replicates[1])
    assert p_value == pytest.approx(stats.ttest_rel(ours, theirs).pvalue, abs=0.03)


def test_the_crossed_mean_of_a_balanced_table_by_hand():
    """Rows are draws: 0 and 1 by sample, and 2 more in the second draw; nothing else varies."""
    crossed = statistics.crossed_mean(np.array([[0.0, 1.0], [2.0, 3.0]]))
    assert crossed.mean == 1.5
    assert crossed.sample_error == pytest.approx(0.5)  # of 1 and 2
    assert crossed.draw_error == pytest.approx(1.0)  # of 0.5 and 2.5
    assert crossed.error == pytest.approx(math.hypot(0.5, 1.0))
    assert crossed.freedom == pytest.approx(1.25**2 / (0.25**2 + 1))


def test_recipes_at_the_limit_pass_in_a_twentieth_of_the_cases():
    """Five draws of 1,000 samples; the draw shifts the loss by half a point."""
    random, passed, times = np.random.default_rng(3), 0, 600
    for _ in range(times):
        flips = random.random(1000) < 0.06
        losing = 0.5 + (0.01 + random.normal(0, 0.005, 5)) / 0.06
        sides = np.where(random.random((5, 1000)) < losing[:, np.newaxis], 1.0, -1.0)
        values = np.where(flips & (random.random((5, 1000)) < 0.5), sides, 0.0)
        passed += statistics.crossed_mean(values).margin(0.01).p_within <= 0.05
    assert 0.01 < passed / times <= 0.05 + 3 * (0.05 * 0.95 / times) ** 0.5


@pytest.mark.parametrize("items", [50, 150, 400])
@pytest.mark.parametrize("kind", ["mean", "AUC"])
def test_models_that_lose_one_item_in_hundred_pass_rarely(kind, items):
    """The other items change a little: by their spread alone, a third of such models would pass."""
    random = np.random.default_rng(0)
    counts = random.multinomial(items, np.full(items, 1 / items), size=200) / items
    labels = np.repeat([1, 0], items)
    passed = 0
    for _ in range(200):
        is_lost = random.random(items) < 0.01
        if kind == "mean":
            values = np.where(is_lost, 0.0, 0.8 + random.normal(0, 1e-4, items))
            before = Replicates(counts @ np.full(items, 0.8))
            result = Replicates(counts @ values).margin(before, Metric("iou", "IoU"), 0.008, items)
        else:
            scores = random.normal(size=2 * items) + 5 * labels
            changed = scores + random.normal(0, 1e-3, 2 * items)
            changed[:items][is_lost] = -9.0
            ranking = Ranking(scores, labels)
            result = Ranking(changed, labels).margin(ranking, AUC, 0.01, 2 * items)
        passed += result.p_within <= SIGNIFICANCE
    assert passed / 200 < 0.05 + 2 * 0.0154  # two standard errors


def test_the_size_that_shows_no_rare_losses_is_named():
    unchanged = statistics.Margin(-50.0).with_rare_losses(0.0, 0.01, items=100)
    assert unchanged.p_within == pytest.approx(0.99**100)
    needed = unchanged.items_needed(100, 0.05)
    assert needed == pytest.approx(math.log(0.05) / math.log(0.99))
    assert statistics.Margin(-50.0).with_rare_losses(0.0, 0.01, items=300).p_within <= 0.05
    gain = statistics.Margin(-50.0).with_rare_losses(
        -0.02, 0.0, items=200
    )  # limit 0: a better model passes
    assert gain.p_within <= 0.05


def test_the_size_that_an_unchanged_model_needs_is_named():
    few = statistics.Margin.unchanged(0.01, 50)
    assert few.p_within == few.p_beyond == 1
    needed = few.items_needed(200, 0.05)  # of 200 items, 50 have the rarer label
    assert needed == pytest.approx(4 * math.log(0.05) / math.log(0.99))
    assert statistics.Margin.unchanged(0.01, math.ceil(needed / 4)).p_within <= 0.05
    assert math.isnan(statistics.Margin.unchanged(0.0, 50).items_needed(50, 0.05))
    constant = statistics.Margin.student(0.01, 0.0, 50).with_rare_losses(0.02, 0.01, items=50)
    assert math.isnan(constant.items_needed(50, 0.05))  # every item loses 2 points


def test_the_skewness_of_a_difference_of_aucs_is_that_of_its_means():
    random = np.random.default_rng(0)
    positive = np.repeat([True, False], [30, 50])
    scores = random.normal(size=(2, 80)) + 2 * positive
    ours, theirs = (statistics.auc(values, positive) for values in scores)
    parts = (ours.of_positives - theirs.of_positives, ours.of_negatives - theirs.of_negatives)
    means = sum(random.choice(part, (100_000, len(part))).mean(axis=1) for part in parts)
    skewness = statistics.delong_skewness(ours, theirs)
    assert skewness == pytest.approx(statistics.find_skewness(means), abs=0.03)
