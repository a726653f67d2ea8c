"""The group-sequential test: published bounds, error rates by simulation, values after a stop."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.evaluation.sequential import FAIL, FUTILE, PASS, StoppingPlan, find_bounds, spend
from resnet8ptq.tasks.scoring.statistics import PART, tango

FRACTIONS = st.floats(0.02, 1)
LEVELS = st.floats(1e-5, 0.2)
PLAN = StoppingPlan(2000, 0.01, 0.05)


@given(FRACTIONS, FRACTIONS, LEVELS)
def test_the_level_is_spent_once_and_late(one, other, level):
    early, late = sorted((one, other))
    assert 0 <= spend(early, level) <= spend(late, level) * (1 + 1e-9)
    assert spend(1, level) == pytest.approx(level)
    assert spend(early, level) <= early * level * (1 + 1e-9)  # less than a uniform spending


def test_bounds_are_those_of_the_literature():
    """Of Lan and DeMets' O'Brien-Fleming type, as in the R package ldbounds."""
    fifths = tuple(look / 5 for look in range(1, 6))
    expected = [4.8769, 3.3569, 2.6803, 2.2898, 2.0310]
    assert find_bounds(fifths, 0.025) == pytest.approx(expected, abs=2e-4)
    assert find_bounds((1.0,), 0.05) == pytest.approx([1.6449], abs=1e-4)


@pytest.mark.parametrize("level", [0.05, 0.01])
def test_a_brownian_path_crosses_with_the_level(level):
    looks = np.arange(1, 21)
    steps = np.random.default_rng(0).standard_normal((100_000, len(looks)))
    paths = steps.cumsum(axis=1) / np.sqrt(looks)
    crossing = (paths > find_bounds(tuple(looks / 20), level)).any(axis=1).mean()
    assert crossing == pytest.approx(level, abs=4 * np.sqrt(level / 100_000))


def runs(
    loss: float, flips: float, count: int, plan: StoppingPlan = PLAN
) -> list[tuple[str, int, int, int]]:
    """Return outcome, lost, won and seen samples of simulated runs."""
    random = np.random.default_rng(1)
    shares = [(flips + loss) / 2, (flips - loss) / 2, 1 - flips]
    blocks = np.diff([0, *plan.ends])
    drawn = random.multinomial(blocks, shares, size=(count, len(blocks))).cumsum(axis=1)
    ended = []
    for changes in drawn[:, :, :2].tolist():
        for (lost, won), seen in zip(changes, plan.ends, strict=True):
            if outcome := plan.outcome(lost, won, seen):
                ended.append((outcome, lost, won, seen))
                break
    return ended


@pytest.mark.parametrize("flips", [0.01, 0.03, 0.1])
def test_models_at_the_limit_pass_and_fail_wrongly_in_five_percent(flips):
    outcomes = [outcome for outcome, *_ in runs(0.01, flips, 2000)]
    assert len(outcomes) == 2000  # every run ends
    for wrong in (PASS, FAIL):
        assert outcomes.count(wrong) / 2000 < 0.05 + 3 * 0.005


def test_clear_cases_end_early_and_hopeless_ones_too():
    good, bad = runs(-0.005, 0.02, 200), runs(0.06, 0.08, 200)
    assert {outcome for outcome, *_ in good} == {PASS}
    assert {outcome for outcome, *_ in bad} == {FAIL}
    hopeless = [seen for outcome, _, _, seen in runs(0.01, 0.03, 200) if outcome == FUTILE]
    for seen in ([seen for *_, seen in good], [seen for *_, seen in bad], hopeless):
        assert np.mean(seen) < 0.75 * PLAN.total


@pytest.mark.parametrize("loss", [0.0, 0.01])
def test_the_interval_after_a_stop_covers_the_loss(loss):
    margins = [PLAN.margin(*changes, loss) for _, *changes in runs(loss, 0.03, 500)]
    covered = [min(margin.p_within, margin.p_beyond) > PART for margin in margins]
    assert np.mean(covered) > 0.95 - 3 * 0.01
    above = [0.5 * (1 + np.sign(round(margin.z, 6))) for margin in margins]  # median-unbiased
    assert np.mean(above) == pytest.approx(0.5, abs=0.07)


def test_the_verdict_after_a_stop_is_that_of_the_stop():
    for outcome, *changes in runs(0.004, 0.03, 8):
        margin = PLAN.margin(*changes, PLAN.limit)
        assert (margin.p_within <= PLAN.level) == (outcome == PASS)
        assert (margin.p_beyond <= PLAN.level) == (outcome == FAIL)
        low, high = PLAN.interval(*changes)
        assert low <= PLAN.estimate(*changes) <= high


def test_without_an_earlier_analysis_nothing_is_corrected():
    first = PLAN.ends[0]
    ours, plain = PLAN.margin(3, 1, first, 0.02), tango(3, 1, first, 0.02)
    assert (ours.p_within, ours.p_beyond) == pytest.approx((plain.p_within, plain.p_beyond))
    late = PLAN.margin(30, 20, 1000, 0.005)
    assert late.p_within == pytest.approx(tango(30, 20, 1000, 0.005).p_within, abs=0.02)


def test_few_samples_have_an_analysis_each():
    assert StoppingPlan(3, 0.01, 0.05).ends == (1, 2, 3)
    assert [*StoppingPlan(9980, 0.01, 0.05).ends][-1] == 9980
