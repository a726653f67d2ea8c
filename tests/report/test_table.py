"""The table of runs, from records made by hand."""

import csv
import io
import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.report import families, loading, naming, notes, table, terminal
from resnet8ptq.report.pages import methodology
from resnet8ptq.tracking.record import RunRecord
from tests.helpers.cells import amend_record, notes_on, predictions, sweep

REASON = "kernels take qint8 weights"

COLUMNS = [
    *("framework", "dtype", "calibration", "weights", "accuracy", "delta", "interval", "p"),
    *("size kB", "reduction", "ms", "speedup", "limit", "execution", "status"),
]


def record(
    backend: str = "onnx", dtype: str = "int8", status: str = "ok", **changes: str
) -> RunRecord:
    params = {
        **{"backend": backend, "dtype": dtype, "calib": "minmax", "per_channel": "false"},
        **{"data": "shapes", "model": "resnet8", "model.fold": "true", "latency.threads": "1"},
        **changes,
    }
    if status == "ok":
        params.setdefault("execution", "float" if dtype == "fp32" else "integer")
    metrics = {
        **{"accuracy": 0.8674, "paired/p_value": 0.0312, "counts/total": 5000.0},
        **{"size_bytes": 115_297.0, "speedup": 1.375},
        **{"ci95/delta_low": -0.0088, "ci95/delta_high": -0.0004, "latency_p50_ms": 0.08},
        **{"baseline/accuracy": 0.872, "baseline/size_bytes": 321_574.0},
    }
    tags = {"status": status}
    if status != "ok":
        metrics = {}
        tags["reason"] = (
            REASON if status == "unsupported" else "calib.percentile: got 120, expected p"
        )
    return RunRecord.of(
        re.sub(r"\W", "_", "_".join([*params.values(), status])), params, metrics, tags
    )


OK = record()
CHANNEL = record(per_channel="true", calib="entropy")
UNSUPPORTED = record("torch", "uint8", "unsupported")
FAILED = record("torch", "int8", "failed")
FP32 = record("torch", "fp32")
ALL = [OK, CHANNEL, UNSUPPORTED, FAILED, FP32]


def with_metrics(given: RunRecord, **metrics: float) -> RunRecord:
    return RunRecord.of(given.run_id, given.params, {**given.metrics, **metrics}, given.tags)


def judgement(verdict: str) -> dict[str, str]:
    return {"verdict": verdict, "verdict_text": verdict}


def printed(records: list[RunRecord], *more: str, **options: object) -> str:
    console = Console(file=io.StringIO(), **options)
    limits = ReportConfig(columns=[*more])
    terminal.print_families(loading.without_files(records, limits), console)
    return console.file.getvalue()


def test_the_short_table_explains_nothing_below_but_what_is_wrong():
    lines = printed([OK, CHANNEL], width=200).splitlines()
    assert lines[-1].startswith("└")
    (note,) = printed([OK, UNSUPPORTED], width=200).splitlines()[-1:]
    assert note.startswith("unsupported: ")


def test_row_of_a_measured_run():
    assert table.make([OK]).heads == COLUMNS
    assert table.make([OK]).lines[-1] == [
        *("onnx", "int8", "minmax", "per tensor", "86.74%", "-0.46", "-0.88 to -0.04", "0.031"),
        *("115.3", "64.1%", "0.080", "1.38", "", "integer", "ok"),
    ]
    assert table.make([CHANNEL]).lines[-1][2:4] == ["entropy", "per channel"]


def test_simulated_and_dynamic_runs_say_what_their_figures_are():
    simulated = record("torch", "uint8", execution="simulated")
    assert table.make([simulated]).lines[-1][-2] == "simulated"
    assert notes.SIMULATED_NOTE in notes_on([simulated])
    dynamic = with_metrics(OK, **{"batch1/accuracy": 0.8712})
    (note,) = [note for note in notes_on([dynamic]) if "87.12%" in note]
    assert note.startswith(f"{naming.labels([dynamic])[0]}: each batch sets its ranges")
    assert notes.SIMULATED_NOTE not in notes_on([dynamic])


def test_a_passing_run_that_is_only_simulated_is_named_in_the_short_notes():
    ran = OK.model_copy(update={"verdict": "pass"})
    simulated = record("onnx", "w4a8", execution="simulated").model_copy(update={"verdict": "pass"})
    [family] = loading.without_files([ran, simulated], ReportConfig())
    [line] = [line for line in notes.collect_warnings(family) if "only simulates" in line]
    assert line.endswith(f": {naming.labels([ran, simulated])[1]}")
    [alone] = loading.without_files([simulated], ReportConfig())
    assert not any("only simulates" in line for line in notes.collect_warnings(alone))


def test_title_says_which_images_were_scored():
    assert naming.title([OK]).endswith("5,000 test samples")
    held_out = record(**{"evaluate.split": "held_out"})
    assert naming.title([held_out]).endswith("5,000 held-out training samples")


def test_run_that_was_not_timed_has_no_speedup():
    metrics = {key: value for key, value in OK.metrics.items() if key != "speedup"}
    untimed = OK.changed(metrics=metrics)
    assert table.make([untimed]).lines[-1][-6:] == ["64.1%", "0.080", "", "", "integer", "ok"]
    assert [note for note in notes_on([untimed]) if note.startswith("speedup")] == []


def test_row_of_a_run_without_figures_keeps_its_place():
    for bare, status in ((UNSUPPORTED, "unsupported"), (FAILED, "failed")):
        (row,) = table.make([bare]).lines
        assert row[:4] == [*list(bare.params.values())[:3], "per tensor"]
        assert row[4:] == [*[""] * 10, status]


def test_fp32_run_is_itself_the_baseline():
    (row,) = table.make([FP32]).lines
    scored, costs = ["86.74%", "", "", ""], ["115.3", "", "0.080", ""]
    assert row == ["torch", "fp32", "", "", *scored, *costs, "", "float", "baseline"]


def test_fp32_run_that_failed_is_no_baseline():
    (row,) = table.make([record("torch", "fp32", "failed")]).lines
    assert row == ["torch", "fp32", *[""] * 12, "failed"]


def test_a_baseline_has_the_times_of_all_runs_beside_it():
    times = (0.288, 0.408, 0.3)
    runs = [
        with_metrics(record(seed=str(seed)), **{"baseline/latency_p50_ms": seconds})
        for seed, seconds in enumerate(times)
    ]
    heads, position = table.make(runs).heads, table.make(runs).heads.index("ms")
    assert [row[position] for row in table.make(runs).lines] == ["0.288 to 0.408", *["0.080"] * 3]
    assert len(table.make(runs).lines[0]) == len(heads)
    assert table.make(runs[:1]).lines[0][-5] == "0.288"


def test_the_baseline_of_a_lost_run_is_no_failure():
    lost = OK.as_failed("its predictions are damaged")
    assert [row[-1] for row in table.make([lost]).lines] == ["baseline", "failed"]


def test_every_run_has_a_row_and_every_framework_one_baseline():
    given = [*ALL, record(dtype="uint8"), record("torch", "u8s8")]
    lines = table.make(given).lines
    assert all(len(row) == len(table.make(given).heads) for row in lines)
    baselines = [row for row in lines if row[-1] == "baseline"]
    assert [row[:2] for row in baselines] == [["onnx", "fp32"], ["torch", "fp32"]]
    scored, costs = ["87.20%", "", "", ""], ["321.6", "", "", ""]
    assert lines[0] == ["onnx", "fp32", "", "", *scored, *costs, "", "float", "baseline"]
    assert len(lines) == 1 + len(given)  # torch's baseline is a run


def test_a_run_that_knows_nothing_of_itself_still_has_a_row():
    bare = RunRecord.of("id", {}, {}, {})
    assert table.make([bare]).lines[0][-1] == "?"
    assert "?" in printed([bare])


def test_p_is_corrected_over_the_measured_quantized_runs():
    # Holm by hand: three are tested; 0.01 * 3, 0.02 * 2, 0.5 * 1.
    p_values = {"int8": 0.02, "uint8": 0.5, "u8s8": 0.01}
    tested = [
        with_metrics(record(dtype=name), **{"paired/p_value": p}) for name, p in p_values.items()
    ]
    lines = table.make([*tested, UNSUPPORTED, FAILED, FP32]).lines
    assert [row[7] for row in lines] == ["", "0.040", "0.500", "0.030", "", "", ""]
    (note,) = [note for note in notes_on([*tested, FP32]) if note.startswith("p:")]
    assert "corrected for 3 comparisons (Holm)" in note


def test_what_the_runs_vary_besides_becomes_a_column_and_part_of_the_label():
    given = [record(seed=seed, **{"calib.num_bins": "2048"}) for seed in ("1", "2")]
    assert naming.varied(given) == ["seed"]
    assert table.make(given).heads == [*COLUMNS[:4], "seed", *COLUMNS[4:]]
    assert [row[4] for row in table.make(given).lines] == ["", "1", "2"]
    assert naming.labels(given) == [f"onnx int8 minmax per tensor seed={seed}" for seed in "12"]


def test_what_differs_only_between_frameworks_is_no_column():
    given = [OK, record("torch", **{"backend.engine": "onednn"})]
    assert naming.varied(given) == []
    other = record("torch", **{"backend.engine": "fbgemm"})
    assert naming.varied([*given, other]) == ["backend.engine"]
    assert table.make([*given, other]).lines[2][4] == ""  # onnx has none


def test_data_that_an_unsupported_run_never_looked_for_are_no_column():
    result, asked = {"data.name": "shapes"}, {"data.name": "cifar10"}
    given = [record(**result), record(dtype="uint8", status="unsupported", **asked)]
    assert naming.varied(given) == []
    assert naming.varied([*given, record(**asked)]) == ["data.name"]


def test_what_a_failed_run_has_not_settled_is_no_column():
    failed = record(dtype="uint8", status="failed", float_tail="null")
    given = [record(float_tail="false"), failed]
    assert naming.varied(given) == []
    assert naming.varied([*given, record(float_tail="true")]) == ["float_tail"]


def test_runs_of_other_plans_are_distinguished_and_their_bits_noted():
    given = [record(planned_bits=bits) for bits in ("{conv: 4}", "{dense: 2}")]
    assert naming.varied([OK, *given]) == ["planned_bits"]
    assert not any("weight bits" in note for note in notes_on(given))
    (note,) = [item for item in notes_on(given[:1]) if item.startswith("weight bits")]
    assert note.endswith("{conv: 4} (onnx int8 minmax per tensor)")
    unsupported = record(dtype="uint8", status="unsupported")
    assert naming.varied([given[0], unsupported]) == []


@pytest.mark.parametrize("key", ["weight_dtype", "data.root", "tracking.root", "calib.name"])
def test_what_nobody_chose_by_itself_is_no_column(key):
    assert naming.varied([record(**{key: "one"}), record(**{key: "other"})]) == []


@pytest.mark.parametrize(
    ("p_value", "shown"),
    [(0.0, "<0.001"), (0.00099, "<0.001"), (0.001, "0.001"), (0.0312, "0.031"), (1.0, "1.000")],
)
def test_tiny_p_values_are_not_rounded_to_zero(p_value, shown):
    assert table.make([with_metrics(OK, **{"paired/p_value": p_value})]).lines[-1][7] == shown


def test_delta_always_has_a_sign():
    assert table.make([with_metrics(OK, accuracy=0.8726)]).lines[-1][5] == "+0.06"


def test_reasons_are_grouped():
    result = notes_on([UNSUPPORTED, record("torch", "u8s8", "unsupported"), FAILED, OK])
    assert result == [
        f"unsupported: {REASON} (torch uint8 minmax per tensor; torch u8s8 minmax per tensor)",
        "failed: calib.percentile: got 120, expected p (torch int8 minmax per tensor)",
        *notes_on([OK]),
    ]


def test_a_doubtful_baseline_is_reported_below_the_table():
    doubtful = OK.changed(params={**OK.params, "doubt": "FP32 ACCURACY NEAR CHANCE, 9%"})
    assert any(note.startswith("FP32 ACCURACY NEAR CHANCE") for note in notes_on([doubtful]))


def test_speedup_is_a_ratio_in_words():
    assert "speedup: FP32's latency divided by " in notes.SPEEDUP_NOTE


def test_p_and_speedup_are_explained_only_where_there_is_one():
    assert notes_on([OK])[1:] == [
        notes.P_NOTE.format(test="exact McNemar test", correction=""),
        notes.SPEEDUP_NOTE.format(threads="1"),
    ]
    assert notes_on([UNSUPPORTED])[1:] == []


def test_title_names_data_model_and_images():
    assert naming.title(ALL) == "shapes, resnet8, 5,000 test samples"
    assert naming.title([UNSUPPORTED]) == "shapes, resnet8"


def test_title_names_every_data_set():
    text = naming.title([OK, with_metrics(record(data="cifar10"), **{"counts/total": 9980.0})])
    assert "cifar10" in text
    assert "shapes" in text
    assert "test samples" not in text  # they differ


def test_runs_on_different_images_have_tables_of_their_own():
    def scored(digest: str, p_value: float, **changes: str) -> RunRecord:
        result = with_metrics(record(**changes), **{"paired/p_value": p_value})
        return result.changed(tags={**result.tags, "test_digest": digest})

    other = {"evaluate.split": "held_out"}
    given = [
        *(scored("1", 0.01, dtype=dtype) for dtype in ("int8", "uint8")),
        *(scored("2", 0.01, dtype=dtype, **other) for dtype in ("int8", "uint8", "u8s8")),
        record("torch", "uint8", "unsupported", **other),
    ]
    assert [len(family) for family in families.group_by_samples(given)] == [2, 4]
    text = printed(given, terminal.ALL)
    assert "scored on 2 different sets of samples" in text
    first, second = text.split("shapes, resnet8, 5,000 held-out training samples")
    assert "shapes, resnet8, 5,000 test samples" in first
    assert first.count("0.020") == 2  # Holm: 0.01 * 2
    assert second.count("0.030") == 3
    assert REASON in second and REASON not in first


def test_the_title_of_runs_that_read_no_network_has_the_data_alone():
    params = {"data": "cifar10", "model": ""}
    failed = RunRecord.of("a", params, {}, {"status": "failed"})
    assert naming.title([failed]) == "cifar10"


def test_titles_that_are_alike_have_the_digest():
    given = [OK.changed(tags={"status": "ok", "test_digest": digit * 64}) for digit in "12"]
    assert naming.headings(families.group_by_samples(given)) == [
        f"shapes, resnet8, 5,000 test samples, digest {digit * 16}…" for digit in "12"
    ]


def test_titles_name_how_samples_are_joined():
    of_data = OK.changed(tags={"status": "ok", "test_digest": "1" * 64})
    given = [of_data.changed(params={**OK.params, "task.join": how}) for how in ("null", "vote")]
    assert naming.headings(families.group_by_samples(given)) == [
        "shapes, resnet8, 5,000 test samples",
        "shapes, resnet8, 5,000 test samples, task.join=vote",
    ]


@pytest.mark.parametrize(
    ("task", "key", "values"),
    [
        ("segmentation", "task.threshold", ("0.5", "0.3")),
        ("detection", "task.strides", ("[8, 16, 32]", "[8]")),
        ("regression", "task.resamples", ("9999", "200")),
        ("custom", "task.metric.k", ("1", "5")),
    ],
)
def test_runs_of_another_setting_of_the_task_are_another_family(task, key, values):
    """They have another FP32 score; with other resamples, replicates cannot be paired."""
    scored = OK.changed(tags={"status": "ok", "test_digest": "1" * 64})
    plain, *runs = (
        scored.changed(params={**OK.params, "scored_as": task, **more})
        for more in ({}, *({key: value} for value in values))
    )
    grouped = families.group_by_samples([plain, *runs])
    assert [len(family) for family in grouped] == ([1, 1, 1] if task == "custom" else [2, 1])
    assert naming.headings(grouped)[-1].endswith(f", {key}={values[1]}")


def test_a_task_is_one_family_whether_named_or_chosen_by_auto():
    scored = OK.changed(tags={"status": "ok", "test_digest": "1" * 64})
    params = {**OK.params, "scored_as": "classification"}
    given = [
        scored.changed(params={**params, "task.name": name}) for name in ("auto", "classification")
    ]
    assert [len(family) for family in families.group_by_samples(given)] == [2]


OPTIONS = {"data": ["a", "b"], "evaluate.split": ["test", "held_out"], "seed": ["1", "2"]}


def test_the_reported_samples_come_before_those_that_chose():
    choosing = record(**{"evaluate.split": "choice"})
    step, reported = (
        one.changed(tags={"status": "ok", "test_digest": digit * 64})
        for one, digit in ((choosing, "1"), (OK, "2"))
    )
    assert families.group_by_samples([step, reported]) == [[reported], [step]]


@given(
    st.lists(
        st.tuples(
            st.fixed_dictionaries({key: st.sampled_from(v) for key, v in OPTIONS.items()}),
            st.sampled_from(["", "1", "2"]),
        ),
        max_size=8,
    )
)
def test_a_family_has_one_digest_and_every_run_one_family(given_runs):
    runs = [
        RunRecord.of(str(n), params, {}, {"test_digest": digest} if digest else {})
        for n, (params, digest) in enumerate(given_runs)
    ]
    result = families.group_by_samples(runs)
    assert sorted(r.run_id for family in result for r in family) == [r.run_id for r in runs]
    digests = [{r.tags["test_digest"] for r in family if r.tags} for family in result]
    assert len(result) == max(1, len(set().union(*digests)))
    assert all(len(scored) <= 1 for scored in digests)


def test_a_run_without_samples_joins_those_of_its_metric():
    joins = ({"task.join": "mean"}, {"task.join": "max"})
    runs = [
        RunRecord.of(f"{status}{n}", join, {}, {"test_digest": "1"} if status == "ok" else {})
        for status in ("ok", "unsupported")
        for n, join in enumerate(joins)
    ]
    grouped = [[run.run_id for run in family] for family in families.group_by_samples(runs)]
    assert grouped == [["ok0", "unsupported0"], ["ok1", "unsupported1"]]


def test_a_setting_without_effect_names_no_run():
    scored = record(**{"method": "dynamic", "calib.samples_per_class": "null"})
    refused = record(status="unsupported", method="weight_only")  # its default was filled in
    refused = refused.changed(params={**refused.params, "calib.samples_per_class": "100"})
    assert naming.varied([scored, refused]) == []
    static = [record(**{"calib.samples_per_class": n}) for n in ("10", "100")]
    assert naming.varied(static) == ["calib.samples_per_class"]


def test_a_run_that_failed_after_it_drew_samples_joins_the_others():
    drawn = {"test_digest": "1", "status": "failed"}
    failed = RunRecord.of("failed", {}, {}, drawn)
    scored = RunRecord.of("ok", {"scored_as": "classification"}, {}, {"test_digest": "1"})
    assert [len(family) for family in families.group_by_samples([failed, scored])] == [2]


@pytest.mark.parametrize("status", ["failed", "killed"])
def test_a_run_that_ended_before_its_score_joins_the_others(status):
    """It has drawn the samples, and has no metric yet."""
    drawn = {"test_digest": "1"}
    scored = RunRecord.of(
        "a", {"data": "shapes", "scored_as": "{}"}, {"counts/total": 9.0}, {**drawn, "status": "ok"}
    )
    ended = RunRecord.of("b", {"data": "shapes"}, {}, {**drawn, "status": status})
    assert families.group_by_samples([scored, ended]) == [[scored, ended]]


def test_a_number_of_jobs_that_somebody_damaged_counts_as_unknown():
    damaged = amend_record(OK, tags={"jobs_at_once": "many"})
    [family] = loading.without_files([damaged], ReportConfig())
    assert dict(methodology.describe(family))["threads"] == "unknown"


def test_a_run_with_an_undefined_metric_ranks_last():
    values = [0.8, math.nan, 0.9, 0.7]
    runs = [with_metrics(record(seed=str(seed)), accuracy=v) for seed, v in enumerate(values)]
    assert families.best_first(runs) == [2, 0, 3, 1]


def test_csv_parses_back():
    odd = record("torch", "uint8", "failed", calib='a "quoted", comma')
    odd = odd.as_failed("first, second")
    given = [*ALL, odd]
    result = list(csv.DictReader(io.StringIO(table.to_csv(given))))
    assert [row["run_id"] for row in result] == [r.run_id for r in given]
    for row, r in zip(result, given, strict=True):
        assert row["status"] == r.tags["status"]
        assert row["reason"] == r.tags.get("reason", "")
        assert {key: row[key] for key in r.params} == r.params
        assert {key: float(row[key]) for key in r.metrics} == r.metrics


def test_csv_leaves_unknown_metrics_empty():
    result = list(csv.DictReader(io.StringIO(table.to_csv([OK, FAILED]))))
    assert result[1]["accuracy"] == ""


def without_limit(records: list[RunRecord]) -> list[tuple[str, ...]]:
    """The columns of the table without the one of verdicts: there are none."""
    columns = zip(table.make(records).heads, *table.make(records).lines, strict=True)
    return [column for column in columns if column[0] != table.LIMIT]


def test_verdicts_have_a_column_and_a_note():
    judged = [OK.changed(**judgement("pass")), CHANNEL.changed(**judgement("undecided"))]
    assert [row[-3] for row in table.make(judged).lines[1:3]] == ["pass", "undecided"]
    measured = sweep(("a", predictions(), {}), ("b", predictions(lost=90), {}))
    decided = []
    for cell, verdict in zip(measured.cells, ("pass", "undecided"), strict=True):
        decided.append(replace(cell, record=cell.record.changed(**judgement(verdict))))
    family = replace(measured, cells=tuple(decided))
    (note,) = [note for note in notes.collect(family) if note.startswith("limit:")]
    assert "at most 1 point worse than FP32" in note
    assert "corrected for 2 models (Holm)" in note
    assert not any(note.startswith("limit:") for note in notes_on(ALL))


def test_bootstrap_samples_without_a_value_are_counted_below_the_table():
    few, many = (
        notes_on([OK.changed(metrics=OK.metrics | {"ci95/undefined_share": share})])
        for share in (0.004, 0.02)
    )
    assert [line for line in few if "0.40% of the bootstrap samples" in line]
    assert [line for line in many if "2.00%" in line and "no interval" in line]
    assert not any("bootstrap samples" in line for line in notes_on(ALL))


def test_undefined_bootstrap_samples_are_counted_in_every_run():
    """Also behind a dozen of others; after the first dozen, the runs are only counted."""
    share = {"ci95/undefined_share": 0.004}
    runs = [with_metrics(record(seed=str(seed)), **(share if seed else {})) for seed in range(20)]
    lines = [line for line in notes_on(runs) if "undefined_share" in line or "0.40%" in line]
    assert len(lines) == notes.NAMED + 1
    assert lines[-1].startswith("The same for 7 more runs")


def test_a_pipe_gets_whole_cells():
    text = printed(ALL, terminal.ALL)
    assert "…" not in text
    lines = [line.strip("│┃").replace("┃", "│") for line in text.splitlines() if line[0] in "│┃"]
    cells = [[cell.strip() for cell in line.split("│")] for line in lines]
    assert cells == [list(row) for row in zip(*without_limit(ALL), strict=True)]
    assert naming.title(ALL) in text


def test_a_terminal_of_80_columns_gets_whole_figures():
    options = {"width": 80, "force_terminal": True, "color_system": None}
    text = printed([OK, CHANNEL], "speedup", **options)
    for figure in ("86.74%", "-0.46", "115.3", "0.080", "1.38"):
        assert text.count(figure) == 2


def test_six_columns_name_the_model_and_its_outcome():
    judged = [OK.changed(**judgement("pass")), *ALL[1:]]
    brief = table.brief(judged, table.make(judged))
    rows = brief.lines
    assert brief.heads == ["model", "accuracy", "delta", "size kB", "ms", "limit"]
    assert [row[0] for row in rows if row[1]] == [
        *("onnx fp32", "onnx int8 minmax per tensor", "onnx int8 entropy per channel"),
        "torch fp32",
    ]
    assert [row[-1] for row in rows][:2] == ["baseline", "pass"]
    assert {"unsupported", "failed"} <= {row[-1] for row in rows}
    assert max(map(len, printed(ALL).splitlines()[:9])) <= 120


def test_an_unknown_column_is_named_with_those_there_are():
    assert "report.columns: got nope, expected all or framework" in printed([OK], "nope")


def test_brackets_in_a_reason_are_printed_as_they_are():
    odd = record("torch", "uint8", "failed").as_failed("got [red], expected [1, 2]")
    assert "got [red], expected [1, 2]" in printed([odd])


def test_what_calibrates_otherwise_says_so_in_its_column():
    given = [OK, record(method="dynamic"), record(method="qat")]
    assert [row[2] for row in table.make(given).lines[1:]] == ["minmax", "dynamic", "qat, minmax"]
    assert naming.varied(given) == []


def test_second_flow_of_a_framework_is_named():
    given = [record("torch"), record("torch", "uint8", **{"backend.flow": "pt2e"})]
    frameworks = [(row[0], row[1]) for row in table.make(given).lines]
    assert set(frameworks[:2]) == {("torch", "fp32"), ("torch pt2e", "fp32")}
    assert frameworks[2:] == [("torch", "int8"), ("torch pt2e", "uint8")]
    assert "torch pt2e uint8 minmax per tensor" in naming.labels(given)
