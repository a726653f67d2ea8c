"""Prints the result of a run or a sweep: tables, verdict, recommendations, paths of files."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from resnet8ptq.core.console import say, stdout
from resnet8ptq.report import notes, table
from resnet8ptq.report.answer import Explanation, explain, say_verdict
from resnet8ptq.report.families import Family, headings_of
from resnet8ptq.report.recommend import ModelSelection, families_of, say_remedy, why_none
from resnet8ptq.report.table import VOID
from resnet8ptq.report.verdicts import FAIL
from resnet8ptq.tracking.mlflow_store.store import Store

PIPE_WIDTH = 240  # characters of the widest table
REPORT = "report.html"
ALL = "all"  # the word in `report.columns`
_NARROW = 100  # characters of a line, below which the table of six columns is compact


def print_families(families: Sequence[Family], console: Console | None = None) -> None:
    """Print a table with notes for each family of runs; by default to stdout."""
    console = stdout(console, PIPE_WIDTH)
    if len(families) > 1:
        say(console, notes.FAMILIES_NOTE.format(count=len(families)))
    titles = headings_of(families)
    for heading, family in zip(titles, families, strict=True):
        _print_family(heading, family, console)


def _print_family(heading: str, family: Family, console: Console) -> None:
    records = family.records
    more = family.limits.columns
    every = table.make(records)
    rows, cut = table.shorten(records, every)

    # Choose the columns, the notes and the width by `report.columns`
    if ALL in more:
        shown = rows.without_empty()
        collect = notes.collect
        narrow = PIPE_WIDTH
    else:
        shown = table.brief(records, rows, more)
        collect = notes.collect_warnings
        narrow = _NARROW
    styles = [table.style_of(row.status) for row in shown.rows]
    titled = replace(shown, title=heading)
    titled.print(console, styles=styles, compact=console.width < narrow)

    # Print lines about hidden rows and unknown columns, then the notes
    if cut:
        say(console, f"{cut} All: report.html, runs.csv.")
    unknown = {*more} - {*every.heads, ALL}
    if unknown:
        got = ", ".join(sorted(unknown))
        known = ", ".join(head for head in every.heads if head not in shown.heads)
        say(console, f"report.columns: got {got}, expected {ALL} or {known}")
    for note in collect(family):
        say(console, note)


def print_verdict(chosen: Sequence[ModelSelection], run_id: str) -> str:
    """Print the verdict of a run in words, after a fail also `say_remedy`; return the verdict.

    Return an empty text, and print nothing, without a measured model or if the verdict is void. A
    note below the table explains a void verdict.
    """
    for selected in chosen:
        for cell in selected.family.measured:
            record = cell.record
            if record.run_id != run_id or record.verdict is None or record.verdict == VOID:
                continue
            console = stdout(None, PIPE_WIDTH)
            say(console, f"Verdict: {say_verdict(record)}")
            remedy = say_remedy([cell]) if record.verdict == FAIL else ""
            if remedy:
                say(console, f"  {remedy}")
            return record.verdict
    return ""


def print_paths(folder: Path, store: Store) -> None:
    """Print the folder, the path of its report if any, and how to browse the runs in MLflow."""
    print(f"Files:  {folder}")
    report = folder / REPORT
    if report.exists():
        print(f"Report: {report}")
    print(f"Browse: {store.ui_command}")


def print_answers(chosen: Sequence[ModelSelection]) -> None:
    """Print the recommended models of each family with a measured run, or why there is none.

    The first model, usually that of the headline, is printed last, with verdict, measurements and
    command.
    """
    console = stdout(None, PIPE_WIDTH)
    titles = headings_of(families_of(chosen))
    for heading, selected in zip(titles, chosen, strict=True):
        if not selected.family.measured:
            continue
        title = ""  # prints an empty line; only several families need headings
        if len(chosen) > 1:
            title = f"\n{heading}"
        say(console, title)

        # Print the models for other uses, or the reasons
        answers = explain(selected)
        for answer in answers[1:]:
            say(console, _say_other_use(answer, selected.apart))
        if not answers:
            say(console, " ".join(["No model is recommended.", *why_none(selected)]))
            continue

        # Print the first model last, above the prompt
        best = answers[0]
        say(console, f"{best.headline}.")
        say(console, f"  {best.verdict} {best.note}".rstrip())
        say(console, f"  {'; '.join(best.facts)}")
        if best.hint:
            say(console, f"  {best.hint} {best.untried}".rstrip())
        if best.command:
            say(console, f"  {best.command}")


def _say_other_use(answer: Explanation, apart: bool) -> str:
    """Return the line of a recommended model that is not the first one.

    Args:
        apart: see `ModelSelection.apart`.
    """
    uses = "; ".join(answer.uses)
    text = f"{uses}: {answer.label}"
    if answer.outcome:
        text += f" ({answer.outcome})"
    # The best model on the selection samples may not be the best row of the table.
    is_best = any(use.startswith("best ") for use in answer.uses)
    if is_best and apart:
        text += "; chosen on other samples than the table's"
    return text
