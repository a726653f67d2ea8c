"""Bounds of the loss: the verdict's own tests, turned around."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.report import verdicts
from resnet8ptq.report.families import Cell, Family
from resnet8ptq.report.verdicts import FAIL, PASS
from resnet8ptq.results.bounds import add_bounds, levels
from resnet8ptq.tasks.deviation import DeviationValues
from resnet8ptq.tasks.scoring.bootstrap import Replicates
from resnet8ptq.tasks.scoring.ranking import Ranking
from resnet8ptq.tasks.scoring.statistics import SIGNIFICANCE, holm, tango
from resnet8ptq.tasks.scoring.values import Paired
from resnet8ptq.tracking.record import RunRecord
from tests.helpers.cells import IMAGES, predictions, sweep

RANDOM = np.random.default_rng(0)
FLIPS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=6)


def bounded(family: Family) -> dict[str, RunRecord]:
    """Return the runs of a family with their bounds, by id."""
    return {record.run_id: record for record in add_bounds(family).records}


def ends(run: RunRecord) -> tuple[float | None, float | None]:
    return run.loss_lower_bound, run.loss_upper_bound


def agree(family: Family, limits: ReportConfig) -> set[str]:
    """Check that verdicts follow from the bounds; return the outcomes."""
    limit = family.metric.limit(limits)
    judged = verdicts.assess(family, limits)
    for record in add_bounds(judged).records:
        upper, lower = record.loss_upper_bound, record.loss_lower_bound
        assert (record.verdict == PASS) == (upper is not None and upper <= limit)
        assert (record.verdict == FAIL) == (lower is not None and lower >= limit)
    return {record.verdict for record in judged.records}


@given(flips=FLIPS, limit=st.sampled_from([0.0, 0.001, 0.01, 0.02, 0.05]))
def test_a_model_passes_exactly_if_its_bound_is_within_the_limit(flips, limit):
    cells = [
        (str(n), predictions(lost=lost, won=won), {"seed": str(n)})
        for n, (lost, won) in enumerate(flips)
    ]
    agree(sweep(*cells), ReportConfig(max_drop=limit))


def test_bounds_count_equal_files_once_as_verdicts_do():
    digest = {"artifact_sha256": "e" * 64}
    many = sweep(*((str(n), predictions(lost=4), {"seed": str(n), **digest}) for n in range(20)))
    single = bounded(sweep(("0", predictions(lost=4), {})))["0"]
    assert set(map(ends, bounded(many).values())) == {ends(single)}
    assert agree(many, ReportConfig()) == {PASS}


def family_of(task: str, *values: Paired, **params: str) -> Family:
    records = [
        RunRecord.of(
            str(n), {"scored_as": task, "seed": str(n), **params}, {"counts/total": 400.0}, {}
        )
        for n in range(len(values))
    ]
    return Family(tuple(Cell(r, r.run_id, v) for r, v in zip(records, values, strict=True)))


def rank(noise: float) -> Paired:
    labels = np.arange(400) % 2
    scores = labels + RANDOM.normal(0, 0.5, 400)
    worse = scores + RANDOM.normal(0, 1, 400) * noise
    return Paired(Ranking(worse, labels), Ranking(scores, labels))


def err(factor: float) -> Paired:
    before = RANDOM.normal(2, 0.05, 2000)
    after = before * factor + RANDOM.normal(0, 0.02, 2000)
    return Paired(Replicates(after), Replicates(before))


def deviate(scale: float) -> Paired:
    replicates = RANDOM.normal(scale, 0.01, 2000)
    noise, signal = RANDOM.random(400) * scale, 1 + 0.1 * RANDOM.random(400)
    values = DeviationValues(replicates, noise=noise, signal=signal)
    return Paired(values, values)


@pytest.mark.parametrize(
    ("task", "values"),
    [
        ("anomaly", [rank(noise) for noise in (0.001, 0.1, 0.3, 2.0)]),
        ("regression", [err(factor) for factor in (0.9, 1.0, 1.03, 1.1, 3.0, 50.0)]),
        ("deviation", [deviate(scale) for scale in (0.001, 0.0062, 0.01, 0.5)]),
    ],
)
def test_bounds_and_verdicts_agree_for_every_kind_of_test(task, values):
    outcomes = set()
    for max_drop in (0.001, 0.01, 0.05, 0.2):
        outcomes |= agree(family_of(task, *values), ReportConfig(max_drop=max_drop))
    assert {PASS, FAIL} <= outcomes


def test_a_loss_of_many_times_the_baseline_is_bounded():
    bounds = bounded(family_of("regression", err(50.0)))["0"]
    assert bounds.loss_lower_bound is not None and bounds.loss_upper_bound is not None
    assert 45 < bounds.loss_lower_bound < 49 < bounds.loss_upper_bound < 53


def test_a_bound_is_the_limit_at_which_the_test_decides():
    alone = bounded(sweep(("a", predictions(lost=12, won=4), {})))["a"]
    assert alone.loss_upper_bound is not None and alone.loss_lower_bound is not None
    assert tango(12, 4, IMAGES, alone.loss_upper_bound).p_within == pytest.approx(SIGNIFICANCE)
    assert tango(12, 4, IMAGES, alone.loss_lower_bound).p_beyond == pytest.approx(SIGNIFICANCE)
    assert alone.loss_lower_bound < 0.008 < alone.loss_upper_bound
    many = [(str(n), predictions(lost=12, won=4), {"seed": str(n)}) for n in range(20)]
    one_of_many = bounded(sweep(*many))["0"]
    assert (
        one_of_many.loss_upper_bound is not None
        and one_of_many.loss_upper_bound > alone.loss_upper_bound
    )


def test_nothing_is_bounded_by_groups_or_beside_a_broken_fp32():
    grouped = sweep(("a", predictions(), {"grouped": "true"}))
    assert ends(bounded(grouped)["a"]) == (None, None)
    doubtful = sweep(("a", predictions(), {"doubt": "NEAR CHANCE"}))
    assert ends(bounded(doubtful)["a"]) == (None, None)


@given(st.lists(st.floats(0, 1), max_size=8), st.integers(0, 9))
def test_levels_reject_what_holm_rejects(p_values, planned):
    rejected = [p <= SIGNIFICANCE for p in holm(p_values, planned)]
    by_levels = zip(p_values, levels(p_values, planned), strict=True)
    by_level = [p <= level for p, level in by_levels]
    assert by_level == rejected
