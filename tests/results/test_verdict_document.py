"""The verdict of sweeps made by hand: outcomes, JSON by the schema, Markdown."""

import json
import math
import re
import sys
from dataclasses import fields, replace
from typing import Any

import jsonschema
import pandas as pd
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from pydantic import ValidationError

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.core.errors import ConfigError, TrackingError
from resnet8ptq.report import equal_files
from resnet8ptq.report.families import Family, make_family
from resnet8ptq.report.recommend import find_use
from resnet8ptq.report.selection import select
from resnet8ptq.results import continuous_integration, document, summaries, to_frame
from resnet8ptq.results.continuous_integration import assess_run, assess_sweep
from resnet8ptq.results.document import Answer
from resnet8ptq.results.summaries import SweepSummary
from resnet8ptq.tracking.record import RunRecord
from tests.helpers.calling import REPO
from tests.helpers.cells import (
    amend_family,
    judged_of,
    predictions,
    record,
    sweep,
    unmeasured,
)

SCHEMA = json.loads((REPO / "docs/verdict.schema.json").read_text())
PARTS = SCHEMA["$defs"]
PARENT = RunRecord.of("5eed", {}, {}, {"mlflow.runName": "sweep", "status": "ok", "kind": "sweep"})
NASTY = (
    '</td><script>alert("1")</script> | $x$ [a](javascript:x) ![i](http://x/y.png) @octocat '
    "\r\n\r\n# head\n| e |\n\x1b[31mred\x1b]0;title\x07 \u202egnp.exe \u2028 \x00 \x7f \x9b31m "
    "`c` **d**"
)
SIGNS = ("\x1b", "\x07", "\x00", "\u202e", "\r", "\x7f", "\x9b", "\u2028")
PASSES, LOSES, UNSURE = predictions(), predictions(lost=40), predictions(lost=8, won=4)


def summarize(*families: Family, limits: ReportConfig | None = None) -> SweepSummary:
    """Return the summary of a sweep made by hand, each run with an artifact."""
    selections = select(families, limits or ReportConfig())
    artifacts: dict[str, str | None] = {
        record.run_id: "model.onnx" for family in families for record in family.records
    }
    return summaries.summarize_sweep(PARENT, selections, artifacts, "report.html")


def read(answer: Answer) -> dict[str, Any]:
    """Return the document, held to the schema."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")  # NaN, Infinity

    answered = json.loads(document.to_json(answer), parse_constant=refuse)
    jsonschema.Draft202012Validator(SCHEMA).validate(answered)
    assert isinstance(answered, dict)
    return answered


def judged(*cells: Any, limits: ReportConfig | None = None, use: str = "best") -> dict[str, Any]:
    return read(assess_sweep(summarize(sweep(*cells), limits=limits), use))


@pytest.mark.parametrize("split", ["test", "held_out", "choice"])
def test_the_schema_knows_each_kind_of_scored_samples(split):
    kinds = PARTS["Samples"]["properties"]["from"]
    run = record("a", predictions(), **{"evaluate.split": split})
    assert run.samples_from in kinds["enum"]


def test_the_schema_is_the_one_of_the_type():
    """If it is not: make schema."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert json.loads(document.to_schema()) == SCHEMA
    texts = [line for line in document.to_schema().splitlines() if '"description"' in line]
    assert len(texts) > 50  # of the fields


def test_the_page_has_every_key_and_every_field():
    words = set(re.findall(r"\w+", (REPO / "docs/verdict.md").read_text()))
    assert {item.name for item in fields(continuous_integration.Arguments)} <= words
    assert set(SCHEMA["properties"]) <= words
    for code in {0, 1, 2, *document.EXIT_CODES.values()}:
        assert f"\n| {code} |" in (REPO / "docs/verdict.md").read_text()


@pytest.mark.parametrize(
    ("model", "changes", "verdict", "code"),
    [
        (PASSES, {}, "pass", 0),
        (UNSURE, {}, "undecided", 4),
        (PASSES, {"grouped": "true"}, "undecided", 4),
        (LOSES, {}, "fail", 3),
        (PASSES, {"doubt": "NEAR CHANCE"}, "void", 4),
        (PASSES, {"execution": "simulated"}, "unsupported", 4),
        (LOSES, {"execution": "simulated"}, "fail", 3),
    ],
)
def test_verdict_and_exit_code(model, changes, verdict, code):
    summary = summarize(sweep(("a", model, changes)))
    answered = read(assess_sweep(summary))
    assert (answered["schema"], answered["verdict"], answered["exit_code"]) == (1, verdict, code)
    if verdict in ("pass", "undecided"):
        assert answered["choice"]["run_id"] == "a"
    else:  # nothing is recommended
        assert answered["choice"] is answered["loss"] is answered["size"] is None
        assert answered["because"]
    named = read(assess_run(summary.run("a")))
    assert named["choice"]["run_id"] == "a"
    assert named["verdict"] == (verdict if verdict != "unsupported" else "pass")
    assert named["sweep"] is named["use"] is None


def test_figures_are_those_of_the_report():
    """The same records, by the functions that the report calls."""
    family = sweep(
        ("a", predictions(lost=8, won=4), {"latency_p50_ms": 0.5, "speedup": 2.0}),
        ("b", predictions(lost=12, won=2), {"calib": "entropy", "size_bytes": 80_000.0}),
        ("c", LOSES, {"calib": "mse"}),
    )
    limits = ReportConfig(max_drop=0.02)
    (selected,) = select([family], limits)
    summary = summarize(family, limits=limits)
    words, adjusted = judged_of(family, limits), equal_files.adjusted_p(family.records)
    for cell, run in zip(selected.family.cells, summary.runs, strict=True):
        assert run.verdict_text == words[run.run_id]
        assert run.samples_needed == cell.record.samples_needed
        assert (run.label, run.p_value) == (cell.label, adjusted[run.run_id])
    assert [c.use for c in summary.choices] == [r.use for r in selected.recommendations]
    for recommended in selected.recommendations:
        answered = read(assess_sweep(summary, recommended.use))
        assert recommended.choice is not None
        record = recommended.choice.record
        assert answered["choice"]["run_id"] == record.run_id
        assert answered["because"] == recommended.because
        assert answered["commands"]["deploy"] == recommended.command
        assert answered["metric"]["value"] == record.metrics["accuracy"]
        assert answered["metric"]["fp32"] == record.metrics["baseline/accuracy"]
        assert answered["loss"]["value"] == record.loss
        assert answered["loss"]["limit"] == 0.02
        assert answered["size"] == {"bytes": record.size_bytes, "fp32_bytes": 300_000}
        assert answered["samples"]["scored"] == record.samples
    fastest = read(assess_run(summary.run("a")))
    assert (fastest["latency"]["ms"], fastest["latency"]["speedup"]) == (0.5, 2.0)


def test_numbers_that_were_not_measured_are_null():
    nan = float("nan")
    answered = judged(
        ("a", PASSES, {"latency_p50_ms": nan, "paired/p_value": nan, "speedup": math.inf})
    )
    assert answered["latency"] == {**dict.fromkeys(("ms", "fp32_ms", "speedup", "batch_ms", "cpu"))}
    assert answered["loss"]["difference_p_value"] is None
    failed = read(assess_run(summarize(sweep(("a", LOSES, {}))).run("a")))
    assert failed["samples"]["needed"] is None
    verge = judged(("a", predictions(lost=10), {}))  # more than a million would decide
    assert (verge["verdict"], verge["samples"]["needed"]) == ("undecided", None)


def test_below_the_least_accuracy_is_a_fail():
    limits = ReportConfig(min_accuracy=0.95)
    summary = summarize(sweep(("a", PASSES, {})), limits=limits)
    answered = read(assess_run(summary.run("a")))
    assert (answered["verdict"], answered["exit_code"], answered["loss"]["verdict"]) == (
        "fail",
        3,
        "pass",
    )
    assert answered["metric"]["least"] == 0.95
    text = document.to_markdown(assess_run(summary.run("a")))
    assert r"Fails: accuracy \< 95.00%." in text
    assert read(assess_sweep(summary))["verdict"] == "fail"


def test_a_misspelt_use_is_named_although_nothing_is_recommended():
    summary = summarize(sweep(("a", LOSES, {})))
    assert not summary.choices
    with pytest.raises(ConfigError, match=r"use: got 'smalest', .*nearest: smallest"):
        assess_sweep(summary, "smalest")
    with pytest.raises(ConfigError, match=r"use: got 'smalest', .*nearest: smallest"):
        find_use("smalest", summary.choices, "5eed")
    assert assess_sweep(summary, "best_onnx").verdict == "fail"


def test_an_unsupported_run_and_one_that_failed():
    cells = [unmeasured("a", "unsupported", "no such kernels"), unmeasured("b", "failed", "boom")]
    summary = summarize(make_family(cells))
    answered = read(assess_run(summary.run("a")))
    assert (answered["verdict"], answered["exit_code"]) == ("unsupported", 4)
    assert answered["because"] == "no such kernels"
    assert (
        answered["metric"]["value"]
        is answered["size"]["bytes"]
        is answered["loss"]["value"]
        is None
    )
    assert "no such kernels" in document.to_markdown(assess_run(summary.run("a")))
    with pytest.raises(TrackingError, match=r"run b is failed and has no verdict \(boom\)"):
        assess_run(summary.run("b"))
    with pytest.raises(TrackingError, match=r"no run was measured; .*: boom"):
        assess_sweep(summary)
    alone = read(assess_sweep(summarize(make_family(cells[:1]))))
    assert alone["verdict"] == "unsupported"
    assert alone["because"] == "No quantized run was measured (1 unsupported)."
    assert alone["sweep"]["runs"] == {"unsupported": 1}


def test_the_selection_samples_give_no_reason_beside_void_reported_ones():
    """A search: its steps ran on the selection samples, the best also on the reported ones."""
    reported = sweep(("a", PASSES, {"doubt": "NEAR CHANCE"}))
    steps = sweep(("b", PASSES, {"doubt": "NEAR CHANCE", "evaluate.split": "choice"}))
    because = read(assess_sweep(summarize(reported, steps)))["because"]
    assert "better than chance" in because
    assert "selection samples" not in because

    # Interrupted before the confirmation
    because = read(assess_sweep(summarize(steps)))["because"]
    assert "only the reported samples can recommend" in because


def test_fp32_itself_has_no_verdict():
    summary = summarize(sweep(("a", PASSES, {"dtype": "fp32"})))
    with pytest.raises(ConfigError, match="run a is FP32 itself, expected a quantized run"):
        assess_run(summary.run("a"))


def test_a_use_without_a_recommendation():
    summary = summarize(sweep(("a", PASSES, {})))
    with pytest.raises(
        ConfigError, match=r"use: got 'bset', .* try recommended \| best \| balanced \| smallest"
    ):
        assess_sweep(summary, "bset")
    with pytest.raises(ConfigError, match="use: got 'fastest'"):  # nothing was timed
        assess_sweep(summary, "fastest")
    slow = {"latency_p50_ms": 2.0, "baseline/latency_p50_ms": 1.0}
    with pytest.raises(ConfigError, match="recommends onnx fp32, the network itself"):
        assess_sweep(summarize(sweep(("a", PASSES, slow))), "fastest")
    two = summarize(sweep(("a", PASSES, {})), sweep(("b", PASSES, {})))
    with pytest.raises(ConfigError, match="a run for each of 2 sets of samples; try run_id="):
        assess_sweep(two)


def test_none_within_the_limit_is_no_wrong_input():
    """The best is undecided, and as measured loses more than the limit."""
    cells = (("a", predictions(lost=12), {}),)
    assert judged(*cells)["verdict"] == "undecided"
    answered = judged(*cells, use="smallest")
    assert (answered["verdict"], answered["choice"]) == ("undecided", None)


def test_reproduce_is_what_hydra_ran(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["resnet8ptq"])
    family = sweep(("a", PASSES, {"chosen_by": "50 of the test samples"}))
    for overrides, command in (
        ("", None),
        ("an open ' quote", None),
        ("backend=onnx \x1b[31m", None),
        (
            "backend=onnx 'calib.table=a b' hydra.x=1 sweep.resume=true",
            "resnet8ptq run backend=onnx 'calib.table=a b' evaluate.choice=half hydra.mode=RUN",
        ),
    ):
        family = amend_family(family, tags={"job_overrides": overrides})
        assert summarize(family).runs[0].reproduce_command == command


def test_an_id_that_is_a_command_is_no_id():
    with pytest.raises(TrackingError, match="run_id: got 'a; rm -rf ~'"):
        judged(("a; rm -rf ~", PASSES, {}))


@pytest.fixture
def hostile() -> Family:
    settings = {"calib": NASTY, "backend": NASTY, "seed": NASTY, "doubt": "", "execution": NASTY}
    family = sweep(("a", UNSURE, settings), ("b", PASSES, {"calib": NASTY}))
    names = ("mlflow.runName", "cpu", "job_overrides", "test_digest", "reason")
    params = {"model": NASTY, "data": NASTY, "artifact_sha256": NASTY}
    family = amend_family(family, tags=dict.fromkeys(names, NASTY), params=params)
    others = [unmeasured("c", "unsupported", NASTY)]
    return make_family([replace(cell, label=NASTY) for cell in (*family.cells, *others)])


@pytest.mark.parametrize("run_id", ["a", "b", "c"])
def test_a_hostile_store_breaks_nothing(hostile, run_id):
    summary = summarize(hostile)
    for answer in (assess_run(summary.run(run_id)), assess_sweep(summary)):
        read(answer)
        texts = document.to_json(answer), document.to_markdown(answer)
        for sign in SIGNS:
            assert all(sign not in text for text in texts)
        assert texts[0].isascii()
        assert all(line.isprintable() for text in texts for line in text.split("\n"))
        html = MarkdownIt("commonmark").enable("table").render(texts[1])
        for tag in ("<script", "<a ", "<img", "<h1", "<em"):
            assert tag not in html
        assert "@octocat" not in texts[1]
    run = summary.run(run_id)
    for value in vars(run).values():
        assert not isinstance(value, str) or value.isprintable()


def test_markdown_is_a_sentence_and_a_table():
    times = {"latency_p50_ms": 0.5, "baseline/latency_p50_ms": 0.7}
    summary = summarize(sweep(("a", predictions(lost=8, won=4), times)))
    lines = document.to_markdown(assess_sweep(summary)).splitlines()
    assert lines[0].startswith(
        "**Quantization: undecided.** onnx int8 minmax per tensor: Undecided: 1,000 samples "
    )
    assert f" About {summary.run('a').samples_needed:,} samples would" in lines[0]
    assert " Loss of accuracy against FP32: +0.40 points (at least " in lines[0]
    assert lines[2:7] == [
        "|  | FP32 | onnx int8 minmax per tensor |",
        "|---|---:|---:|",
        "| accuracy | 90.00% | 89.60% |",
        "| size, kB | 300.0 | 100.0 |",
        "| latency of one sample, ms | 0.700 | 0.500 |",
    ]
    assert lines[8] == "    python -m resnet8ptq deploy run_id=a"
    none = document.to_markdown(assess_sweep(summarize(sweep(("a", LOSES, {})))))
    assert none.startswith(
        "**Quantization: fail.** No model is recommended for `use=recommended`. No deployable model"
    )


def test_frame_has_a_row_for_each_run():
    family = sweep(("a", PASSES, {"seed": "1"}), ("b", LOSES, {"seed": "2", "latency_p50_ms": 0.5}))
    cells = [*family.cells, unmeasured("c", "unsupported", "no")]
    summary = summarize(make_family(cells))
    frame = summary.to_frame()
    assert list(frame.index) == ["a", "b", "c"]
    assert list(frame.seed[:2]) == ["1", "2"]
    assert frame["dtype"].unique().tolist() == ["int8"]
    assert {"framework", "cpu", "samples_from", "deploy_command"} <= {*frame.columns}
    assert list(frame.verdict) == ["pass", "fail", "unsupported"]
    assert frame.metric.unique().tolist() == ["accuracy"]
    for name in ("loss", "size_bytes", "latency_ms", "p_value", "least", "samples_needed"):
        assert frame[name].dtype == "float64"
    assert frame.loss["b"] == summary.run("b").loss
    assert pd.isna(frame.loss["c"]) and pd.isna(frame.latency_ms["a"])
    with pytest.raises(ValidationError):
        summary.runs[0].loss = 0.0
    assert len(to_frame([])) == 0


def test_choice_of_a_use():
    summary = summarize(
        sweep(("a", PASSES, {}), ("b", PASSES, {"calib": "mse", "size_bytes": 90_000.0}))
    )
    smallest = summary.choice("smallest")
    assert smallest is not None and smallest.run_id == "b"
    assert summary.choice("fastest") is None


@given(flips=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), min_size=1, max_size=4))
@example(flips=[(4, 0), (4, 0)])  # each passes by itself, and not of two
def test_each_recommended_run_has_the_bounds_of_its_verdict(flips):
    """The documented contract: pass exactly if the upper bound is within the limit."""
    cells = [
        (f"m{n}", predictions(lost=lost, won=won), {"seed": str(n), "size_bytes": 1e5 + n * 1e4})
        for n, (lost, won) in enumerate(flips)
    ]
    choices = [predictions(won=n) for n in range(len(cells))]
    for family in (sweep(*cells), sweep(*cells, choices=choices)):
        for choice in summarize(family).choices:
            run = choice.run
            assert run is not None and run.limit is not None
            upper, lower = run.loss_upper_bound, run.loss_lower_bound
            assert (run.verdict == "pass") == (upper is not None and upper <= run.limit)
            assert (run.verdict == "fail") == (lower is not None and lower >= run.limit)
