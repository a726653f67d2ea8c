"""The answer of a sweep: one sentence on the file to deploy, and its costs."""

import re
from dataclasses import replace

import pytest

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.evaluation.paired_latency import PairedLatency
from resnet8ptq.report import answer, families
from resnet8ptq.report.selection import select
from resnet8ptq.results import summaries
from resnet8ptq.sweeps import winner
from resnet8ptq.sweeps.delivery import Delivery
from tests.helpers.cells import predictions, sweep
from tests.helpers.pages import to_page

LIMITS = ReportConfig()


def answers_of(*runs: object, limits: ReportConfig = LIMITS) -> list[answer.Explanation]:
    (selected,) = select([sweep(*runs)], limits)
    return answer.explain(selected)


def test_a_model_that_passes_is_named_with_its_evidence():
    best, *_ = answers_of(("a", predictions(won=2), {}))
    assert best.label == "onnx int8 minmax per tensor"
    assert best.outcome == "pass"
    assert best.headline.startswith("Deploy onnx int8 minmax per tensor: ")
    assert best.verdict == (
        "At most 1 point worse than FP32, shown with 95% confidence on 1,000 samples."
    )
    assert best.command.endswith("deploy run_id=a")
    assert re.match(r"accuracy 90\.20% .*, FP32 90\.00%$", best.facts[0])


def test_a_better_result_of_another_model_is_explained():
    cells = (("a", predictions(won=2), {}), ("b", predictions(won=4), {"calib": "mse"}))
    family = sweep(*cells, choices=[predictions(won=1), predictions()])
    (selected,) = select([family], LIMITS)
    assert answer.explain(selected)[0].note.startswith(
        "Chosen on other samples. Another model has a better accuracy here, possibly by chance."
    )


@pytest.mark.parametrize(("size", "named"), [(8e4, True), (8.99e4, False)])
def test_a_smaller_model_that_is_as_good_is_named(size, named):
    cells = (
        ("a", predictions(), {"size_bytes": 9e4, "latency_p50_ms": 2.0}),
        ("b", predictions(), {"calib": "mse", "size_bytes": size, "latency_p50_ms": 1.0}),
    )
    family = sweep(*cells, choices=[predictions(won=9), predictions()])
    (selected,) = select([family], LIMITS)
    (best,) = [one for one in answer.explain(selected) if "best accuracy" in one.uses]
    sentence = (
        "onnx int8 mse per tensor is smaller, and shown to be at most 0.5 points worse than the "
        "best."
    )
    assert best.label == "onnx int8 minmax per tensor"
    assert (sentence in best.note) == named


def test_finalists_have_the_latencies_of_the_timing_in_turns():
    timing = PairedLatency({"a": [1.0, 1.0], "onnx fp32": [2.0, 2.0]}, {}, 32, 1)
    family = sweep(("a", predictions(won=2), {"latency_p50_ms": 9.0}))
    (selected,) = select([family], LIMITS, [timing])
    facts = answer.explain(selected)[0].facts
    assert "1.000 ms, 2.00 times as fast as FP32" in facts


@pytest.mark.parametrize(("ms", "begins"), [(2.1, "nothing here"), (1.0, "no model within")])
def test_a_fast_model_beyond_the_limit_does_not_make_the_hint_wrong(ms, begins):
    times = {"a": [2.2, 2.2], "b": [ms, ms], "onnx fp32": [2.0, 2.0]}
    timing = PairedLatency(times, {}, 32, 1)
    cells = (("a", predictions(won=2), {}), ("b", predictions(won=1), {"calib": "mse"}))
    family = sweep(*cells, choices=[predictions(), predictions(lost=90)])
    (selected,) = select([family], LIMITS, [timing])
    hint = answer.explain(selected)[0].hint
    assert hint.startswith(f"One sample at a time, {begins}")


@pytest.mark.parametrize(
    ("size", "ms", "gains"), [(330_000, 2.0, False), (330_000, 1.9, True), (200_000, 2.1, True)]
)
def test_a_model_that_is_neither_smaller_nor_faster_is_reported(size, ms, gains):
    timing = PairedLatency({"a": [ms, ms], "onnx fp32": [2.0, 2.0]}, {}, 32, 1)
    family = sweep(("a", predictions(won=2), {"size_bytes": float(size)}))
    (selected,) = select([family], LIMITS, [timing])
    best = answer.explain(selected)[0]
    assert ("neither clearly smaller nor faster than FP32" in best.headline) != gains
    assert best.headline.startswith("Deploy ") == gains
    assert ("recommended" in best.uses) == gains


@pytest.mark.parametrize(
    ("lost", "least", "begins"),
    [
        (8, None, "Test onnx int8 minmax per tensor on more samples"),
        (40, None, "Do not deploy onnx"),
        (1, 0.8995, "Do not deploy onnx"),
    ],
)
def test_a_model_that_does_not_pass_is_not_to_be_deployed(lost, least, begins):
    """The other model does not keep the limit on the selection samples."""
    cells = (("a", predictions(lost=lost), {}), ("b", predictions(lost=8, won=9), {"calib": "mse"}))
    kept = sweep(*cells, choices=[predictions(won=9), predictions(lost=90)])
    limits = ReportConfig(min_accuracy=least)
    [selected] = select([kept], limits)
    assert answer.explain(selected)[0].headline.startswith(begins)
    assert f"<b>{begins}" in to_page(kept, limits)


SILENT = {"silent": "output scores is zero for every sample"}
MODELS = {  # predictions, changes of params, least accuracy -> the outcome
    "pass": (predictions(won=2), {}, None, "pass"),
    "undecided": (predictions(lost=8), {}, None, "undecided"),
    "loss": (predictions(lost=40), {}, None, "fail"),
    "below the minimum": (predictions(lost=1), {}, 0.8995, "fail"),
    "undecided, below the minimum": (predictions(lost=8), {}, 0.8995, "fail"),
    "silent": (predictions(won=2), SILENT, None, "fail"),
    "void": (predictions(won=2), {"doubt": "FP32 NEAR CHANCE"} | SILENT, 0.99, "void"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_one_outcome_wherever_it_is_shown(name, tmp_path, capsys):
    model, changes, least, outcome = MODELS[name]
    cells = (("a", model, changes), ("b", predictions(), {"calib": "mse"}))
    family = sweep(*cells, choices=[predictions(won=9), predictions()])
    limits = ReportConfig(min_accuracy=least)
    [selected] = select([family], limits)
    run = summaries.summarize_sweep(family.records[0], [selected], {}, None).run("a")
    shown = {run.verdict, selected.family.records[0].verdict}
    shown.add(selected.family.records[0].verdict_text.split()[0].strip(","))
    shown |= {a.outcome for a in answer.explain(selected) if a.label == family.cells[0].label}
    alone = replace(selected, family=families.make_family(selected.family.cells[:1]))
    winner.announce([alone], Delivery(tmp_path), "fastest")
    shown.add("pass" if "Winner" in capsys.readouterr().out else outcome)
    assert shown == {outcome}
    assert all(
        a.headline.startswith("Deploy") == (a.outcome == "pass") for a in answer.explain(selected)
    )


def test_one_model_for_several_uses_is_one_answer():
    answers = answers_of(("a", predictions(won=2), {}), ("b", predictions(lost=30), {"seed": "2"}))
    assert len({a.label for a in answers}) == len(answers)
    assert {"best accuracy", "smallest"} <= {*answers[0].uses}


def test_an_undecided_model_names_the_sample_size_that_would_decide():
    undecided = predictions(lost=20, won=15)
    (best, *_) = answers_of(("a", undecided, {}))
    assert best.outcome == "undecided"
    assert re.search(r"^Undecided: 1,000 samples .* About [\d,]+ samples would", best.verdict)


def test_the_description_in_mlflow_escapes_text():
    text = answer.to_markdown(answers_of(("a", predictions(won=2), {"calib": "a|b<i>"})))
    assert r"a\|b\<i\>" in text
    assert len({line.replace(r"\|", "").count("|") for line in text.splitlines()[2:]}) == 1
    assert answer.to_markdown([]) == ""
