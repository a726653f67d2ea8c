"""Writes `report.html`: the answer, the figure and the table, then statistics and methods.

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
        images: the PNG files in the details.
        heat_maps: the errors by layer.
    """
    parts = zip(headings, chosen, panels, details, wrong, strict=True)
    sections = []
    for heading, selected, drawn, text, answers in parts:
        section = _section(selected, drawn)
        section["heading"] = heading if len(headings) > 1 else ""
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
    """Return the answers, the figure and the table of one family of runs."""
    family = selected.family
    records = selected.family.records
    whole = table.make(records)
    shown = table.brief(records, whole, SHORT).without_empty()
    every = whole.without_empty()
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
    """Return the rows of the short table `shown`, each with all columns of `every` on demand.

    If there are many runs, the best ones come first, and the others are shown on demand.
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
    """Return Markdown as HTML with inline figures; escape HTML in it, except folded sections."""
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
    """Return the HTML of folded sections unchanged, and all other HTML escaped."""
    text = tokens[index].content
    if FOLD.fullmatch(text.strip()):
        return text
    return escapeHtml(text)
