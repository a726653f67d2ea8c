"""Stores and sweeps of many runs: what is asked of the store, and what is shown at once."""

import io
import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from sqlalchemy import event
from sqlalchemy.engine import Engine

from resnet8ptq.config.schema import ReportConfig, TrackingConfig
from resnet8ptq.core import figures
from resnet8ptq.evaluation.result import RunResult
from resnet8ptq.report import loading, notes, table, terminal
from resnet8ptq.report.families import Family, make_family
from resnet8ptq.report.pages import methodology, page, trade_off, web_page
from resnet8ptq.report.pages.plots import class_impact
from resnet8ptq.report.selection import select
from resnet8ptq.sweeps import resume
from resnet8ptq.tracking import history, journal
from resnet8ptq.tracking.mlflow_store import sync
from resnet8ptq.tracking.mlflow_store.store import Store, open_store
from resnet8ptq.tracking.record import RunRecord
from resnet8ptq.tracking.run import end_parent, start_parent, start_run
from resnet8ptq.tracking.sweep_file import SharedSweep
from tests.helpers.cells import (
    BASELINE,
    LABELS,
    NAMES,
    notes_on,
    predictions,
    record,
    sweep,
    unmeasured,
)
from tests.helpers.configs import make_config
from tests.helpers.pages import to_page

LIMITS = ReportConfig()
RUNS = 3  # of a sweep


@contextmanager
def statements() -> Iterator[list[str]]:
    """Collect the SQL statements of a block."""
    result: list[str] = []

    def note(*value: object) -> None:
        result.append(str(value[2]))

    event.listen(Engine, "before_cursor_execute", note)
    yield result
    event.remove(Engine, "before_cursor_execute", note)


def start_sweep(store: Store, folder: Path) -> SharedSweep:
    """Log a sweep of unsupported runs."""
    folder.mkdir()
    parent_id = start_parent(store, "sweep", folder, {"sweep_key": folder.name})
    for number in range(RUNS):
        own = folder / str(number)
        own.mkdir()
        tags = {"job_number": str(number), "identity": f"{folder.name} {number}"}
        with start_run(store, "job", own, parent_id, tags) as run:
            run.log_config(make_config("data=shapes", f"seed={number}"))
            run.log_result(RunResult("unsupported", "no such kernel"))
    end_parent(store, parent_id, "ok", folder)
    return SharedSweep(store, parent_id, folder, resume=True)


def add_others(store: Store, number: int) -> None:
    """Add runs of other sweeps."""
    for position in range(number):
        tags = {
            "job_number": str(position),
            "identity": f"another {position}",
            "record": f"{position}",
        }
        run = store.client.create_run(store.experiment_id, tags={journal.PARENT_TAG: "1", **tags})
        store.client.set_terminated(run.info.run_id)


@pytest.mark.slow
def test_what_is_asked_of_a_store_does_not_grow_with_its_runs(own_store, tmp_path):
    own = start_sweep(own_store, tmp_path / "sweep")
    report = [f"root={tmp_path / 'mlruns'}", f"run_id={own.parent_id}", f"folder={tmp_path}"]
    calls: dict[str, Callable[[], object]] = {
        "report": lambda: page.main(report),
        "the sweep": lambda: resume.find_sweep(own_store, "sweep"),
        "its runs": lambda: sync.sync(own_store, own.folder),
        "a finished run": lambda: resume.find_finished(own, 1, "sweep 1"),
        "no finished run": lambda: resume.find_finished(own, 1, "sweep 9"),
        "attempts": lambda: resume.find_attempts(own, 1),
    }

    def count() -> dict[str, int]:
        counts = {}
        for name, call in calls.items():
            with statements() as asked:
                call()
            counts[name] = len(asked)
        return counts

    count()  # the first call of each opens what it needs
    few = count()
    add_others(own_store, 20)
    assert count() == few
    assert max(few.values()) < 100


def test_runs_of_another_sweep_are_read_together(own_store, tmp_path):
    first = start_sweep(own_store, tmp_path / "first")
    counts = []
    for number in (1, RUNS):
        folder = tmp_path / f"with {number}"
        folder.mkdir()
        parent_id = start_parent(own_store, "sweep", folder, {})
        later = SharedSweep(own_store, parent_id, folder, resume=True)
        for job in range(number):
            assert resume.find_finished(later, job, f"first {job}") is not None
        with statements() as asked:
            compared = history.load_compared(own_store, parent_id)
        counts.append(len(asked))
        names = [run.tags["identity"] for run in compared]
        assert names == [f"first {job}" for job in range(number)]
    assert counts[0] == counts[1]
    runs = history.find_runs(own_store, history.under(first.parent_id))
    assert history.load_runs(own_store, [runs[0].run_id, "0" * 32]).keys() == {runs[0].run_id}


def test_a_store_is_opened_while_a_run_logs(own_store, tmp_path):
    database = tmp_path / "mlruns" / "mlflow.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        again = TrackingConfig(root=str(database.parent), experiment_name=own_store.experiment_name)
        assert open_store(again) == own_store


def test_ranges_are_read_for_the_figures_and_labels_kept_once(tmp_path, monkeypatch):
    ranges = {"activations": {"x": [-1.0, 2.0]}, "weights": {"w": [-0.5, 0.5]}}
    (tmp_path / "ranges.json").write_text(json.dumps(ranges))
    arrays = {"baseline_predictions": BASELINE, "labels": LABELS}
    np.savez(tmp_path / "predictions.npz", predictions=predictions(lost=9), **arrays)
    read = []

    def lend(store: object, run: RunRecord, name: str) -> nullcontext[Path]:
        read.append((run.run_id, name))
        return nullcontext(tmp_path / name)

    monkeypatch.setattr(history, "artifact", lend)
    methods = {"a": "minmax", "b": "minmax", "c": "mse"}
    records = [record(name, predictions(lost=9), calib=calib) for name, calib in methods.items()]
    (family,) = loading.load_families(None, records)
    assert [name for name, file in read if file == "ranges.json"] == ["a", "c"]
    first, second, _ = (cell.paired for cell in family.cells)
    assert vars(first.model)["labels"] is vars(second.model)["labels"]


@pytest.fixture(scope="module")
def many() -> Family:
    cells = [
        (f"{n}", predictions(lost=n), {"seed": str(n), "calib": ("minmax", "mse")[n % 2]})
        for n in range(table.MANY + 1)
    ]
    return make_family([*sweep(*cells).cells, unmeasured("x", "failed", "no <b>kernel</b>")])


def test_the_best_of_many_runs_come_first_and_all_of_them_folded(many):
    text = page.to_markdown(select([many], LIMITS), {})
    at_once, *folded = re.split(r"<details>", text.split("## All runs")[1].split("## Spread")[0])
    shown = [line for line in at_once.splitlines() if line.startswith("| onnx")]
    assert len(shown) == 1 + table.FIRST  # the baseline
    assert [line.split(" | ")[4] for line in shown[1:4]] == ["0", "1", "2"]
    assert "The 20 best of 52 runs by accuracy; the others: 31 ok, 1 failed." in at_once
    assert [part.split("</summary>")[0] for part in folded] == [
        "<summary>onnx int8 minmax per tensor: 27 runs; accuracy 85.00% to 90.00%; "
        "10 undecided, 16 fail, 1 failed",
        "<summary>onnx int8 mse per tensor: 25 runs; accuracy 85.10% to 89.90%; "
        "10 undecided, 15 fail",
    ]
    lines = [line for line in "".join(folded).splitlines() if line.startswith("| onnx")]
    assert len(lines) == len(many.cells)


def test_the_page_folds_and_takes_no_other_html(many):
    html = web_page.render(page.to_markdown(select([many], LIMITS), {}), {})
    assert html.count("<details><summary>") == html.count("</details>") == 2
    assert "<b>" not in html
    shown = to_page(many)
    assert shown.count("data-more>") == 52 - table.FIRST
    assert shown.count("<tr data-row=") == 1 + 52
    for value in ("<script>x</script>", "<details open onclick=x>", "<details><summary><b></b>"):
        assert value not in web_page.render(f"text\n\n{value}\n\ntext", {})


def test_the_terminal_says_what_it_leaves_out(many):
    console = Console(file=io.StringIO(), width=200)
    terminal.print_families([many], console)
    text = console.file.getvalue()
    assert text.count("│ onnx") == 1 + table.FIRST
    assert "The 20 best of 52 runs by accuracy; the others: 31 ok, 1 failed. All: rep" in text


def test_notes_and_figures_name_some_of_many(many):
    same = [unmeasured(f"{n}", "unsupported", "no kernel").record for n in range(20)]
    assert any(note.endswith("; and 8 more)") for note in notes_on(same))
    dynamic = [record(f"{n}", BASELINE, **{"batch1/accuracy": 0.9}) for n in range(20)]
    texts = notes_on(dynamic)
    assert sum("each batch sets its ranges" in note for note in texts) == notes.NAMED
    assert "The same for 8 more runs (batch1/accuracy in runs.csv)." in texts
    figure = class_impact(many)
    assert figure is not None and len(figure.axes[0].get_yticklabels()) == table.FIRST
    sections = dict(methodology.describe(many))
    assert "0 / 1 / 2 / 3 / 4 / 5 / 6 / 7 / 8 / 9 / and 41 more" in sections["calibration"]


def test_a_class_without_a_change_has_no_sign_of_a_loss(monkeypatch):
    written: list[str] = []
    monkeypatch.setattr(
        figures, "label_cells", lambda axes, texts, *_, **__: written.extend(texts.flat)
    )
    drops = {f"class/{name}/drop": drop for name, drop in zip(NAMES, (0.0, 0.0002), strict=True)}
    assert class_impact(sweep(("a", predictions(), drops))) is not None
    assert written == ["+0.0", "+0.0"]


def test_a_task_whose_runs_log_no_loss_by_class_has_no_section_of_classes():
    [cell] = sweep(("a", predictions(), {})).cells
    metrics = {k: v for k, v in cell.record.metrics.items() if not k.startswith("class/")}
    found = make_family([replace(cell, record=cell.record.changed(metrics=metrics))])
    assert found.task.class_names == NAMES
    assert found.class_names == ()
    assert class_impact(found) is None


def test_no_point_of_the_front_is_beaten():
    costs = np.array([[1.0, 5.0], [2.0, 2.0], [2.0, 2.0], [3.0, 2.0], [5.0, 1.0]])
    assert trade_off.find_front(costs) == [0, 1, 2, 4]
