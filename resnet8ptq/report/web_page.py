"""`report.html`: the answer, the figure and the table on one page; statistics and methods below.

The file stands alone: figures, style and script are inside, and its content security policy blocks
everything else. Texts of runs are escaped.
"""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as resources

from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

from resnet8ptq.core import templates
from resnet8ptq.report import table, trade_off, verdicts
from resnet8ptq.report.answer import Answer, explain
from resnet8ptq.report.facts import best_first
from resnet8ptq.report.recommend import ModelSelection, why_none
from resnet8ptq.report.trade_off import Panel

FOLD = re.compile(r"<details><summary>[^<>\n]*</summary>|</details>")


@dataclass(frozen=True)
class Row:
    """A row of the table of runs.

    Attributes:
        key: the number of the run in its family, by which the figure finds it; `fp32` for FP32.
        more: shown on demand: it is not among the best of many.
    """

    key: str
    framework: str
    cells: list[str]
    more: bool


@dataclass(frozen=True)
class Section:
    """The part of the page on one family of runs.

    Attributes:
        heading: empty for a single family.
        reasons: why nothing is recommended.
        heads, numeric: of the table of runs; those of numbers.
        details: statistics and methods, as HTML.
    """

    heading: str
    answers: list[Answer]
    reasons: list[str]
    panels: list[Panel]
    heads: list[str]
    numeric: list[str]
    rows: list[Row]
    details: str


def to_html(
    headings: Sequence[str],
    chosen: Sequence[ModelSelection],
    panels: Sequence[list[Panel]],
    details: Sequence[str],
    images: Mapping[str, bytes],
    pooled: str = "",
) -> str:
    """Return the page.

    Args:
        headings, chosen, panels, details: of each family; the details in Markdown.
        images: the PNG files that the details name.
        pooled: the verdicts over several families, in Markdown.
    """
    parts = zip(headings, chosen, panels, details, strict=True)
    sections = [
        _section(heading if len(headings) > 1 else "", selected, drawn, render(text, images))
        for heading, selected, drawn, text in parts
    ]
    script = _script()
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return templates.load("resnet8ptq.report", "report.html.j2").render(
        title="; ".join(headings),
        sections=sections,
        pooled=render(pooled, {}),
        width=trade_off.WIDTH,
        height=trade_off.HEIGHT,
        script=script,
        script_hash=f"sha256-{allowed}",
    )


@cache
def _script() -> str:
    return resources("resnet8ptq.report").joinpath("templates/report.js").read_text("utf-8")


def _section(heading: str, selected: ModelSelection, panels: list[Panel], details: str) -> Section:
    family, records = selected.family, selected.family.records
    judged = verdicts.in_words([family], selected.limits, [selected.judged])
    lines = table.rows(records, judged)
    heads, shown = table.without_empty(table.columns(records), lines)
    first = len(lines) - len(records)  # FP32's rows come before those of the runs
    order = best_first(records) if len(records) > table.MANY else list(range(len(records)))
    rows = [Row("fp32", line[0], line, False) for line in shown[:first]]
    for rank, index in enumerate(order):
        more = len(records) > table.MANY and rank >= table.FIRST
        rows.append(Row(str(index), lines[first + index][0], shown[first + index], more))
    answers = explain(selected)
    measured = bool(family.measured)
    reasons = [] if answers else why_none(selected) if measured else ["No model was measured."]
    return Section(heading, answers, reasons, panels, heads, table.numeric(records), rows, details)


def render(markdown: str, images: Mapping[str, bytes]) -> str:
    """Return Markdown as HTML with its figures inside; all HTML but that of folds is escaped."""
    parser = MarkdownIt("commonmark", {"html": True}).enable("table").disable("html_inline")
    parser.add_render_rule("html_block", _render_fold)
    setattr(parser, "validateLink", lambda url: url in images)  # noqa: B010 # nothing else
    body = parser.render(markdown)
    for name, image in images.items():  # not before: the parser would read it all
        data = base64.b64encode(image).decode()
        body = body.replace(f'src="{name}"', f'src="data:image/png;base64,{data}"')
    return body.replace("<table>", '<div class="wide"><table>').replace(
        "</table>", "</table></div>"
    )


def _render_fold(renderer: RendererHTML, tokens: Sequence[Token], index: int, *_: object) -> str:
    """Keep the HTML of folded sections, and escape all other."""
    text = tokens[index].content
    return text if FOLD.fullmatch(text.strip()) else escapeHtml(text)
