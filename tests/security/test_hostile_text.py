"""One nasty text through everything that is shown: page, Markdown, tables, CSV, figures."""

import base64
import csv
import hashlib
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.core import figures, files
from resnet8ptq.experiment.layers import sensitivity_table
from resnet8ptq.experiment.layers.sensitivity import LayerSensitivity, SensitivityResult
from resnet8ptq.report import table, terminal
from resnet8ptq.report.families import Family, make_family
from resnet8ptq.report.pages import page, trade_off
from resnet8ptq.report.pages import plots as sweep_plots
from resnet8ptq.report.selection import select
from resnet8ptq.tasks.classification import ACCURACY
from resnet8ptq.tasks.scoring import class_plots
from resnet8ptq.tasks.scoring.metric import Metric
from tests.helpers.cells import amend, amend_family, predictions, sweep, unmeasured
from tests.helpers.pages import to_page

LIMITS = ReportConfig()

NASTY = (
    '</td><script>alert("1")</script> | $\\frac{x$ $y$ [red]b[/red] [a](javascript:x) '
    "![i](http://x/y.png) <img src=x onerror=y> &lt;s&gt; `c` **d** \r\n\r\n# head\n| e | f |\n"
    "\x1b[31mred\x1b]0;title\x07 \u202egnp.exe \u2028 \x00 ../../x *?"
)
SIGNS = ("\x1b", "\x07", "\x00", "\u202e", "\r")


@pytest.fixture
def found() -> Family:
    """A sweep in whose records every text that may come from outside is the nasty one."""
    settings = {"model.name": NASTY, "calib": NASTY, "seed": NASTY}
    whole = sweep(
        ("a", predictions(lost=30, label=1), {**settings, "nodes_to_exclude": f"[{NASTY}]"}),
        ("b", predictions(won=2), {**settings, "backend": NASTY, "nodes_to_exclude": "[]"}),
    )
    cells = [*whole.cells, unmeasured("c", "unsupported", NASTY), unmeasured("d", "failed", NASTY)]
    names = {"model": NASTY, "data": NASTY}
    return make_family([replace(amend(cell, params=names), label=NASTY) for cell in cells])


class Tags(HTMLParser):
    """Collects what a browser would see as elements and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        assert tag != "a"
        assert tag != "img" or str(dict(attrs)["src"]).startswith("data:")

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script" and self.cdata_elem == "script":
            self.scripts.append(data)


def sensitivity_of(metric: Metric, *layers: LayerSensitivity) -> SensitivityResult:
    return SensitivityResult(
        "ok",
        **{"layers": layers, "whole": layers[0], "mode": "one_at_a_time", "output": "logits"},
        **{"metric": metric, "samples": 9, "fp32_value": 0.9, "fp32_size_bytes": 9},
    )


def test_the_page_has_no_elements_but_its_own(found):
    markdown = page.to_markdown(select([found], LIMITS), {"class_impact.png": b"x"})
    html = to_page(found, figures={"class_impact.png": b"x"})
    seen = Tags(html)
    assert not seen.tags & {"iframe", "object", "form", "base", "link", "a"}
    assert len(seen.scripts) == 1  # the page's own, whose hash its policy names
    digest = base64.b64encode(hashlib.sha256(seen.scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html
    assert not {name for name in seen.attributes if name.startswith("on")}
    assert len(re.findall("<h1>", html)) == 1  # no heading of the text's own
    for sign in SIGNS:
        assert sign not in html
        assert sign not in markdown


def test_rows_of_the_markdown_table_keep_their_cells(found):
    text = page.to_markdown(select([found], LIMITS), {})
    rows = [line for line in text.split("## All runs")[1].splitlines() if line.startswith("|")]
    rows = rows[: 2 + len(table.make(found.records).lines)]
    counts = {len(re.findall(r"(?<!\\)\|", row)) for row in rows if not row.startswith("|---")}
    assert len(counts) == 1
    assert len(rows) == 2 + len(table.make(found.records).lines)


def shown(records: Family) -> str:
    out = io.StringIO()
    terminal.print_families([records], Console(file=out, width=2000, color_system=None))
    return out.getvalue()


def test_the_terminal_gets_the_text_as_it_is_and_nothing_to_act_on(found):
    text = shown(found)
    for sign in SIGNS:
        assert sign not in text
    assert "[red]b[/red]" in text  # no markup


def test_a_layer_s_name_steers_no_terminal():
    layer = LayerSensitivity(NASTY, NASTY, 1.0, 0.1, 1, 1, 1)
    result = sensitivity_of(ACCURACY, layer)
    out = io.StringIO()
    sensitivity_table.print_table(result, NASTY, Console(file=out, width=2000, color_system=None))
    for sign in SIGNS:
        assert sign not in out.getvalue()
    assert "[red]b[/red]" in out.getvalue()
    assert sensitivity_table.to_csv(result)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:constrained_layout not applied")  # no room for such names
@pytest.mark.parametrize("name", ["$\\frac{$", "\\$x", "x" * 10_000])
def test_figures_take_any_name(found, name):
    paired = found.cells[0].paired
    assert paired is not None
    hits = paired.model, paired.baseline
    names = [f"{name}{n}" for n in range(10)]
    for figure in (
        class_plots.classes(*hits, names, name),
        class_plots.confusion(*hits, names, name),
    ):
        assert figures.to_png(figure).startswith(b"\x89PNG")
        texts = [label.get_text() for label in figure.axes[0].get_xticklabels()]
        assert max(map(len, texts)) <= 170


@pytest.mark.filterwarnings("ignore:constrained_layout not applied")
def test_figures_of_a_sweep_take_any_text(found):
    text = NASTY.replace("\u202e", "")  # for which the font has no glyph, and warns
    ranges = {"activations": {text: [0.0, 1.0]}, "weights": {text: [-1.0, 1.0]}}
    cells = tuple(replace(cell, label=text, ranges=ranges) for cell in found.cells)
    cells += (amend(cells[0], params={"calib": f"{text} too"}),)
    for draw in (sweep_plots.class_impact, sweep_plots.weight_ranges):
        figure = draw(Family(cells))
        assert figure is None or figures.to_png(figure).startswith(b"\x89PNG")
    panels = trade_off.panels(*select([Family(cells)], LIMITS))
    assert panels
    ElementTree.fromstring(trade_off.to_svg(panels))  # well-formed
    figure = sweep_plots.activation_ranges(Family(cells), "onnx")
    assert figure is not None
    assert figures.to_png(figure).startswith(b"\x89PNG")
    layer = LayerSensitivity(text, text, 1.0, 0.1, 1, 1, 1)
    metric = Metric("m", text)
    result = sensitivity_of(metric, layer, layer)
    layers = sensitivity_table.draw_sensitivity(result, text)
    assert figures.to_png(layers).startswith(b"\x89PNG")


def test_files_of_the_report_stay_in_its_folder(found):
    ranges = {"activations": {"x": [0.0, 1.0]}, "weights": {}}
    named = amend_family(found, params={"backend": "../../x", "calib": "minmax"})
    cells = tuple(replace(cell, label="x", ranges=ranges) for cell in named.cells)
    family = Family((*cells, amend(cells[0], params={"calib": "mse"})))
    drawn = page._draw(*select([family], LIMITS))
    assert any(name.startswith("ranges_") for name in drawn)
    assert not any("/" in name for name in drawn)


def test_a_spreadsheet_finds_no_formula(found):
    values = ["=cmd()", "+1+cmd()", "-x", "@SUM(1)", "\tx", "-1.5", "+2e-3", "x=1", "", "-inf"]
    text = files.to_csv([[*values, -1.5, None, np.float64(-2)]])
    [row] = csv.reader(io.StringIO(text))
    assert [bool(cell.startswith("'")) for cell in row[:10]] == [True] * 5 + [False] * 5
    assert row[10:] == ["-1.5", "", "-2.0"]
    assert list(csv.reader(io.StringIO(table.to_csv(found.records))))


@given(st.text(max_size=8))
def test_no_cell_of_a_csv_file_steers_a_terminal(text):
    """ESC, and marks that turn the direction of text, stand raw in no file that is written."""
    for name in (text, f"\x1b[2J{text}", f"\u202e{text}\u2066", f"\ud800{text}"):
        written = files.to_csv([[name, 1.5]])
        assert all(c.isprintable() or c == "\n" for c in written)
        written.encode()


@pytest.mark.parametrize("formula", ["\uff1d1+1", " =1+1", "\u00a0@SUM(A1)", "\n+1+1"])
def test_no_disguised_formula(formula):
    [[cell]] = csv.reader(io.StringIO(files.to_csv([[formula]])))
    assert cell.startswith("'")
