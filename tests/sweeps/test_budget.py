"""The arithmetic of a search's time; nothing runs."""

import pytest

from resnet8ptq.exploration.search.searching import Step, Tried
from resnet8ptq.exploration.search.step_table import START
from resnet8ptq.sweeps.budget import Budget, again_s, confirm_s, expect_s


def tried(kind: str = START, seconds: float = 30.0, cost: float = 1.0, **more: object) -> Tried:
    step = Step("onnx", kind, {}, "", "", cost)
    values = {"loss": 0.05, "own_seconds": 6.0, "evaluate_s": 4.0, "samples": 200, **more}
    return Tried(step, seconds=seconds, **values)  # type: ignore[arg-type]


def test_steps_leave_the_time_of_the_end():
    budget = Budget(limit_s=120, loading_s=10)
    assert budget.left_s(spent_s=50) == 60
    assert budget.left_s(spent_s=115) == 0


@pytest.mark.parametrize("loading_s", [0, 3, 20, 500])
@pytest.mark.parametrize("spent_s", [0, 60, 119, 400])
def test_no_job_goes_on_beyond_a_tenth_of_the_limit(loading_s, spent_s):
    budget = Budget(120, loading_s)
    end_s = spent_s + budget.until_late_s(spent_s) + budget.closing_s
    assert end_s <= 1.1 * 120


def test_the_first_file_gets_some_time_even_if_reading_took_it_all():
    assert Budget(120, 10).first_s(spent_s=300) == 12
    assert Budget(120, 10).first_s(spent_s=20) > 90


def test_the_report_is_drawn_only_if_it_ends_in_time():
    budget = Budget(120, 10)
    assert budget.has_time_to_draw(spent_s=120) and not budget.has_time_to_draw(spent_s=125)


def test_the_first_step_without_its_conversion_is_the_measure_of_others():
    first = tried()
    assert again_s(first) == 12  # twice quantization and evaluation
    assert expect_s(Step("onnx", "calibrations", {}, "", "", 0.8), [first]) == pytest.approx(9.6)
    learned = Step("onnx", "learned_rounding", {}, "", "", 30)
    assert expect_s(learned, [first]) == 12 + 29 * 6
    assert expect_s(learned, []) == 0  # nothing is known


def test_a_slower_machine_makes_every_expected_time_longer():
    step = Step("onnx", "bias_correction", {}, "", "", 2)
    slow = tried(seconds=90, own_seconds=18, evaluate_s=12)
    assert expect_s(step, [slow]) == 3 * expect_s(step, [tried()])
    assert confirm_s(slow, 200) > confirm_s(tried(), 200)


def test_a_confirmation_takes_longer_the_more_samples_are_reported():
    """4 s for 200 samples: 20 ms each, of the model, and twice as much of FP32."""
    same = confirm_s(tried(), reported=200)
    assert confirm_s(tried(), reported=10_200) == pytest.approx(same + 3 * 10_000 * 0.02)
    assert confirm_s(tried(), reported=0) == same == 12 + 10  # it is timed beside FP32


def test_learned_layers_are_not_learned_again_for_the_confirmation():
    learned = tried("learned_rounding", seconds=400, cost=30)
    assert again_s(learned) == 12
