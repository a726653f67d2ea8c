"""Runs with equal files: one row in table, page and terminal, one model for the recommendation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.report import equal_files, table
from resnet8ptq.report.equal_files import count_models
from resnet8ptq.report.families import Family
from resnet8ptq.report.pages import trade_off
from resnet8ptq.report.selection import select
from resnet8ptq.results.summaries import assess_runs
from tests.helpers.cells import predictions, record, sweep, unmeasured
from tests.helpers.pages import to_page

LOST = predictions(lost=2)
FILE = {"backend": "torch", "artifact_sha256": "f00d", "weight_dtype": "qint8"}
OUTPUTS = {"outputs_sha256": "beef", "activation_dtype": "quint8"}


def family(**other: float | str) -> Family:
    """Return a sweep of which the first two runs have equal files, but for `other`."""
    return sweep(
        ("a", LOST, FILE | OUTPUTS),
        ("b", LOST, FILE | OUTPUTS | {"dtype": "u8s8"} | other),
        ("c", predictions(lost=9), {"artifact_sha256": "cafe"}),
    )


def ids(records: list) -> list[list[str]]:
    return [[member.run_id for member in members] for members in equal_files.group(records)]


def test_the_same_hash_is_one_row():
    assert ids(family().records) == [["a", "b"], ["c"]]


def test_another_hash_with_equal_outputs_and_size_is_one_row():
    assert ids(family(artifact_sha256="d00d").records) == [["a", "b"], ["c"]]


@pytest.mark.parametrize(
    "other",
    [
        {"outputs_sha256": "0ff"},
        {"size_bytes": 100_001.0},
        {"activation_dtype": "qint8"},
        {"engine": "fbgemm"},
        {"backend": "onnx"},
        {"outputs_sha256": ""},  # of an older run
    ],
)
def test_another_hash_and_another_output_size_or_kernel_is_another_row(other):
    assert len(ids(family(artifact_sha256="d00d", **other).records)) == 3


@pytest.mark.parametrize("key", ["backend.provider", "measured_on"])
def test_one_file_on_two_providers_or_machines_is_two_models(key):
    records = family(**{key: "another"}).records
    assert len(ids(records)) == count_models(records) == 3
    named = table.make(records)
    names = [dict(zip(named.heads, row.names, strict=False)) for row in named.rows]
    assert [row[key] for row in names if row["dtype"] == "u8s8"] == ["another"]


@pytest.mark.parametrize("key", ["backend.provider", "measured_on"])
def test_fp32_on_two_providers_or_machines_is_two_points(key):
    times = {"latency_p50_ms": 1.0, "speedup": 1.0}
    cells = [
        ("a", LOST, {**times, "baseline/latency_p50_ms": 1.0}),
        ("b", LOST, {**times, "baseline/latency_p50_ms": 5.0, key: "another"}),
    ]
    [selected] = select([sweep(*cells)], ReportConfig())
    [_, latency] = trade_off.panels(selected)
    baselines = [point for point in latency.points if point.kind == "fp32"]
    assert [point.x for point in baselines] == [1.0, 5.0]
    assert len({point.label for point in baselines}) == 2


@pytest.mark.parametrize("other", [{"latency.threads": "4"}, {"evaluate.batch_size": "7"}])
def test_one_file_measured_in_two_ways_has_two_rows(other):
    records = [record("a", LOST, **FILE), record("b", LOST, **FILE, **other)]
    assert len(ids(records)) == 2
    assert count_models(records) == 1  # in the tests it is one model


@pytest.mark.parametrize("turned", [False, True])
def test_equal_files_that_score_differently_have_the_verdict_of_the_worst(turned):
    """As with other numbers of threads; whatever the order of the runs."""
    other = {"latency.threads": "4"}
    cells = [("a", predictions(), FILE), ("b", predictions(lost=60), FILE | other)]
    if turned:
        cells.reverse()
    [selected] = select([sweep(*cells)], ReportConfig())
    runs = assess_runs(selected, {})
    assert [run.verdict for run in runs] == ["fail", "fail"]
    [bound] = {(run.loss_lower_bound, run.loss_upper_bound) for run in runs}
    assert bound[0] > 0.01
    [alone] = assess_runs(select([sweep(("a", predictions(), FILE))], ReportConfig())[0], {})
    assert alone.verdict == "pass"


def test_runs_without_a_result_keep_their_rows():
    failed = [unmeasured(name, "failed", "no").record for name in "ab"]
    assert len(ids(failed)) == 2


def test_the_row_has_both_names_and_the_json_every_run():
    made = family()
    rows = table.make(made.records).lines
    assert [row[:3] for row in rows[-2:]] == [
        ["torch", "int8/u8s8", "minmax"],
        ["onnx", "int8", "minmax"],
    ]
    [selected] = select([made], ReportConfig())
    runs = assess_runs(selected, {})
    assert [run.equal_runs for run in runs] == [("b",), ("a",), ()]
    assert [run.dtype for run in runs] == ["int8", "u8s8", "int8"]
    assert runs[0].verdict == runs[1].verdict is not None


def test_a_file_is_one_candidate_and_one_point():
    [selected] = select([family()], ReportConfig())
    assert [cell.record.run_id for cell in selected.candidates] == ["a", "c"]
    assert selected.candidates[0].label == "torch int8/u8s8 minmax per tensor"
    [panel] = trade_off.panels(selected)
    assert [point.row for point in panel.points if point.kind != "fp32"] == [0, 1]
    text = to_page(family())
    assert text.count('<tr data-row="') == 4  # with two baselines
    assert "2 different files" in text


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from("pqr")), max_size=8))
def test_every_run_is_in_one_row_in_the_order_of_the_runs(made):
    records = [
        record(str(position), LOST, artifact_sha256=sha, outputs_sha256=outputs)
        for position, (sha, outputs) in enumerate(made)
    ]
    groups = ids(records)
    assert sorted(run for members in groups for run in members) == sorted(
        record.run_id for record in records
    )
    firsts = [int(members[0]) for members in groups]
    assert firsts == sorted(firsts)
