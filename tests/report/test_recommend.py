"""The choices, from sweeps made by hand."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.report import recommend as recommending
from resnet8ptq.report.answer import UNKNOWN_SPEED, explain
from resnet8ptq.report.families import Cell, Family
from resnet8ptq.report.pages import page
from resnet8ptq.report.recommend import (
    ModelSelection,
    recommend,
    why_none,
)
from resnet8ptq.report.verdicts import UNDECIDED
from resnet8ptq.tasks.scoring.hits import Hits
from resnet8ptq.tasks.scoring.values import Paired
from tests.helpers.cells import amend_family, predictions, record, sweep
from tests.helpers.selections import best_of, by_use, chosen, select


def other_choice(selected: ModelSelection) -> str:
    return " ".join(recommending.other_choice(selected))


def test_the_best_names_the_models_shown_as_good_and_apart_those_not_known():
    result = by_use(
        ("best", predictions(won=10), {}),
        ("same", predictions(won=10), {"calib": "entropy"}),
        ("near", predictions(won=8), {"calib": "mse"}),
        ("far", predictions(lost=40), {"calib": "percentile"}),
        limits=ReportConfig(max_drop=0.03),
    )
    choice = result["best accuracy"]
    assert chosen(choice) == "best"
    assert [cell.record.run_id for cell in choice.equals] == ["same", "near"]
    assert choice.equals_mean == "shown to be at most 1.5 points worse than the best"
    assert choice.unknown == ()  # "far" is shown to be worse
    strict = by_use(
        ("best", predictions(won=10), {}),
        ("near", predictions(won=8), {"calib": "mse"}),
        ("far", predictions(lost=40), {"calib": "percentile"}),
        limits=ReportConfig(max_drop=0.01),
    )["best accuracy"]
    assert strict.equals == ()  # 1,000 images prove no 0.5 points
    assert [cell.record.run_id for cell in strict.unknown] == ["near"]


def test_balanced_is_the_smallest_model_shown_as_good_as_the_best():
    cells = [
        ("best", predictions(won=10), {"size_bytes": 100_000.0}),
        ("good", predictions(won=8), {"calib": "mse", "size_bytes": 60_000.0}),
        ("slow", predictions(won=9), {"calib": "kl", "size_bytes": 60_100.0}),
        ("worse", predictions(lost=25), {"calib": "entropy", "size_bytes": 50_000.0}),
    ]
    times = {"best": 1.0, "good": 1.0, "slow": 2.0, "worse": 1.0}
    timed = [(name, model, more | {"latency_p50_ms": times[name]}) for name, model, more in cells]
    result = by_use(*timed, limits=ReportConfig(max_drop=0.05))
    assert chosen(result["balanced"]) == "good"
    assert [cell.record.run_id for cell in result["balanced"].equals] == ["best", "slow"]
    assert result["balanced"].use == "balanced"
    assert chosen(result["smallest"]) == "worse"  # within the limit against FP32
    strict = by_use(*timed, limits=ReportConfig(max_drop=0.005))
    assert "balanced" not in strict or chosen(strict["balanced"]) == "best"


def test_of_equals_at_the_top_the_faster_and_smaller_is_chosen():
    same = predictions(won=10)
    slow, quick = {"latency_p50_ms": 2.0}, {"latency_p50_ms": 1.02}
    result = by_use(
        ("first", same, {**slow, "size_bytes": 50_000.0}),
        ("fast", same, {"latency_p50_ms": 1.0, "size_bytes": 90_000.0, "calib": "entropy"}),
        ("both", same, {**quick, "size_bytes": 80_000.0, "calib": "mse"}),
        ("worse", predictions(won=9), {"latency_p50_ms": 0.1, "calib": "percentile"}),
    )
    assert chosen(result["best accuracy"]) == "both"


def test_the_smallest_is_the_most_accurate_of_those_of_its_size():
    result = by_use(
        ("bytes", predictions(lost=2), {"size_bytes": 100_000.0}),
        ("better", predictions(won=2), {"size_bytes": 100_008.0, "calib": "entropy"}),
    )
    assert chosen(result["smallest"]) == "better"


def test_the_best_is_chosen_apart_from_what_is_reported():
    """The first is better on the test images, the second on the selection samples."""
    family = sweep(
        ("lucky", predictions(won=12), {"size_bytes": 100_000.0}),
        ("sound", predictions(won=2), {"calib": "entropy", "size_bytes": 90_000.0}),
        choices=[predictions(), predictions(won=5)],
    )
    selected = select(family)
    recommended, best, balanced, smallest = recommend(selected)
    assert chosen(recommended) == chosen(best) == chosen(balanced) == chosen(smallest) == "sound"
    assert best.because.startswith("90.20%, against FP32 +0.20 points")
    assert best.because.endswith("; 90.50% on the selection samples")
    sentence = other_choice(selected)
    assert "On the reported samples the best is onnx int8 minmax per tensor: 91.20%" in sentence
    same = select(sweep(("a", predictions(), {}), choices=[predictions()]))
    assert "The reported samples would give the same choice" in other_choice(same)
    alone = other_choice(select(sweep(("a", predictions(), {}))))
    assert alone.startswith("The best models are chosen on the reported samples; ")
    assert alone.endswith("results are probably too good.")


def test_smallest_passes_on_the_samples_to_choose_by():
    """A loss of 1.6 points is within 2 as measured, and not shown to be, in the table either."""
    cells = (
        ("large", predictions(lost=16), {"size_bytes": 110_000.0}),
        ("small", predictions(lost=16), {"size_bytes": 90_000.0, "calib": "entropy"}),
    )
    lost = predictions(lost=16)
    assert chosen(by_use(*cells, choices=[predictions(), lost])["smallest"]) == "large"
    # Without any that passes, what is within as measured.
    assert chosen(by_use(*cells, choices=[lost, lost])["smallest"]) == "small"
    beyond = predictions(lost=30)
    assert "smallest" not in by_use(*cells, choices=[beyond, beyond])


def test_a_loss_as_measured_of_just_the_limit_is_within_it():
    family = sweep(("a", predictions(), {}), choices=[predictions(lost=16)])
    loss = family.measured[0].metric("choice/drop")
    assert "smallest" in {r.use for r in recommend(select(family, limits=ReportConfig(loss)))}
    less = ReportConfig(np.nextafter(loss, 0))
    assert "smallest" not in {r.use for r in recommend(select(family, limits=less))}


def test_the_smallest_names_those_within_a_twentieth_of_its_size():
    sizes = {"least": 100_000.0, "edge": 105_000.0, "over": 105_001.0}
    result = by_use(*[(n, predictions(), {"size_bytes": v, "seed": n}) for n, v in sizes.items()])
    smallest = result["smallest"]
    assert chosen(smallest) == "least"
    assert [cell.record.run_id for cell in smallest.equals] == ["edge"]
    assert smallest.equals_mean == "size within 5%"
    assert smallest.because == "100.0 kB, 66.7% less than FP32, at 90.00%"


def test_a_file_larger_than_fp32_is_said_to_be():
    smallest = by_use(("a", predictions(), {"size_bytes": 330_000.0}))["smallest"]
    assert smallest.because == "330.0 kB, 10.0% more than FP32, at 90.00%"


def test_where_nothing_passes_to_choose_by_the_summary_says_so():
    for lost, words in (
        (16, "with a measured loss within the limit"),
        (30, "Therefore the smallest and the fastest cannot be chosen"),
    ):
        family = sweep(("a", predictions(), {}), choices=[predictions(lost=lost)])
        assert words in page.to_markdown([select(family)], {})


def test_the_report_counts_models_whose_results_are_lost_in_the_correction():
    files = [{"artifact_sha256": digit * 64} for digit in "abc"]
    cells = [("a", predictions(), files[0]), ("b", predictions(lost=90), files[1])]
    family = sweep(*cells, choices=[predictions(), predictions(lost=90)])
    other = record("c", predictions(), **files[2]).as_failed("no predictions.npz")
    family = replace(family, cells=(*family.cells, Cell(other, "c", lost=True)))
    text = page.to_markdown([select(family)], {})
    assert "for 1 recommended model, in the table of all runs for 3" in text


def test_what_fails_is_not_recommended():
    result = by_use(
        ("best", predictions(won=10), {"size_bytes": 110_000.0}),
        ("tiny", predictions(lost=100), {"size_bytes": 10_000.0, "calib": "percentile"}),
    )
    assert chosen(result["smallest"]) == "best"
    assert recommend(select(sweep(("a", predictions(lost=100), {})))) == []
    below = ReportConfig(max_drop=0.02, min_accuracy=0.95)
    assert recommend(select(sweep(("a", predictions(), {})), limits=below)) == []
    # Nor where there are selection samples, and it is good on those; nor is its choice told.
    apart = select(sweep(("a", predictions(lost=100), {}), choices=[predictions()]))
    assert recommend(apart) == []
    assert other_choice(apart) == ""


def test_what_fails_is_a_candidate_only_beside_samples_to_choose_by():
    cells = (("good", predictions(), {}), ("bad", predictions(lost=100), {"calib": "mse"}))
    for number, kept in ((0, ["good"]), (1, ["good"]), (2, ["good", "bad"])):
        choices = [predictions()] * number  # with one, not all have such samples
        candidates = select(sweep(*cells, choices=choices)).candidates
        assert [cell.record.run_id for cell in candidates] == kept


def test_what_is_reported_does_not_choose():
    """The best on the selection samples is shown with its verdict, though it fails."""
    family = sweep(
        ("unlucky", predictions(lost=60), {}),
        ("other", predictions(), {"calib": "entropy"}),
        choices=[predictions(won=5), predictions()],
    )
    best = best_of(select(family))
    assert (chosen(best), best.verdict) == ("unlucky", "fail, accuracy < 85.00%")


@pytest.mark.parametrize(
    ("key", "value", "messages"),
    [
        ("nodes_to_exclude", "auto", True),
        ("precision.plan", "auto", True),
        ("method", "qat", True),
        ("method", "ptq", False),
    ],
)
def test_runs_that_have_chosen_by_the_same_samples_are_reported(key, value, messages):
    cells = (("a", predictions(), {}), ("b", predictions(), {key: value}))
    said = other_choice(select(sweep(*cells, choices=[predictions(), predictions()])))
    words = " Runs with nodes_to_exclude=auto, precision.plan=auto or method=qat tuned their"
    assert (f"do not use.{words}" in said) is messages


def test_a_run_that_tuned_on_training_samples_is_not_favoured_by_half_of_the_test_samples():
    halved = {"chosen_by": "500 of the test samples"}
    cells = (("a", predictions(), halved), ("b", predictions(), {"method": "qat", **halved}))
    said = other_choice(select(sweep(*cells, choices=[predictions(), predictions()])))
    assert "chosen on 500 of the test samples" in said and "tuned their" not in said


def test_the_samples_that_choose_are_reported_by_their_name():
    for named, words in (({"chosen_by": "500 images"}, "500 images"), ({}, "other samples")):
        selected = select(sweep(("a", predictions(), named), choices=[predictions()]))
        assert other_choice(selected) == (
            f"The best are chosen on {words}, which the reported figures do not use. "
            "The reported samples would give the same choice."
        )


def test_samples_that_fp32_knows_are_reported():
    for known, messages in ((0.99, True), (0.91, False)):
        family = sweep(("a", predictions(), {}), choices=[predictions()])
        family = amend_family(family, metrics={"choice/baseline/accuracy": known})
        said = other_choice(select(family))
        assert (
            " FP32 has 99.00% on the selection samples and 90.00% on the reported ones" in said
        ) is messages


def test_the_other_choice_is_the_best_on_the_reported_samples_wherever_it_stands():
    cells = (("a", predictions(), {}), ("b", predictions(won=5), {"calib": "entropy"}))
    said = other_choice(select(sweep(*cells, choices=[predictions(won=5), predictions()])))
    assert "On the reported samples the best is onnx int8 entropy per tensor: 90.50%" in said


def test_an_undecided_model_with_a_measured_loss_beyond_the_limit_is_not_within_it():
    selected = select(sweep(("a", predictions(lost=22), {})))
    assert [cell.record.run_id for cell in selected.candidates] == ["a"]
    assert selected.within == []


def test_a_change_that_is_not_known_is_not_reported():
    family = sweep(("a", predictions(), {}))
    del family.measured[0].record.metrics["baseline/accuracy"]
    assert best_of(select(family)).because == "90.00%"


def test_best_of_each_framework_where_there_are_several():
    result = by_use(("a", predictions(), {}), ("b", predictions(lost=5), {"backend": "torch"}))
    assert chosen(result["best accuracy in torch"]) == "b"
    assert "best accuracy in onnx" not in by_use(("a", predictions(), {}))


def test_recommendations_name_their_keys_and_the_command_that_deploys_them():
    elsewhere = {"backend": "torch", "tracking.root": "my runs", "tracking.uri": "null"}
    result = by_use(("a", predictions(), {}), ("b", predictions(lost=5), elsewhere))
    keys = {item.use: item for item in result.values()}
    assert {"best", "smallest", "best_onnx", "best_torch"} <= set(keys)
    assert keys["best"].command == "python -m resnet8ptq deploy run_id=a"
    assert keys["best_torch"].command == "python -m resnet8ptq deploy run_id=b 'root=my runs'"


def test_a_command_says_where_the_run_is_unless_it_is_where_runs_are():
    usual = {"tracking.root": "mlruns", "tracking.experiment_name": "resnet8ptq"}
    best = by_use(("a", predictions(), {**usual, "tracking.uri": "null"}))["best accuracy"]
    assert best.command == "python -m resnet8ptq deploy run_id=a"
    other = {"tracking.uri": "http://host:5000", "tracking.experiment_name": "pets"}
    best = by_use(("a", predictions(), other))["best accuracy"]
    expected = "python -m resnet8ptq deploy run_id=a uri=http://host:5000 experiment=pets"
    assert best.command == expected


def test_frameworks_are_reported_in_the_order_of_their_names():
    names = ("torch", "c", "onnx", "b", "tflite", "a")
    result = by_use(*((name, predictions(), {"backend": name}) for name in names))
    keys = [item.use for item in result.values()]
    assert [key for key in keys if key.startswith("best_")] == [
        f"best_{name}" for name in sorted(names)
    ]


def test_why_nothing_is_recommended():
    family = sweep(("a", predictions(lost=100), {}))
    lines = why_none(select(family, limits=ReportConfig(min_accuracy=0.95)))
    assert "report.max_drop=0.01, report.min_accuracy=0.95" in lines[0]
    assert lines[1] == "FP32 itself has 90.00%, less than report.min_accuracy."
    assert lines[2].startswith(
        "To reduce the loss, try per_channel=true, another calibration (calib=), "
    )
    enough = why_none(select(family, limits=ReportConfig(min_accuracy=0.9)))  # of FP32
    assert not any(line.startswith("FP32 itself") for line in enough)
    kept = select(sweep(("a", predictions(), {"per_channel": "true"})))
    assert len(why_none(kept)) == 1


def test_advice_is_only_for_what_was_not_tried():
    cells = (
        ("a", predictions(lost=100), {}),
        ("b", predictions(lost=100), {"per_channel": "true"}),
    )
    lost = select(sweep(*cells))
    advice = why_none(lost)[1]
    assert advice.startswith("To reduce the loss, try another calibration")
    some = select(sweep(cells[0], ("c", predictions(), {"per_channel": "true"})))
    assert len(why_none(some)) == 1


def test_fp32_is_reported_only_where_it_has_less_than_is_asked():
    cells = [
        (name, predictions(), {"seed": name, "baseline/accuracy": value})
        for name, value in (("a", 0.9), ("b", 0.8), ("c", 0.95), ("d", 0.85))
    ]
    asked = ReportConfig(max_drop=0.02, min_accuracy=0.95)
    _, *messages = why_none(select(sweep(*cells), limits=asked))
    assert [line.split()[3] for line in messages] == ["80.00%,", "85.00%,", "90.00%,"]
    (line,) = why_none(select(sweep(*cells), limits=ReportConfig(max_drop=0.02)))
    assert "(report.max_drop=0.02)" in line


def test_what_ran_on_no_integer_kernels_is_never_recommended():
    assert recommend(select(sweep(("a", predictions(), {"execution": "simulated"})))) == []
    (first, *_) = recommend(select(sweep(("a", predictions(), {"execution": "integer"}))))
    assert chosen(first) == "a"


def test_files_for_npus_are_recommended_where_nothing_runs_on_this_cpu():
    """Their speed is reported as unknown; a model that runs here is preferred to them."""
    npu = {"execution": "simulated", "dtype": "w8a16"}
    alone = select(sweep(("npu", predictions(), npu)))
    assert chosen(recommend(alone)[0]) == "npu"
    (answer,) = explain(alone)
    assert UNKNOWN_SPEED in answer.facts
    assert not any("fastest" in use for use in answer.uses)
    text = page.to_markdown([alone], {})
    assert "These files are for an NPU." in text and "measured as deployed" not in text
    beside = select(sweep(("npu", predictions(), npu), ("here", predictions(lost=3), {})))
    assert {chosen(item) for item in recommend(beside)} == {"here"}


@pytest.mark.parametrize("low", [-0.012, None])
def test_a_loss_is_reported_with_its_interval(low):
    ends = {} if low is None else {"ci95/delta_low": low, "ci95/delta_high": 0.01}
    result = by_use(("a", predictions(lost=3), ends))["best accuracy"]
    interval = "" if low is None else ", 95% interval -1.20 to +1.00"
    assert result.because == f"89.70%, against FP32 -0.30 points{interval}"
    assert result.verdict == "pass"


def test_ties_at_the_top_are_reported():
    result = by_use(("a", predictions(), {"expected_accuracy": 0.92}))["best accuracy"]
    assert result.because.startswith("90.00% (92.00% with ties at the top broken at random)")


def by_kl(**values: float) -> list[tuple[str, np.ndarray, dict[str, Any]]]:
    """Return runs with these KL divergences on the selection samples, by name."""
    return [
        (name, predictions(), {"choice/kl_divergence": kl, "calib": name})
        for name, kl in values.items()
    ]


def test_outputs_that_are_not_finite_are_chosen_last():
    cells = by_kl(broken=math.nan, whole=0.01)
    assert chosen(best_of(select(sweep(*cells, choices=[predictions()] * 2)))) == "whole"


def test_of_models_near_the_best_the_one_closest_to_fp32_is_chosen():
    """Two standard errors: 5 more lost images of 5 are beyond them, 3 of 3 are not."""
    cells = by_kl(lucky=0.02, close=0.01, worse=0.001)
    choices = [predictions(won=5), predictions(won=2), predictions()]
    selected = select(sweep(*cells, choices=choices))
    assert chosen(best_of(selected)) == "close"
    assert "Among the models within 2 paired standard errors of" in other_choice(selected)
    assert "chosen (lowest KL)" in other_choice(selected)
    # A store of before has no KL divergence on these samples.
    old = [(name, model, {"seed": name}) for name, model, _ in cells]
    assert chosen(best_of(select(sweep(*old, choices=choices)))) == "lucky"


def test_a_kl_divergence_within_a_twentieth_leaves_the_choice_to_speed():
    kl = "choice/kl_divergence"
    cells = [
        ("slow", predictions(), {kl: 0.0100, "latency_p50_ms": 2.0}),
        ("fast", predictions(), {kl: 0.0104, "latency_p50_ms": 1.0, "calib": "mse"}),
        ("far", predictions(), {kl: 0.0106, "latency_p50_ms": 0.5, "calib": "entropy"}),
    ]
    assert chosen(best_of(select(sweep(*cells, choices=[predictions()] * 3)))) == "fast"


def test_recommended_models_are_judged_as_a_family_of_their_own():
    """Four lost images of 1,000 prove a point for one model, and not for one of twenty."""
    near = predictions(lost=4)
    cells = [(str(n), near, {"seed": str(n), "size_bytes": 1e5 + n * 1e4}) for n in range(20)]
    limits, choices = ReportConfig(), [predictions(won=5), *[predictions()] * 19]
    selected = select(sweep(*cells, choices=choices), limits=limits)
    assert {record.verdict for record in selected.family.records} == {"undecided"}
    best = best_of(selected)
    assert (chosen(best), best.verdict) == ("0", "pass")
    # Chosen on the reported samples it is one of twenty.
    same = recommend(select(sweep(*cells), limits=limits))[0]
    assert same.verdict.startswith("undecided")


def test_runs_with_other_samples_to_choose_by_are_compared_unpaired():
    """As with other calibration draws, from which these samples lie apart."""
    cells = by_kl(best=0.03, near=0.02, far=0.01)
    family = sweep(*cells, choices=[predictions(won=9), predictions(), predictions(lost=60)])
    others = [family.cells[0]]
    for cell in family.cells[1:]:
        assert cell.choice is not None
        model, baseline = cell.choice.model, cell.choice.baseline
        assert isinstance(model, Hits) and isinstance(baseline, Hits)
        fewer = (Hits(v.predictions[:-10], v.labels[:-10]) for v in (model, baseline))
        others.append(replace(cell, choice=Paired(*fewer)))
    assert chosen(recommend(select(Family(tuple(others))))[0]) == "near"


def test_a_model_that_no_correction_lets_pass_may_pass_by_itself():
    """Four lost images of 1,000 prove a point for one model, and not for one of twenty."""
    near = predictions(lost=4)
    cells = [(str(n), near, {"seed": str(n), "size_bytes": 1e5 + n * 1e4}) for n in range(20)]
    limits = ReportConfig()
    apart = select(sweep(*cells, choices=[predictions()] * 20), limits=limits)
    assert {cell.record.verdict for cell in apart.family.measured} == {UNDECIDED}
    assert apart.headline.advice == "deploy"
    assert apart.headline.reason.endswith("not corrected for the other models")
    together = select(sweep(*cells), limits=limits)
    assert together.headline.advice == "test"


def test_a_faster_model_that_passes_in_the_table_is_the_headline():
    """On the selection samples, its measured loss is within the limit, but not shown to be."""
    times = {"latency_p50_ms": 2.0, "baseline/latency_p50_ms": 1.0, "size_bytes": 90_000.0}
    cells = (
        ("slow", predictions(), times),
        ("fast", predictions(), {**times, "latency_p50_ms": 0.5, "size_bytes": 95_000.0}),
    )
    selected = select(sweep(*cells, choices=[predictions(), predictions(lost=16)]))
    assert selected.headline.cell.record.run_id == "fast"
    uses = {use.use: use for use in selected.recommendations}
    assert chosen(uses["fastest"]) == "fast"
    assert chosen(uses["smallest"]) == "slow"
    assert uses["fastest"].verdict == "pass"


def test_few_samples_let_the_confirmed_model_be_recommended():
    """The steps chose on the reported samples: `deploy` after `ship` found no recommendation."""
    step = {"evaluate.split": "choice", "artifact_sha256": "same"}
    cells = (
        ("other", predictions(lost=2), {"evaluate.split": "choice", "calib": "mse"}),
        ("step", predictions(), step),
        ("confirmed", predictions(), {**step, "evaluate.split": "test"}),
    )
    selected = select(sweep(*cells))
    (recommended, *_) = recommend(selected)
    assert chosen(recommended) == "confirmed"
    assert len(selected.family.models) == 2  # verdicts are corrected for all models that chose
    steps = select(sweep(*cells[:2]))
    assert recommend(steps) == []
    assert why_none(steps)[0].startswith("These are the selection samples")


def test_a_file_that_gains_nothing_does_not_hide_one_that_passes():
    """The small file passes on the reported samples; on the selection samples it only may."""
    cells = (
        ("large", predictions(), {"size_bytes": 310_000.0}),
        ("small", predictions(), {"size_bytes": 90_000.0, "calib": "entropy"}),
    )
    may_pass = predictions(lost=16)
    selected = select(sweep(*cells, choices=[predictions(), may_pass]))
    assert selected.headline.advice == "deploy"
    assert selected.headline.cell.record.run_id == "small"
    beyond = select(sweep(*cells, choices=[predictions(), predictions(lost=30)]))
    assert beyond.headline.advice == "keep"  # FP32, instead of the large file


def test_a_file_that_only_may_pass_does_not_hide_one_that_passes():
    cells = (
        ("doubtful", predictions(lost=16), {"size_bytes": 90_000.0}),
        ("sound", predictions(), {"size_bytes": 95_000.0, "calib": "entropy"}),
    )
    selected = select(sweep(*cells, choices=[predictions(), predictions(lost=16)]))
    assert selected.headline.advice == "deploy"
    assert selected.headline.cell.record.run_id == "sound"


def test_a_file_that_gains_nothing_does_not_hide_one_to_test():
    """Neither passes on the reported samples; the large one passes on the selection samples."""
    undecided = predictions(lost=16)
    cells = (
        ("large", undecided, {"size_bytes": 310_000.0}),
        ("small", undecided, {"size_bytes": 90_000.0, "calib": "entropy"}),
    )
    selected = select(sweep(*cells, choices=[predictions(), undecided]))
    assert selected.headline.advice == "test"
    assert selected.headline.cell.record.run_id == "small"
