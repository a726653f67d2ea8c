"""Runs and sweeps answered by id, folder and tag; the command; the notebook. On a real sweep."""

import csv
import json
import shutil
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import jsonschema
import matplotlib.pyplot as plt
import pytest

from resnet8ptq import results
from resnet8ptq.config.schema import TrackingConfig
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.results import RunRecord, lookup
from resnet8ptq.tracking.journal import FILE, Journal
from resnet8ptq.tracking.mlflow_store.store import open_store
from resnet8ptq.tracking.sweep_file import FILE as SHARED
from tests.helpers.calling import (
    NO_REAL_FILES,
    QUICK,
    REPO,
    Called,
    answered_here,
    call,
    call_beside,
)

SCHEMA = json.loads((REPO / "docs/verdict.schema.json").read_text())
NOTEBOOK = REPO / "docs/examples/results.ipynb"


@pytest.fixture
def in_folder(sweep: Called) -> Iterator[Path]:
    """The current folder is that of the sweep's store, as it is for the user."""
    with chdir(sweep.folder):
        yield sweep.folder


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Called:
    """A sweep that takes over the runs of an earlier one, which are in another folder."""
    folder = tmp_path_factory.mktemp("resumed")
    words = (*QUICK, "backend=onnx", "dtype=int8,u8s8")
    first = call(folder, "-m", *words, **NO_REAL_FILES)
    assert first.code == 0, first.err
    return call(folder, "-m", *words, "seed=42,1", "sweep.resume=true", **NO_REAL_FILES)


def verdict(called: Called, *words: str) -> tuple[int, Any]:
    """Call the command; return its exit code and its document, held to the schema."""
    done = call_beside(called.folder, "verdict", *words)
    if not done.out:
        return done.code, done.errors
    answered = json.loads(done.out)
    jsonschema.Draft202012Validator(SCHEMA).validate(answered)
    assert answered["exit_code"] == done.code
    return done.code, answered


def test_the_newest_sweep_has_the_figures_of_its_report(sweep, in_folder):
    summary = results.load_sweep()
    assert summary.run_id == sweep.parent.info.run_id
    assert [run.run_id for run in summary.runs] == [run.info.run_id for run in sweep.children]
    assert summary.report is not None and Path(summary.report).name == "report.html"
    page = Path(summary.report).with_name("report.md").read_text()
    with Path(summary.report).with_name("runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    for run, row in zip(summary.runs, rows, strict=True):
        assert (run.run_id, run.status) == (row["run_id"], row["status"])
        if run.status != "ok":
            assert run.verdict == "unsupported" and run.reason and run.artifact is None
            continue
        for key, value in (
            *(("accuracy", run.value), ("baseline/accuracy", run.fp32_value), ("drop", run.loss)),
            *(("size_bytes", run.size_bytes), ("latency_p50_ms", run.latency_ms)),
            ("counts/total", run.samples),
        ):
            assert float(row[key]) == value
        assert run.artifact is not None and Path(run.artifact).is_file()
        assert Path(run.artifact).stat().st_size == run.size_bytes
        assert run.verdict_text in page
    for choice in summary.choices:
        if choice.run is not None:
            assert f"deploy run_id={choice.run.run_id}" in page


def facts_of(result: results.SweepSummary | RunRecord) -> dict[str, Any]:
    """Return all facts of a run or a sweep, without the place where they were read."""
    if isinstance(result, RunRecord):
        private = {"params", "metrics", "tags", "artifact_uri", "in_folder", "store_words"}
        return result.model_dump(exclude=private)
    runs = [facts_of(run) for run in result.runs]
    choices = []
    for choice in result.choices:
        others = [cell.record.run_id for cell in (*choice.equals, *choice.unknown)]
        run = choice.run and facts_of(choice.run)
        choices.append((choice.use, choice.label, choice.because, run, others))
    return vars(result) | {"runs": runs, "choices": choices}


def test_by_id_folder_and_tag_it_is_the_same(sweep, in_folder):
    by_id = results.load_sweep(sweep.parent.info.run_id)
    folder = Path(sweep.parent.data.tags["folder"])
    by_folder = results.load_sweep(folder=folder)
    by_tag = results.load_sweep(tags={"folder": str(folder)})
    for other in (by_folder, by_tag, results.load_sweep()):
        assert facts_of(other) == facts_of(by_id)
    run = by_id.runs[0]
    folder = Path(sweep.children[0].data.tags["folder"])
    for other in (
        results.load_run(run.run_id),
        results.load_run(folder=folder),
        results.load_run(tags={"folder": str(folder)}),
    ):
        assert facts_of(other) == facts_of(run)
    assert isinstance(results.load_run(), RunRecord)


def test_a_folder_is_read_without_the_store(sweep, tmp_path):
    folder = shutil.copytree(sweep.parent.data.tags["folder"], tmp_path / "copied")
    with chdir(tmp_path):
        answered = results.load_sweep(folder="copied")
        job = next(path.parent for path in sorted(folder.glob("*/record.json")))
        assert results.load_run(folder=job).sweep_id == answered.run_id
        assert not (tmp_path / "mlruns").exists()
    assert [run.verdict for run in answered.runs].count("unsupported") == 1
    assert answered.report == str(folder / "report.html")
    artifact = next(run.artifact for run in answered.runs if run.artifact)
    assert Path(artifact).is_relative_to(folder)


def test_the_newest_sweep_is_read_from_its_folder_without_the_store(sweep, in_folder):
    newest = lookup.find_newest(TrackingConfig())
    assert newest.store.uri == ""
    by_id = results.load_sweep(sweep.parent.info.run_id)
    assert facts_of(newest.assess_sweep({})) == facts_of(by_id)


def test_a_run_that_ended_before_the_store_gave_it_an_id_has_that_of_the_store(sweep, in_folder):
    folder = Path(sweep.children[0].data.tags["folder"])
    kept = (folder / FILE).read_bytes()
    early = Journal.load(folder)
    early.run_id = None
    early.save(folder)
    try:
        newest = lookup.find_newest(TrackingConfig())
    finally:
        (folder / FILE).write_bytes(kept)
    assert newest.store.uri == ""
    assert [run.run_id for run in newest.records] == [run.info.run_id for run in sweep.children]


@pytest.mark.parametrize("name", [FILE, SHARED])
def test_the_store_answers_for_a_newest_sweep_with_a_damaged_folder(sweep, in_folder, name):
    path = Path(sweep.parent.data.tags["folder"]) / name
    kept = path.read_bytes()
    path.write_bytes(b"{")
    try:
        newest = lookup.find_newest(TrackingConfig())
    finally:
        path.write_bytes(kept)
    assert newest.store.uri
    assert facts_of(newest.assess_sweep({})) == facts_of(results.load_sweep())


def test_the_store_answers_for_a_newest_sweep_with_a_deleted_run(sweep, in_folder):
    store = open_store(TrackingConfig())
    deleted = sweep.children[0].info.run_id
    store.client.delete_run(deleted)
    try:
        newest = lookup.find_newest(TrackingConfig())
    finally:
        store.client.restore_run(deleted)
    assert newest.store.uri == store.uri
    left = [run.info.run_id for run in sweep.children[1:]]
    assert [run.run_id for run in newest.records] == left


@pytest.mark.slow
def test_a_resumed_sweep_has_the_runs_that_it_took_over(resumed):
    assert "2 of 4 runs had finished before" in resumed.out
    with chdir(resumed.folder):
        newest = results.load_sweep()
        (parent,) = [run for run in resumed.runs if run.info.run_id == newest.run_id]
        assert results.load_sweep(folder=parent.data.tags["folder"]) == newest
    assert len(newest.runs) == 4


def test_command_and_exit_codes(sweep):
    code, answered = verdict(sweep, "max_drop=0.5")
    assert (code, answered["verdict"], answered["use"]) == (0, "pass", "recommended")
    assert answered["sweep"]["run_id"] == sweep.parent.info.run_id
    assert answered["sweep"]["runs"] == {"ok": 3, "unsupported": 1}
    run_id = answered["choice"]["run_id"]
    code, named = verdict(sweep, f"run_id={run_id}", "max_drop=0.5")
    assert (code, named["loss"], named["use"]) == (0, answered["loss"], None)
    code, answered = verdict(sweep, "max_drop=0")
    assert (code, answered["verdict"]) == (4, "undecided")
    code, answered = verdict(sweep, "max_drop=0.5", "min_accuracy=1")
    assert (code, answered["verdict"], answered["choice"]) == (3, "fail", None)
    folder = sweep.parent.data.tags["folder"]
    assert verdict(sweep, f"folder={folder}", "use=smallest", "max_drop=0.5")[0] == 0
    unsupported = next(r for r in sweep.children if r.data.tags["status"] == "unsupported")
    code, answered = verdict(sweep, f"run_id={unsupported.info.run_id}")
    assert (code, answered["verdict"]) == (4, "unsupported")
    done = call_beside(sweep.folder, "verdict", "format=markdown", "max_drop=0.5")
    assert done.code == 0
    assert done.out.startswith("**Quantization: pass.** ")


def test_wrong_input(sweep, tmp_path):
    parent, child = sweep.parent.info.run_id, sweep.children[0].info.run_id
    folder = Path(sweep.children[0].data.tags["folder"])
    for words, says in (
        (["run_id=0123"], "run_id: got '0123', expected the id of a run in the store"),
        ([f"run_id={parent}"], f"run_id: {parent} is a sweep; try sweep={parent}"),
        ([f"sweep={child}"], f"sweep: {child} is a run; try run_id={child}"),
        (
            [f"folder={tmp_path}"],
            f"folder: got {tmp_path}, expected the folder of a run or a sweep",
        ),
        ([f"run_id={child}", f"folder={folder}"], "folder: has no effect with run_id="),
        ([f"folder={folder}", "use=smallest"], "use: has no effect with a run"),
        (["format=yaml"], "format: got 'yaml', expected json | markdown"),
        (["use=bets"], "use: got 'bets', for which sweep"),
        (["experiment=other"], "experiment: got 'other', which has no run"),
    ):
        code, errors = verdict(sweep, *words)
        assert code == 2, words
        assert errors[0].startswith(f"error: {says}"), errors


def test_lookups_refuse_what_would_change_a_query(in_folder):
    with pytest.raises(ConfigError, match="tags: got"):
        results.load_sweep(tags={"a": "' or ''='"})
    with pytest.raises(ConfigError, match="more than one of run_id, folder and tags"):
        results.load_sweep("a", folder="b")
    with pytest.raises(ConfigError, match="has no run with no=such"):
        results.load_run(tags={"no": "such"})
    with pytest.raises(ConfigError, match="limits: got 'drop', expected max_drop"):
        results.load_sweep(limits={"drop": 1})


def test_failed_runs_have_no_verdict(failing_sweep):
    failed = next(r for r in failing_sweep.children if r.data.tags["status"] == "failed")
    code, errors = verdict(failing_sweep, f"run_id={failed.info.run_id}")
    assert code == 1
    assert errors[0].startswith(f"error: run {failed.info.run_id} is failed and has no verdict")


def test_a_run_with_a_damaged_file_has_no_verdict(sweep, tmp_path):
    folder = shutil.copytree(sweep.parent.data.tags["folder"], tmp_path / "copied")
    next(folder.glob("*/predictions.npz")).write_bytes(b"nothing")
    runs = results.load_sweep(folder=folder).runs
    [lost] = [run for run in runs if run.status == "failed"]
    assert lost.verdict is None and "predictions.npz is damaged" in lost.reason
    assert any(run.verdict is not None for run in runs)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert 5 <= len(cells) <= 10
    names: dict[str, Any] = {}
    shown: list[int] = []
    monkeypatch.setattr(plt, "show", lambda: shown.extend(plt.get_fignums()))
    for cell in cells:
        assert cell.get("outputs", []) == []
        if cell["cell_type"] == "code":
            with answered_here():  # `test_calls` has the process that it starts for a user
                exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), names)
    assert len(names["kept"]) > 0
    assert names["figure"].axes[0].get_lines()
    assert shown == [names["figure"].number]  # Jupyter draws the figures that pyplot knows
    plt.close(names["figure"])
