"""The contract of every task."""

import math
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.core.errors import TrackingError
from resnet8ptq.evaluation.sequential import StoppingPlan
from resnet8ptq.evaluation.stopped_hits import read_pair, stop
from resnet8ptq.experiment.stopping import try_choice
from resnet8ptq.exploration import file_check
from resnet8ptq.exploration.search.searching import Step
from resnet8ptq.report import verdicts
from resnet8ptq.report.families import Cell, Family
from resnet8ptq.report.recommend import ModelSelection
from resnet8ptq.report.verdicts import PASS, UNDECIDED
from resnet8ptq.sweeps import search
from resnet8ptq.tasks import deviation, registry
from resnet8ptq.tasks.scoring.comparison import Comparison
from resnet8ptq.tasks.scoring.outputs import VALUES, Outputs, Targets
from resnet8ptq.tasks.scoring.statistics import SIGNIFICANCE
from resnet8ptq.tracking.record import RunRecord
from tests.helpers.cells import amend, judged_of
from tests.helpers.task_cases import (
    CASES,
    CLIPS,
    ITEMS,
    WINDOWS,
    Case,
    compare,
    defined,
    every,
    params_of,
)


def test_every_task_has_a_case():
    assert {case.task.name for case in CASES.values()} == set(registry.TASKS)


@every
def test_a_task_is_pickled_to_another_process(case):
    """Deployment runs the artifact in a process of its own."""
    task = pickle.loads(pickle.dumps(case.task))
    comparison = compare(replace(case, task=task), 0.5)
    assert task.metrics(comparison) == case.task.metrics(compare(case, 0.5))


@every
def test_a_model_beside_itself_differs_in_nothing(case):
    comparison = compare(case, 0.0)
    metrics, value = defined(case.task.metrics(comparison)), comparison.model.value
    assert comparison.delta == metrics["drop"] == 0
    assert metrics.get("paired/p_value", 1.0) == 1
    assert metrics.get("ci95/delta_low", 0) <= 0 <= metrics.get("ci95/delta_high", 0)
    assert comparison.paired.model.against(comparison.paired.model)[1] == 1
    assert metrics[case.task.metric.name] == value
    assert metrics["ci95/value_low"] <= value <= metrics["ci95/value_high"]


@every
def test_a_loss_is_within_a_wide_limit_and_beyond_a_narrow_one(case):
    comparison = compare(case, 0.5)
    metric, items = case.task.metric, comparison.model.total
    drop = case.task.metrics(comparison)["drop"]
    assert drop > 0
    limits, paired = (0.01 * drop, drop, 2 * drop + 0.3), comparison.paired
    margins = [paired.margin(metric, limit, items) for limit in limits]
    narrow, same, wide = (margin.p_within for margin in margins)
    assert narrow > 0.5 > wide
    assert 0.05 < same < 0.95
    assert margins[0].p_beyond < 0.5 < margins[2].p_beyond
    assert margins[0].items_needed(items, 0.05) < margins[1].items_needed(items, 0.05)


@every
def test_a_worse_model_is_distinguished(case):
    comparison = compare(case, 3.0)
    metrics = case.task.metrics(comparison)
    assert metrics["drop"] > 0
    if case.task.name in ("agreement", "deviation"):  # FP32 is the reference, and not measured
        unmeasured = ("baseline/", "paired/p_value", "ci95/delta")
        assert not [key for key in defined(metrics) if key.startswith(unmeasured)]
    else:
        assert metrics["paired/p_value"] < 0.01
        low, high = metrics["ci95/delta_low"], metrics["ci95/delta_high"]
        assert low <= comparison.delta <= high
        assert not low <= 0 <= high
    better = compare(case, 0.05)
    p_value = comparison.paired.model.against(better.paired.model)[1]
    assert p_value == better.paired.model.against(comparison.paired.model)[1] < 0.01
    # whose raw outputs are out
    reduced = ("detection", "keypoints", "instance_segmentation", "segmentation")
    reduced = (*reduced, "ctc", "perplexity")
    if case.task.name not in ("binary", *reduced):
        assert comparison.sqnr_db < better.sqnr_db


# The consumers of a loss: each decides by it whether a model is within a limit.


def family_of(case: Case, comparison: Comparison) -> Family:
    metrics, tags = defined(case.task.metrics(comparison)), {"status": "ok"}
    record = RunRecord.of(
        "run", {"dtype": "int8"} | params_of(case), metrics | {"size_bytes": 1}, tags
    )
    return Family((Cell(record, "model", comparison.paired),))


def searches(case: Case, comparison: Comparison, limits: ReportConfig) -> bool:
    """As `nodes_to_exclude=auto` and `precision.plan=auto` do, which take the limit as a number."""
    evaluator, limit = mock.Mock(task=case.task), case.task.metric.limit(limits)
    evaluator.compare.return_value.comparison = comparison
    samples = SimpleNamespace(groups=CLIPS)  # so that all are scored
    tried = try_choice(evaluator, None, samples, limit, None)
    return tried.drop <= limit and tried.p < 0.5


def checks_a_file(case: Case, comparison: Comparison, limits: ReportConfig) -> bool:
    data = mock.MagicMock()
    data.train.__len__.return_value = 1
    with mock.patch.object(file_check, "find_cause", return_value="") as find_cause:
        evaluator: Any = SimpleNamespace(task=case.task)
        config: Any = SimpleNamespace(report=limits)
        file_check.check_against_fp32(evaluator, data, Path(), comparison, config, Path())
    return not find_cause.called


def judges(case: Case, comparison: Comparison, limits: ReportConfig) -> bool:
    return judged_of(family_of(case, comparison), limits)["run"].startswith(PASS)


def recommends(case: Case, comparison: Comparison, limits: ReportConfig) -> bool:
    family = family_of(case, comparison)
    return bool(ModelSelection(verdicts.assess(family, limits)).within)


def searches_steps(case: Case, comparison: Comparison, limits: ReportConfig) -> bool:
    [record], limit = family_of(case, comparison).records, case.task.metric.limit(limits)
    tried = search.measure(Step("onnx", "start", {}, "", ""), record, 1.0)
    return tried.loss + tried.error <= limit


CONSUMERS = (searches, checks_a_file, judges, recommends, searches_steps)


@every
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_every_consumer_has_the_loss_in_the_unit_of_the_limit(case, consumer):
    """The limit lies between the losses of a good and of a bad model."""
    metric, noise = case.task.metric, 0.5 if case.task.name == "binary" else 0.1  # its AUC is 1
    good, bad = compare(case, noise), compare(case, 3.0)
    limit = 0.3 * bad.loss()
    if metric.bounded and consumer is judges:  # a narrow limit needs more items than these
        limit = 0.9 * bad.loss()
    if metric.limit_key == "min_sqnr_db":  # so that a ratio of amplitudes would be beyond it
        limit = 5 * good.loss()
        limits = ReportConfig(max_drop=1e-9, min_sqnr_db=-10 * math.log10(limit))
    else:
        limits = ReportConfig(max_drop=limit, min_sqnr_db=99.0)
    assert metric.limit(limits) == pytest.approx(limit)
    assert consumer(case, good, limits)
    assert not consumer(case, bad, limits)


@every
def test_noisier_outputs_lose_more(case):
    pairs = [compare(case, noise) for noise in (0.0, 0.3, 1.0, 4.0)]
    losses = [pair.loss() for pair in pairs]
    assert losses == [case.task.metrics(pair)["drop"] for pair in pairs] == sorted(losses)
    assert losses[0] == 0 < losses[-1]


@every
def test_an_output_that_answers_nothing_is_named(case):
    exact, noisy = case.outputs(0.0), case.outputs(1.0)
    names = [f"output {number}" for number, _ in enumerate(exact.values)]
    find = case.task.scope.find_silent
    assert find(names, exact, exact) == find(names, noisy, exact) == ""
    zero = replace(exact, values=tuple(np.zeros_like(values) for values in exact.values))
    assert "zero for every sample" in find(names, zero, exact)
    same = replace(exact, values=tuple(np.repeat(v[:1], ITEMS, axis=0) for v in exact.values))
    assert "the same for every sample" in find(names, same, exact)
    assert find(names, same, same) == ""  # as FP32's


def test_few_samples_with_most_of_the_signal_do_not_hide_a_network_that_answers_nothing():
    """The mean error of zeros is 20%, and the samples decide nothing."""
    signal = np.full((100, 4), 0.1, np.float32)
    signal[0] = 5
    exact, zero = (Outputs((values,), None, VALUES) for values in (signal, 0 * signal))
    case = Case(deviation.build(("scores",)), Targets(), lambda noise: zero if noise else exact)
    comparison = compare(case, 1.0)
    [cell] = family_of(case, comparison).cells
    [run] = verdicts.assess(Family((cell,)), ReportConfig()).records
    assert (run.verdict, comparison.loss()) == (UNDECIDED, 1.0)
    cell = amend(cell, params={"silent": case.task.scope.find_silent(("scores",), zero, exact)})
    judged = judged_of(Family((cell,)))
    assert judged == {"run": "fail, output scores is zero for every sample"}


@every
@pytest.mark.parametrize("seed", [0, 1])
def test_the_order_of_the_samples_does_not_matter(case, seed):
    order = np.random.default_rng(seed).permutation(ITEMS)
    task, targets = case.task, case.targets
    labels, groups = (
        None if array is None else array[order] for array in (targets.labels, targets.groups)
    )
    shuffled = Targets(labels, groups, lambda part: WINDOWS[order][part])

    def shuffle(outputs: Outputs) -> Outputs:
        return Outputs(tuple(values[order] for values in outputs.values), None, outputs.final)

    other = task.compare(*(task.score(shuffle(case.outputs(n)), shuffled) for n in (0.5, 0.0)))
    comparison = compare(case, 0.5)
    assert other.model.value == pytest.approx(comparison.model.value, rel=1e-6)
    assert other.delta == pytest.approx(comparison.delta, rel=1e-4, abs=1e-9)
    expected, metrics = (
        defined(pair.model.more() | task.pair_metrics(pair)) for pair in (comparison, other)
    )
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)


@every
def test_kept_values_read_back(case, tmp_path):
    """A report made later tests runs against each other as one made now would."""
    runs = [compare(case, noise) for noise in (0.5, 0.7)]
    kept = []
    for number, comparison in enumerate(runs):
        path = tmp_path / f"{number}.npz"
        np.savez_compressed(path, **case.task.files.arrays(comparison))
        with np.load(path, allow_pickle=False) as arrays:
            kept.append(read_pair(case.task.test, arrays))
    model, other = (run.paired.model for run in runs)
    assert kept[0].model.against(kept[1].model) == model.against(other)
    assert kept[0].by_class(2) == runs[0].paired.by_class(2)
    with pytest.raises((KeyError, ValueError)):
        read_pair(case.task.test, {"predictions": np.zeros((2, 2)), "scores": np.zeros(1)})


@pytest.mark.parametrize(
    "case",
    [case for case in CASES.values() if case.task.test.sequential],
    ids=lambda c: c.task.name,
)
def test_a_run_that_stopped_early_is_read_back_with_its_plan(case):
    stopped = stop(compare(case, 0.5), StoppingPlan(2 * ITEMS, 0.05, 0.05))
    pair = read_pair(case.task.test, case.task.files.arrays(stopped))
    assert pair.metrics() == stopped.paired.metrics() != {}
    assert pair.margin(case.task.metric, 0.02, ITEMS).p_within == stopped.p_within(0.02)
    assert case.task.metrics(stopped).keys() > case.task.metrics(compare(case, 0.5)).keys()


@every
def test_a_report_recalls_the_task_from_the_params(case):
    recalled = registry.recall(params_of(case), case.task.class_names)
    assert recalled.name == case.task.name
    assert replace(recalled.metric, title="") == replace(case.task.metric, title="")
    # Their classes are in the run's files.
    in_files = (
        *("detection", "keypoints", "instance_segmentation", "segmentation", "multilabel"),
        "tokens",
    )
    in_report = case.task.name not in in_files
    assert recalled.class_names == (case.task.class_names if in_report else ())


@every
def test_every_task_draws_its_figures_and_fills_its_tables(case):
    comparison = compare(case, 0.5)
    figures = case.task.files.figures(comparison, "title $ with \\frac{")
    assert list(figures) == list(case.task.files.captions)
    for rows in case.task.files.tables(comparison).values():
        assert len({len(row) for row in rows}) == 1
    assert case.task.metric.show(comparison.model.value) in case.task.summary(comparison)


@pytest.mark.parametrize("name", ["no such task", "../x"])
def test_a_store_cannot_name_code(name):
    with pytest.raises(TrackingError, match="scored_as: "):
        registry.recall({"scored_as": name})
    with pytest.raises(TrackingError, match="scored_as: "):
        registry.recall({"scored_as": "regression", "task.primary": "__import__"})


@every
def test_a_model_without_changes_passes_where_a_worse_one_does(case):
    """Items that change a little show no more of rare losses than items without a change."""
    metric = case.task.metric
    same = compare(case, 0.0)
    for noise in (1e-4, 1e-3, 1e-2):
        worse = compare(case, noise)
        if worse.loss() < 0:
            continue
        for limit in (0.002, 0.01, 0.03, 0.1):
            margins = [one.paired.margin(metric, limit, one.model.total) for one in (same, worse)]
            passes = [margin.p_within <= SIGNIFICANCE for margin in margins]
            assert passes[0] >= passes[1], (noise, limit)
