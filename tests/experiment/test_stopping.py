"""`evaluate.stop=decided`: which runs stop, and that they score the first samples of one order."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from resnet8ptq.core.errors import ConfigError
from resnet8ptq.data.sampling import shuffle
from resnet8ptq.evaluation import inference
from resnet8ptq.evaluation.sequential import PASS, StoppingPlan
from resnet8ptq.evaluation.stopped_hits import find_outcome
from resnet8ptq.experiment.samples import SamplesByRole
from resnet8ptq.experiment.stopping import make_stopping_plan, try_choice
from resnet8ptq.tasks import binary, classification
from tests.helpers.configs import make_config
from tests.helpers.factories import evaluator_of

TASK = classification.build()
DECIDED = ("data=shapes", "evaluate.stop=decided")


@pytest.fixture
def samples(shapes) -> SamplesByRole:
    return SamplesByRole(shapes, SimpleNamespace(), selection=shapes.train)


def test_each_of_several_models_gets_a_part_of_the_level(samples):
    assert make_stopping_plan(make_config("data=shapes"), TASK, samples, False) is None
    fp32 = make_config(*DECIDED, "dtype=fp32")
    assert make_stopping_plan(fp32, TASK, samples, False) is None  # it is not judged
    for models, level in ((None, 0.05), (1, 0.05), (10, 0.005)):
        config = make_config(*DECIDED, "report.max_drop=0.02")
        config = replace(config, evaluate=replace(config.evaluate, models=models))
        assert make_stopping_plan(config, TASK, samples, False) == StoppingPlan(
            len(samples.reported), 0.02, level
        )


def test_metrics_without_hits_and_groups_are_refused(samples):
    config = make_config(*DECIDED)
    other = replace(TASK, name="binary", test=binary.DELONG)
    with pytest.raises(
        ConfigError, match=r"evaluate\.stop: got decided, expected all with task=bin"
    ):
        make_stopping_plan(config, other, samples, False)
    with pytest.raises(ConfigError, match=r"expected all with data\.groups"):
        make_stopping_plan(config, TASK, samples, True)


def test_a_stop_has_the_level_of_the_verdict(samples):
    """Corrected for the models that may be confirmed; see `report.confirmations`."""
    config = make_config(*DECIDED, "report.confirmations=2")
    expected = StoppingPlan(len(samples.reported), 0.01, 0.025)
    assert make_stopping_plan(config, TASK, samples, False) == expected


def test_models_that_nothing_else_ranks_score_all(samples, caplog):
    config = make_config(*DECIDED, "evaluate.models=4")
    assert make_stopping_plan(config, TASK, replace(samples, selection=None), False) is None
    assert "evaluate.choice" in caplog.text


@pytest.mark.slow
def test_scoring_stops_at_an_analysis_with_what_a_whole_run_predicts(
    quantize, shapes, shapes_model
):
    cell = quantize("backend=onnx")
    config = replace(cell.config, cache_dir=None)
    evaluator = evaluator_of(config, shapes_model)
    ordered = shuffle(shapes.test)
    plan = StoppingPlan(len(ordered), 0.1, 0.05)
    compared = evaluator.compare_until(cell.artifact.path, ordered, plan)
    comparison = compared.comparison
    seen = comparison.model.total
    assert find_outcome(comparison) == PASS
    assert seen in plan.ends and seen < plan.total
    whole = evaluator.compare(cell.artifact.path, ordered.take(np.arange(seen)))
    ours, theirs = (c.model.per_sample.predictions for c in (comparison, whole.comparison))
    np.testing.assert_array_equal(ours, theirs)
    assert comparison.sqnr_db == pytest.approx(whole.comparison.sqnr_db)
    metrics = evaluator.task.metrics(comparison)
    assert metrics["stopping/planned"] == plan.total
    assert metrics["stopping/loss_low"] < metrics["stopping/loss"] < metrics["stopping/loss_high"]
    assert metrics["ci95/delta_low"] == -metrics["stopping/loss_high"]


@pytest.mark.slow
def test_a_run_that_stops_names_outputs_that_depend_on_the_batch(
    quantize, shapes, shapes_model, monkeypatch, caplog
):
    cell = quantize("backend=onnx")
    evaluator = evaluator_of(replace(cell.config, cache_dir=None), shapes_model)
    evaluator.baseline(shapes.test)
    monkeypatch.setattr(inference, "sqnr_or_infinity", lambda alone, in_batch: 3.0)
    plan = StoppingPlan(len(shapes.test), 0.1, 0.05)
    evaluator.compare_until(cell.artifact.path, shapes.test, plan)
    [message] = caplog.messages
    assert "SQNR of 3.0 dB" in message and "evaluate.batch_size=1" in message


@pytest.mark.slow
def test_a_try_of_a_search_stops_when_its_test_decides(quantize, shapes, shapes_model):
    """A try that the test does not decide scores all samples, and has their measured drop."""
    cell = quantize("backend=onnx")
    config = replace(cell.config, cache_dir=None)
    evaluator, ordered = evaluator_of(config, shapes_model), shuffle(shapes.test)
    args = evaluator, cell.artifact.path, ordered
    within, beyond = (try_choice(*args, limit, 0.0125) for limit in (0.2, -0.2))
    assert within.p <= 0.0125 < beyond.p
    assert within.samples < len(ordered) and beyond.samples < len(ordered)
    whole = try_choice(*args, 0.2, None)
    assert whole.samples == len(ordered) and whole.p <= 0.0125
    undecided = try_choice(*args, whole.drop, 0.0125)
    assert undecided.p > 0.0125
    assert (undecided.samples, undecided.drop) == (len(ordered), whole.drop)


def test_the_order_depends_on_the_number_of_samples_alone(shapes):
    one, other = shuffle(shapes.test), shuffle(shapes.test)
    assert one.digest == other.digest != shapes.test.digest
    assert sorted(one.pixel_hashes) == sorted(shapes.test.pixel_hashes)
