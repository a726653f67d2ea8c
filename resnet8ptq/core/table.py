"""Tables: one list of typed columns, rendered for a terminal, a CSV file and Markdown.

SIZES = (
    Column("file", lambda path: path.name, key="file"),
    number("kB", lambda path: path.stat().st_size / 1000, ".1f"),
)
Table(SIZES, paths, "Files").print(console)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from rich.console import Console

from resnet8ptq.core import files
from resnet8ptq.core.console import print_table

Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column.

    Attributes:
        head: the heading for people; a column without one is only in the file.
        value: returns the value of a row; None is shown as an empty cell.
        style: a format, such as `.1f`, or a function that returns the value as text.
        key: the name in a CSV file; a column without one is only for people.
        is_number: whether it is aligned to the right.
    """

    head: str
    value: Callable[[Row], Any]
    style: str | Callable[[Any], str] = ""
    key: str = ""
    is_number: bool = False

    def show(self, row: Row) -> str:
        """Return the value of a row as text."""
        value = self.value(row)
        if value is None:
            return ""
        return self.style(value) if callable(self.style) else format(value, self.style)


def number(head: str, value: Callable[[Row], Any], style: Any = "", key: str = "") -> Column[Row]:
    """Return a column that is aligned to the right."""
    return Column(head, value, style, key, is_number=True)


@dataclass(frozen=True)
class Table(Generic[Row]):
    """Rows, each with a cell for every column."""

    columns: Sequence[Column[Row]]
    rows: Sequence[Row]
    title: str = ""

    @property
    def heads(self) -> list[str]:
        """The headings."""
        return [column.head for column in self.columns if column.head]

    @property
    def lines(self) -> list[list[str]]:
        """The cells of each row as texts."""
        shown = [column for column in self.columns if column.head]
        return [[column.show(row) for column in shown] for row in self.rows]

    @property
    def numeric(self) -> list[str]:
        """The headings of the columns that are aligned to the right."""
        return [column.head for column in self.columns if column.is_number]

    def without_empty(self) -> "Table[Row]":
        """Return the table without the columns that have no text in any row."""
        kept = [c for c in self.columns if c.head and any(c.show(row) for row in self.rows)]
        return replace(self, columns=kept)

    def to_markdown(self, escape: Callable[[str], str]) -> str:
        """Return the table in Markdown; `escape` makes a text safe there."""
        rows = [" | ".join(map(escape, line)) for line in (self.heads, *self.lines)]
        marks = ["---:" if head in self.numeric else "---" for head in self.heads]
        head, *lines = [f"| {row} |" for row in rows]
        return "\n".join([head, f"|{'|'.join(marks)}|", *lines])

    def print(self, console: Console, **options: Any) -> None:
        """Print the table; the options are those of `console.print_table`."""
        heads = self.heads
        right = [index for index, head in enumerate(heads) if head in self.numeric]
        print_table(console, heads, self.lines, title=self.title, right=right, **options)


def to_csv(*tables: Table[Any]) -> str:
    """Return tables as one CSV file with unrounded values; a column that a table lacks is empty."""
    by_key = [{column.key: column for column in table.columns if column.key} for table in tables]
    keys = list(dict.fromkeys(key for columns in by_key for key in columns))
    rows: list[list[object]] = [[*keys]]
    for table, columns in zip(tables, by_key, strict=True):
        for row in table.rows:
            rows.append([columns[key].value(row) if key in columns else "" for key in keys])
    return files.to_csv(rows)


def show_kb(size_bytes: float) -> str:
    """Return a size in kB."""
    return f"{size_bytes / 1000:.1f}"
