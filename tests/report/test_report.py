"""The report's pages, from sweeps made by hand; the real sweep's is looked at in test_browser."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.evaluation.paired_latency import FILE
from resnet8ptq.evaluation.result import RunResult
from resnet8ptq.experiment import wrong_examples
from resnet8ptq.report import table
from resnet8ptq.report.families import Family, group_by_samples, make_family
from resnet8ptq.report.pages import page, spread, trade_off
from resnet8ptq.report.pages.plots import activation_ranges, class_impact, weight_ranges
from resnet8ptq.report.selection import select
from resnet8ptq.report.verdicts import PASS, UNDECIDED
from resnet8ptq.tracking import history
from resnet8ptq.tracking.mlflow_store.store import Store
from resnet8ptq.tracking.run import start_parent, start_run
from resnet8ptq.tracking.sweep_file import SharedSweep
from tests.helpers.cells import amend, predictions, sweep, unmeasured
from tests.helpers.configs import make_config
from tests.helpers.logged_runs import log_measured
from tests.helpers.pages import to_page

LIMITS = ReportConfig()


@pytest.fixture
def found() -> Family:
    measured = sweep(
        ("a", predictions(lost=30, label=1), {}),
        ("b", predictions(won=2), {"backend": "torch", "calib": "entropy"}),
    )
    cells = [*measured.cells, unmeasured("c", "unsupported", "no <b>kernel</b> | sorry")]
    cells.append(unmeasured("d", "failed", "calib.percentile: got 120"))
    return make_family(cells)


def test_every_requested_cell_and_reason_is_in_the_table(found):
    text = page.to_markdown(select([found], LIMITS), {})
    rows = [line for line in text.split("## All runs")[1].splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 2 + 4  # head, baselines, cells
    assert [row.split(" | ")[-1] for row in rows[-2:]] == ["unsupported |", "failed |"]
    assert "calib.percentile: got 120" in text


def test_summary_counts_and_says_who_is_worse(found):
    text = page.to_markdown(select([found], LIMITS), {})
    assert "4 combinations requested: 2 measured, 1 unsupported, 1 failed" in text
    assert "Limit: at most 1 point worse than FP32. " in text
    assert "Verdicts on the 2 quantized models: 1 pass, 1 fail." in text
    assert "onnx int8 minmax per tensor: significantly worse on dog" in text


def test_numbers_equal_the_records(found):
    text = page.to_markdown(select([found], LIMITS), {})
    for cell in found.measured:
        assert f"{cell.metric('accuracy'):.2%}" in text
        assert f"{100 * (cell.record.delta(found.metric) or 0):+.2f}" in text


def test_text_from_outside_is_escaped_in_the_page(found):
    html = to_page(found)
    assert "<b>kernel</b>" not in html
    assert "&lt;b&gt;kernel&lt;/b&gt; | sorry" in html
    own = Path(page.__file__).with_name("templates") / "report.js"
    assert re.findall("<script>(.*?)</script>", html, re.S) == [own.read_text()]
    assert html.lower().count("<script") == 1


def test_the_page_holds_its_figures_and_asks_for_nothing(found):
    html = to_page(found, figures={"class_impact.png": b"\x89PNG"})
    assert '<img src="data:image/png;base64,iVBORw==' in html
    assert re.findall(r'(?:src|href)="(?!data:)', html) == []


def test_nothing_measured_recommends_nothing():
    bare = make_family([unmeasured("a", "unsupported", "why")])
    text = page.to_markdown(select([bare], LIMITS), {})
    assert "nothing can be recommended" in text
    assert "## Recommendation" not in text


def test_limits_show_as_pass_and_fail(found):
    text = page.to_markdown(select([found], LIMITS), {})
    assert "| fail | " in text
    assert "| pass | " in text
    strict = ReportConfig(min_accuracy=0.95)
    text = page.to_markdown(select([found], strict), {})
    assert "| fail, accuracy \\< 95.00% | " in text


def test_spread_over_seeds_by_hand():
    cells = [(f"s{n}", predictions(lost=n), {"seed": str(n)}) for n in (0, 10, 20)]
    (group,) = spread.measure_spreads(sweep(*cells), ReportConfig())
    assert group.label == "onnx int8 minmax per tensor"
    assert (group.draws, group.lowest, group.highest) == (3, pytest.approx(0.88), 0.9)
    assert group.mean == pytest.approx(0.89)
    assert group.standard_deviation == pytest.approx(0.01)
    assert spread.measure_spreads(sweep(cells[0]), ReportConfig()) == []
    assert group.loss is not None and group.verdict is not None
    assert group.loss.mean == pytest.approx(0.01)
    assert group.verdict.outcome == UNDECIDED  # three draws whose losses are 0, 1 and 2 points


def test_a_seed_that_ran_twice_is_one_draw():
    losses = [("a", 0, "0"), ("b", 10, "1"), ("c", 10, "1")]
    cells = [(name, predictions(lost=lost), {"seed": seed}) for name, lost, seed in losses]
    (group,) = spread.measure_spreads(sweep(*cells), ReportConfig())
    assert group.loss is not None
    assert (group.draws, group.mean) == (2, pytest.approx(0.895))
    assert group.loss.mean == pytest.approx(0.005)


def test_seeds_are_no_separate_hypotheses():
    """Each of ten files is undecided among ten, and the recipe of which they are draws passes."""
    near = predictions(lost=4)
    selected = select(
        [sweep(*[(str(n), near, {"seed": str(n)}) for n in range(10)])], ReportConfig()
    )[0]
    assert {record.verdict for record in selected.family.records} == {UNDECIDED}
    (recipe,) = spread.measure_spreads(selected.family, ReportConfig())
    assert recipe.verdict is not None and recipe.verdict.outcome == PASS
    text = page.to_markdown([selected], {})
    assert "another calibration draw makes another file" in text
    assert "| +0.40 points (+0.01 to +0.79) | 0.20 | 0.00 | pass |" in text


def test_what_a_sweep_varies_becomes_a_column_and_part_of_the_label():
    found = sweep(("a", predictions(), {"seed": "1"}), ("b", predictions(), {"seed": "2"}))
    assert table.make(found.records).heads[4] == "seed"
    assert [cell.label for cell in found.cells] == [
        "onnx int8 minmax per tensor seed=1",
        "onnx int8 minmax per tensor seed=2",
    ]


def test_figures_are_drawn_where_there_is_data(found):
    assert class_impact(found) is not None
    (size,) = trade_off.panels(*select([found], LIMITS))
    assert [point.kind for point in size.points] == ["fail", "pass", "fp32", "fp32"]
    assert activation_ranges(found, "onnx") is None
    assert weight_ranges(found) is None
    ranges = {"activations": {"conv": [-1.0, 2.0]}, "weights": {"conv": [-0.5, 0.25]}}
    full = replace(found, cells=tuple(replace(cell, ranges=ranges) for cell in found.cells))
    assert activation_ranges(full, "onnx") is None  # with one method, nothing to compare
    other = amend(full.cells[0], params={"calib": "mse"})
    both = replace(full, cells=(*full.cells, other))
    assert activation_ranges(both, "onnx") is not None
    figure = weight_ranges(full)
    assert figure is not None
    assert [text.get_text() for text in figure.axes[0].texts] == [" -0.50 to 0.25"]
    empty = replace(found, cells=())
    assert class_impact(empty) is None
    assert trade_off.panels(*select([empty], LIMITS)) == []


def families() -> list[Family]:
    """Two runs on one set of images, one on another, one that came to none."""
    made = [
        *sweep(("a", predictions(lost=30), {}), ("b", predictions(won=2), {"seed": "2"})).cells,
        *sweep(("c", predictions(won=40), {"data": "wild pets", "counts/total": 998.0})).cells,
    ]
    pairs = zip(made, "112", strict=True)
    made = [amend(cell, tags={"test_digest": digest * 64}) for cell, digest in pairs]
    made.append(unmeasured("d", "failed", "boom"))
    grouped = group_by_samples([cell.record for cell in made])
    cells = {cell.record.run_id: cell for cell in made}
    return [make_family([cells[record.run_id] for record in family]) for family in grouped]


def test_each_set_of_images_has_a_section_of_its_own():
    images = [f"set{n}_{name}" for n in "12" for name in ("trade_offs.svg", "ranges_onnx.png")]
    found = families()
    text = page.to_markdown(select(found, LIMITS), images)
    assert "scored on 2 different sets of samples" in text
    assert re.findall("^## (.*)$", text, re.M) == [
        "pets, net, 1,000 test samples",
        "wild pets, net, 998 test samples",
    ]
    first, second = text.split("\n## ")[1:]
    for number, section in (("1", first), ("2", second)):
        assert section.count("### Summary") == section.count("### Recommendation") == 1
        assert re.findall(r"\]\(set(\d)_", section) == [number] * 2
    assert "3 combinations requested: 2 measured, 1 failed" in first
    assert "boom" in first and "boom" not in second
    assert "onnx int8 minmax per tensor seed=2** | 90.20%, against FP32 +0.20 points" in first
    assert "corrected for 2 comparisons" in first
    assert "90.20%" not in second and "94.00%" not in first
    assert "comparisons (Holm)" not in second


def test_one_set_of_images_needs_no_heading(found):
    text = page.to_markdown(select([found], LIMITS), {})
    assert text.startswith("# Quantization report: pets, net, 1,000 test samples\n\n## Summary\n")
    assert "sets of samples" not in text


def test_a_store_without_a_sweep_is_a_wrong_input(tmp_path):
    with pytest.raises(ConfigError, match="experiment: got 'resnet8ptq', which has no run"):
        page.main([f"root={tmp_path}"])


def test_a_sweep_whose_folder_is_elsewhere_is_reported_in_this_one(
    own_store, tmp_path, monkeypatch
):
    folder, here = tmp_path / "sweep", tmp_path / "here"
    for path in (folder / "0", here):
        path.mkdir(parents=True)
    parent_id = start_parent(own_store, "sweep", folder, {})
    with start_run(own_store, "cell", folder / "0", parent_id) as run:
        run.log_config(make_config("data=shapes", "backend=torch", "dtype=uint8"))
        run.log_result(RunResult("unsupported", "no such kernel"))
    monkeypatch.chdir(here)
    page.main([f"root={tmp_path / 'mlruns'}"])  # without its sweep.json it is not that folder
    assert "no such kernel" in (here / "report.md").read_text()
    assert not (folder / "report.md").exists()
    SharedSweep(own_store, parent_id, folder).save()
    page.main([f"root={tmp_path / 'mlruns'}"])
    assert (folder / "report.md").read_text() == (here / "report.md").read_text()


@dataclass
class Logged:
    """A sweep of three runs in a store: `a` loses no images, `b` and `c` 12 of 1,000."""

    store: Store
    folder: Path
    parent_id: str
    runs: dict[str, str]

    def artifact(self, run: str, name: str) -> Path:
        run_id = self.runs.get(run, self.parent_id)
        return Path(history.load_run(self.store, run_id).artifact_uri.removeprefix("file://"), name)

    def report(self, *words: str) -> str:
        root = self.store.uri.removeprefix("sqlite:///").removesuffix("/mlflow.db")
        page.main([f"root={root}", f"folder={self.folder}", *words])
        return (self.folder / "report.md").read_text()


@pytest.fixture
def logged(own_store: Store, tmp_path: Path) -> Logged:
    folder = tmp_path / "sweep"
    folder.mkdir()
    parent_id = start_parent(own_store, "sweep", folder, {})
    losses = {"a": 0, "b": 12, "c": 12}
    runs = {
        name: log_measured(own_store, folder / name, parent_id, number, lost=lost)
        for number, (name, lost) in enumerate(losses.items())
    }
    return Logged(own_store, folder, parent_id, runs)


def outcomes(report: str) -> list[str]:
    """Return the verdict of each run, or its status without one."""
    lines = [line for line in report.splitlines() if line.startswith("| onnx | int8")]
    rows = [line.removesuffix(" |").split(" | ") for line in lines]
    return [row[-3].split(" ")[0] or row[-1] for row in rows]


def test_a_report_made_again_takes_the_limits_of_the_runs(logged):
    text = logged.report()
    assert "at most 3 points worse than FP32" in text
    assert outcomes(text) == ["pass"] * 3
    assert "at most 1 point worse" in logged.report("max_drop=0.01")
    with pytest.raises(ConfigError, match=r"^max_drop: got 2.0, "):
        logged.report("max_drop=2")


READ = ("predictions.npz", "ranges.json", "classes.png", "confusion.png")


ANSWER = {"true": "cat", "fp32": "cat", "model": "<b>dog</b>", "text": "<i>how</i>"}


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ({"wrong": 100, "lost": 1, "examples": [ANSWER]}, True),
        ({"wrong": 100, "lost": 1, "examples": [{**ANSWER, "png": "PHN2Zz4="}]}, False),
        ({"wrong": 100, "lost": 1, "examples": [{"true": "cat"}]}, False),
        ([1], False),
    ],
)
def test_wrong_answers_of_a_store_are_text_and_pictures_or_one_line(logged, caplog, content, shown):
    for name in "abc":
        logged.artifact(name, wrong_examples.FILE).write_text(json.dumps(content))
    logged.report()
    text = (logged.folder / "report.html").read_text("utf-8")
    assert ("&lt;i&gt;how&lt;/i&gt;" in text) is shown
    assert "<i>how" not in text and "<b>dog" not in text
    warnings = [entry.getMessage() for entry in caplog.records if entry.levelname == "WARNING"]
    assert [wrong_examples.FILE in warning for warning in warnings] == [True] * (not shown)


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"{")])
def test_a_lost_file_is_one_line_and_the_rest_of_the_report(logged, caplog, name, damage):
    whole = logged.report()
    assert [n for n in READ[2:] if f"]({n})" not in whole] == []
    damage(logged.artifact("a", name))
    caplog.clear()
    text = logged.report()
    lost = name == "predictions.npz"
    assert outcomes(text) == ["failed" if lost else "pass", "pass", "pass"]
    [warning] = [entry.getMessage() for entry in caplog.records if entry.levelname == "WARNING"]
    assert name in warning and logged.runs["a"] in warning
    assert (f"]({name})" in text) is False


def test_a_lost_run_still_counts_as_a_comparison(logged):
    """Else the others would pass more easily than beside it."""
    assert outcomes(logged.report("max_drop=0.021")) == ["pass", "undecided", "undecided"]
    logged.artifact("c", "predictions.npz").unlink()
    assert outcomes(logged.report("max_drop=0.021")) == ["pass", "undecided", "failed"]


WITHOUT_FP32 = {"single": {"a": [1.0]}, "batch": {}, "batch_size": 1, "threads": 1}
WITHOUT_A_BLOCK = {**WITHOUT_FP32, "single": {"a": [1.0, 2.0], "onnx fp32": [1.0]}}
WITHOUT_A_BATCH = {
    **WITHOUT_FP32,
    "single": {"a": [1.0], "onnx fp32": [1.0]},
    "batch": {"onnx fp32": [1.0]},
}


@pytest.mark.parametrize("damaged", ["{}", WITHOUT_FP32, WITHOUT_A_BLOCK, WITHOUT_A_BATCH])
def test_a_damaged_timing_of_the_finalists_is_left_out(logged, caplog, damaged):
    text = json.dumps([damaged]).replace('"a"', f'"{logged.runs["a"]}"')
    (logged.folder / FILE).write_text(text)
    logged.store.client.log_artifact(logged.parent_id, str(logged.folder / FILE))
    assert "## All runs" in logged.report()
    assert f"{FILE} is damaged" in caplog.text
