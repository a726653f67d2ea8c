"""`+analysis=plan_test`: its numbers against the power of simulated tests."""

import math

import numpy as np
import pytest

from resnet8ptq.exploration.power_analysis import needed, plan
from resnet8ptq.tasks.scoring.statistics import SIGNIFICANCE, tango
from tests.helpers.calling import call


def power(loss: float, changed: float, total: int, within: bool) -> float:
    """Return the share of simulated models with this loss that pass, or that fail."""
    share = max(changed, loss)
    shares = [(share + loss) / 2, (share - loss) / 2, 1 - share]
    drawn = np.random.default_rng(0).multinomial(total, shares, size=2000)[:, :2].tolist()
    margins = [tango(lost, won, total, 0.01) for lost, won in drawn]
    p_values = [margin.p_within if within else margin.p_beyond for margin in margins]
    return float(np.mean([p <= SIGNIFICANCE for p in p_values]))


@pytest.mark.parametrize("changed", [0.02, 0.05, 0.1])
def test_models_at_the_edges_are_decided_in_four_of_five_cases(changed):
    row = plan(changed, 10_000, 0.01)
    assert power(row.passes, changed, 10_000, within=True) == pytest.approx(0.8, abs=0.06)
    assert power(row.fails, changed, 10_000, within=False) == pytest.approx(0.8, abs=0.06)
    assert power(0.0, changed, round(row.needed), within=True) == pytest.approx(0.8, abs=0.08)


def test_the_limit_itself_is_never_decided_and_few_samples_pass_nothing():
    assert math.isinf(needed(0.01, 0.05, 0.01))
    assert plan(0.05, 500, 0.01).passes < 0  # only a model that gains
    assert plan(0.01, 500, 0.01).needed > 500


def test_a_plan_is_a_table_a_figure_and_no_result(tmp_path):
    done = call(tmp_path, "data=shapes", "+analysis=plan_test", "analysis.changed=0.03")
    assert "samples to pass without loss" in done.out
    (folder,) = (tmp_path / "runs").glob("*/*")
    header, row = (folder / "test_plan.csv").read_text().splitlines()
    assert row.startswith("0.03,") and header.startswith("changed,")
    assert (folder / "test_plan.png").exists()
    assert not (folder / "predictions.npz").exists()
