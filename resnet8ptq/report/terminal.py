"""The result of a run or a sweep in the terminal: tables, recommendations, where the files are."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from resnet8ptq.core.console import print_table, say, stdout
from resnet8ptq.report import notes, table
from resnet8ptq.report.facts import group, headings
from resnet8ptq.report.recommend import Selection
from resnet8ptq.report.table import NOTHING_JUDGED, Judged
from resnet8ptq.tracking.record import RunRecord
from resnet8ptq.tracking.store import Store

PIPE_WIDTH = 240  # of the widest table
REPORT = "report.html"
_NARROW = 120  # columns of a terminal, below which a table is compact
_WIDE = ("interval", "ms")  # columns left out of a compact table


def print_runs(
    records: Sequence[RunRecord], console: Console | None = None, judged: Judged = NOTHING_JUDGED
) -> None:
    """Print a table with its notes for each family of runs to stdout."""
    console = stdout(console, PIPE_WIDTH)
    families = group(records)
    if len(families) > 1:
        say(console, notes.FAMILIES_NOTE.format(count=len(families)))
    for heading, family in zip(headings(families), families, strict=True):
        _print_family(heading, family, console, judged)


def _print_family(
    heading: str, records: Sequence[RunRecord], console: Console, judged: Judged
) -> None:
    compact, numbers = console.width < _NARROW, table.numeric(records)
    shown, cut = table.shorten(records, table.rows(records, judged))
    heads, lines = table.without_empty(table.columns(records), shown, _WIDE if compact else ())
    print_table(
        console,
        heads,
        lines,
        title=heading,
        right=[column for column, head in enumerate(heads) if head in numbers],
        styles=["" if line[-1] in ("ok", "baseline") else "yellow" for line in lines],
        compact=compact,
    )
    if cut:
        say(console, f"{cut} All: report.html, runs.csv.")
    for note in notes.collect(records, judged):
        say(console, note)


def print_paths(folder: Path, store: Store) -> None:
    """Print the paths of the files and of the report, and the address to browse the runs."""
    print(f"Files:  {folder}")
    if (report := folder / REPORT).exists():
        print(f"Report: {report}")
    print(f"Browse: {store.ui_command}")


def print_recommendations(chosen: Sequence[Selection]) -> None:
    """Print a line for each use with the model to deploy, and the command for the first."""
    console = stdout(None, PIPE_WIDTH)
    titles = headings([selected.family.records for selected in chosen])
    for heading, selected in zip(titles, chosen, strict=True):
        if not selected.family.measured:
            continue
        begin = "Recommended" + f" for {heading}" * (len(chosen) > 1)
        if selected.recommendations and selected.apart:
            begin += ", chosen on other samples than the table's (the report has both)"
        say(console, f"{begin}:{'' if selected.recommendations else ' nothing; see the report'}")
        for use in selected.recommendations:
            say(console, f"  {use.use}: {use.label}{f' ({use.verdict})' * bool(use.verdict)}")
        if selected.timing is not None:
            say(console, "  the fastest were timed again, in turns")
        commands = [use.command for use in selected.recommendations if use.command]
        for command in commands[:1]:
            say(console, f"Deploy: {command}")
