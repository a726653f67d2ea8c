"""One verdict on a network over several data sets."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.evaluation.sequential import StoppingPlan
from resnet8ptq.evaluation.stopped_hits import StoppedHits
from resnet8ptq.report import page, pooled, terminal, verdicts
from resnet8ptq.report.comparison import Family
from resnet8ptq.report.pooled import Stratum
from resnet8ptq.report.verdicts import FAIL, PASS, UNDECIDED, VOID
from resnet8ptq.tasks.hits import Hits
from resnet8ptq.tasks.statistics import SIGNIFICANCE, Margin, invert, tango, tango_interval
from tests.helpers.cells import amend_family, predictions, sweep
from tests.helpers.pages import to_page

LIMITS = ReportConfig()
COUNTS = st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(200, 3000))
STRATA = st.lists(COUNTS.map(lambda counts: Stratum(*counts)), min_size=1, max_size=4)
Models = dict[str, np.ndarray]  # predictions by calibration


def on(data: str, models: Models, **params: str) -> Family:
    """Return the runs of a network on one data set."""
    family = sweep(
        *((f"{data[0]}_{calib}", model, {"calib": calib}) for calib, model in models.items())
    )
    return amend_family(family, params={"model.path": "net.onnx", "data": data, **params})


@given(COUNTS, st.floats(-0.05, 0.05))
def test_one_data_set_has_the_margin_of_its_own_test(counts, limit):
    alone, own = pooled.stratified([Stratum(*counts)], limit), tango(*counts, limit)
    assert alone.z == pytest.approx(own.z, abs=1e-6)
    assert alone.correction == pytest.approx(own.correction, rel=1e-6)
    assert pooled.hold_on_all([own]) == (own.p_within, own.p_beyond)
    lost, won, total = counts
    baseline, model = np.arange(total) < lost, (np.arange(total) - lost) % total < won
    low, high = tango_interval(baseline, model)
    interval = invert(partial(pooled.stratified, [Stratum(lost, won, total)]))
    assert interval == pytest.approx((low, high), abs=1e-6)


@given(STRATA, st.floats(-0.05, 0.05))
def test_order_does_not_matter_and_twice_the_samples_tell_more(strata, limit):
    once, twice = (pooled.stratified(times * strata, limit) for times in (1, 2))
    turned = pooled.stratified(strata[::-1], limit)
    assert turned.z == pytest.approx(once.z, abs=1e-6)
    if math.isfinite(once.correction):
        assert twice.z == pytest.approx(once.z * math.sqrt(2), abs=1e-6)
        assert twice.correction == pytest.approx(once.correction / math.sqrt(2))


@given(STRATA)
def test_each_data_set_has_the_variance_of_its_own_loss(strata):
    variance = sum(((s.lost + s.won) / s.total - s.loss**2) / s.total for s in strata)
    assume(variance > 1e-9)
    margin = pooled.stratified(strata, pooled.mean_loss(strata))
    assert margin.z == pytest.approx(0, abs=1e-6)
    half_step = 0.5 / min(s.total for s in strata)
    assert margin.correction == pytest.approx(half_step / math.sqrt(variance), rel=1e-6)


@given(STRATA, COUNTS)
def test_another_data_set_never_makes_a_pass_on_all(strata, more):
    margins = [pooled.stratified([stratum], 0.01) for stratum in strata]
    within, _ = pooled.hold_on_all(margins)
    assert (within <= SIGNIFICANCE) == all(m.p_within <= SIGNIFICANCE for m in margins)
    assert pooled.hold_on_all([*margins, pooled.stratified([Stratum(*more)], 0.01)])[0] >= within


def test_configurations_are_corrected_and_of_data_sets_only_a_failure():
    assert verdicts.outcomes([(0.03, 1.0)]) == [PASS]
    assert verdicts.outcomes([(0.03, 1.0), (0.03, 1.0), (1.0, 0.01)]) == [
        UNDECIDED,
        UNDECIDED,
        FAIL,
    ]
    margins = [Margin(-2.0), Margin(1.8), Margin(1.5)]
    _, beyond = pooled.hold_on_all(margins)
    assert beyond == pytest.approx(3 * margins[1].p_beyond)


def test_a_gain_hides_a_loss_in_the_mean_and_not_on_all():
    first = {"minmax": predictions(lost=40), "mse": predictions(won=1)}
    second = {"minmax": predictions(won=60), "mse": predictions(lost=6)}
    (pool,) = pooled.judge([on("a", first), on("b", second)], LIMITS)
    hidden, near = pool.configurations
    assert (hidden.pooled, hidden.on_all) == (PASS, FAIL)
    assert (hidden.worst, hidden.worst_loss) == ("a", 0.04)
    assert hidden.loss == pytest.approx(-0.01)
    assert (near.pooled, near.on_all, near.worst) == (PASS, UNDECIDED, "b")


def test_verdicts_on_equal_data_sets_are_no_weaker_than_those_of_each():
    models = {f"m{lost}": predictions(lost=lost) for lost in (0, 5, 12, 40)}
    first, second = on("a", models), on("b", models)
    each = [record.verdict for record in verdicts.judge(first, LIMITS).records]
    (pool,) = pooled.judge([first, second], LIMITS)
    for own, row in zip(each, pool.configurations, strict=True):
        assert own in (UNDECIDED, row.pooled)
        assert row.on_all in (UNDECIDED, own)


def test_bits_that_each_run_chose_itself_are_one_configuration():
    models, auto = {"minmax": predictions()}, {"precision.plan": "auto"}
    families = [
        on(data, models, planned_bits=bits, **auto)
        for data, bits in (("a", "{conv: 4}"), ("b", "{dense: 2}"))
    ]
    (pool,) = pooled.judge(families, LIMITS)
    assert len(pool.configurations) == 1


def test_only_the_same_network_on_different_data_sets_is_pooled():
    models = {"minmax": predictions()}
    here = on("a", models)
    for other in (
        on("a", models),  # the same data set, other samples of it
        on("b", models, **{"model.path": "other.onnx"}),
        on("b", models, seed="7"),
        on("b", models, model="another"),
    ):
        assert pooled.judge([here, other], LIMITS) == []
    own = {"model.path": "null"}  # the networks that come with the data sets
    assert pooled.judge([on("a", models, **own), on("b", models, **own)], LIMITS) == []


def test_data_sets_of_one_name_are_told_apart_and_stopped_runs_left_out():
    models = {"minmax": predictions()}
    here, there = (on("arrays", models, **{"data.root": f"{name}/x.npz"}) for name in "ab")
    here = amend_family(here, tags={"test_digest": "1" * 64})
    there = amend_family(there, tags={"test_digest": "2" * 64})
    (pool,) = pooled.judge([here, there], LIMITS)
    assert pool.data_sets == tuple(f"arrays, digest {digest * 16}…" for digest in "12")
    (cell,) = there.cells
    assert cell.paired is not None and isinstance(cell.paired.model, Hits)
    early = replace(
        cell.paired, model=StoppedHits(cell.paired.model, StoppingPlan(2000, 0.01, 0.05))
    )
    assert pooled.judge([here, Family((replace(cell, paired=early),))], LIMITS) == []


def test_a_broken_fp32_voids_and_groups_decide_nothing():
    models = {"minmax": predictions()}
    for change, expected in ({"doubt": "near chance"}, VOID), ({"grouped": "true"}, UNDECIDED):
        (pool,) = pooled.judge([on("a", models), on("b", models, **change)], LIMITS)
        assert [(row.pooled, row.on_all) for row in pool.configurations] == [(expected, expected)]


def test_the_report_and_the_terminal_show_one_line_for_each_configuration(capsys):
    first = {"minmax": predictions(lost=40), "mse": predictions()}
    families = [on("a<b>", first), on("c", {"minmax": predictions(won=60)})]
    chosen = page.select(families, LIMITS)
    text = page.to_markdown(chosen, [])
    section = text.split("## Several data sets: net on ")[1].split("\n## ")[0]
    assert "-1.00 |" in section and "| pass |" in section and "| fail |" in section
    assert "1 configuration was not measured exactly once" in section
    html = page.to_html(chosen, [[], []], {})
    assert html.count("Several data sets: net on a&lt;b&gt;, c: accuracy</h2>") == 1
    terminal.print_pools(pooled.judge(families, LIMITS))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "onnx int8" in line)
    assert "minmax" in line and "pass" in line and "fail" in line
    assert "Several data sets" not in to_page(families[0])
