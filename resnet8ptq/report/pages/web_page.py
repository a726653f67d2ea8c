"""Makes `report.html`: answer, figure and table, wrong answers, statistics, errors by layer.

The file is self-contained: figures, style and script are inside, and a content security policy
blocks everything else. Texts of runs are escaped.
"""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files as resources
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

from resnet8ptq.core import templates
from resnet8ptq.core.table import Table
from resnet8ptq.report import notes, table
from resnet8ptq.report.answer import explain
from resnet8ptq.report.families import best_first, records_of
from resnet8ptq.report.pages import trade_off
from resnet8ptq.report.pages.layer_errors import HeatMap
from resnet8ptq.report.pages.trade_off import Panel
from resnet8ptq.report.pages.wrong_answers import WrongAnswers
from resnet8ptq.report.recommend import ModelSelection, why_none
from resnet8ptq.report.table import Row

SHORT = ("speedup",)  # in addition to the terminal's columns
FOLD = re.compile(r"<details><summary>[^<>\n]*</summary>|</details>")


def to_html(
    headings: Sequence[str],
    chosen: Sequence[ModelSelection],
    panels: Sequence[list[Panel]],
    details: Sequence[str],
    wrong: Sequence[WrongAnswers | None],
    images: Mapping[str, bytes],
    heat_maps: Sequence[HeatMap] = (),
) -> str:
    """Return the page as HTML.

    Args:
        headings, chosen, panels, details, wrong: one for each family; the details are Markdown.
        images: the image files in the details, by name.
        heat_maps: the errors by layer, for all families together.
    """
    parts = zip(headings, chosen, panels, details, wrong, strict=True)
    sections = []
    for heading, selected, drawn, text, answers in parts:
        section = _section(selected, drawn)
        section["heading"] = ""  # the title of the page names a single family
        if len(headings) > 1:
            section["heading"] = heading
        section["details"] = render(text, images)
        section["wrong"] = answers
        sections.append(section)

    # The page's policy names the hash of this script, so that nothing else may run
    script = _script()
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return templates.load("resnet8ptq.report.pages", "report.html.j2").render(
        title="; ".join(headings),
        sections=sections,
        heat_maps=heat_maps,
        width=trade_off.WIDTH,
        height=trade_off.HEIGHT,
        script=script,
        script_hash=f"sha256-{allowed}",
    )


@cache
def _script() -> str:
    return resources("resnet8ptq.report.pages").joinpath("templates/report.js").read_text("utf-8")


def _section(selected: ModelSelection, panels: list[Panel]) -> dict[str, Any]:
    """Return the values of the template for one family: answers, figure, table and notes."""
    family = selected.family
    records = selected.family.records
    # The table shows few columns at first, and all on demand
    whole = table.make(records)
    shown = table.brief(records, whole, SHORT).without_empty()
    every = whole.without_empty()

    # Without an answer, say why
    answers = explain(selected)
    reasons: list[str] = []
    if not answers:
        reasons = ["No model was measured."]
        if family.measured:
            reasons = why_none(selected)
    return {
        "answers": answers,
        "reasons": reasons,
        "panels": panels,
        "heads": shown.heads,
        "all_heads": every.heads,
        "extra": SHORT,
        "numeric": whole.numeric,
        "rows": _make_rows(whole, shown, every),
        "notes": notes.collect_warnings(family),
    }


def _make_rows(whole: Table[Row], shown: Table[Row], every: Table[Row]) -> list[dict[str, Any]]:
    """Return the rows of the table: the cells of `shown`, and those of `every` to show on demand.

    With more than `table.MANY` runs, the best ones come first, and `more` marks the rows to show on
    demand.
    """
    runs = records_of(table.rows_of_runs(whole))
    first = len(whole.rows) - len(runs)  # FP32's rows come before those of the runs
    many = len(runs) > table.MANY
    order = list(range(len(whole.rows)))
    if many:
        order[first:] = [first + index for index in best_first(runs)]

    # Number the rows, so that the script can link them to the figure
    short_lines = shown.lines
    long_lines = every.lines
    rows = []
    for rank, index in enumerate(order, -first):
        key: int | str = "fp32"
        if rank >= 0:
            key = index - first
        row = {
            "key": key,  # links the row to the figure
            "framework": whole.rows[index].names[0],
            "cells": short_lines[index],
            "all": long_lines[index],
            "more": many and rank >= table.FIRST,
        }
        rows.append(row)
    return rows


def render(markdown: str, images: Mapping[str, bytes]) -> str:
    """Return Markdown as HTML with inline figures.

    HTML in the Markdown is escaped, except the tags of folded sections. Links to anything but the
    `images` stay text.
    """
    parser = MarkdownIt("commonmark", {"html": True}).enable("table").disable("html_inline")
    parser.add_render_rule("html_block", _render_fold)
    setattr(parser, "validateLink", lambda url: url in images)  # noqa: B010 # nothing else
    body = parser.render(markdown)
    for name, image in images.items():  # last, so that the parser does not read the data
        data = base64.b64encode(image).decode()
        body = body.replace(f'src="{name}"', f'src="data:image/png;base64,{data}"')
    return body.replace("<table>", '<div class="wide"><table>').replace(
        "</table>", "</table></div>"
    )


def _render_fold(renderer: RendererHTML, tokens: Sequence[Token], index: int, *_: object) -> str:
    """Return the tags of a folded section unchanged, and all other HTML escaped."""
    text = tokens[index].content
    if FOLD.fullmatch(text.strip()):
        return text
    return escapeHtml(text)
