"""Tables: one list of columns, rendered for a terminal, a CSV file and Markdown.

sizes = (
    Column("file", lambda path: path.name, key="file"),
    number("kB", lambda path: path.stat().st_size / 1000, ".1f"),
)
Table(sizes, paths, "Files").print(console)
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
    """A column of a table, for people, for a CSV file, or for both.

    Attributes:
        head: the heading for people; without one, the column is only in the file.
        value: returns the value of a row; None is shown as an empty cell.
        style: a format, such as `.1f`, or a function that returns the value as text.
        key: the name in a CSV file; without one, the column is only for people.
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
        if callable(self.style):
            return self.style(value)
        return format(value, self.style)


def number(head: str, value: Callable[[Row], Any], style: Any = "", key: str = "") -> Column[Row]:
    """Return a column that is aligned to the right."""
    return Column(head, value, style, key, is_number=True)


@dataclass(frozen=True)
class Table(Generic[Row]):
    """Rows, the columns that give their cells, and a title."""

    columns: Sequence[Column[Row]]
    rows: Sequence[Row]
    title: str = ""

    @property
    def shown(self) -> list[Column[Row]]:
        """The columns for people, which have a heading."""
        return [column for column in self.columns if column.head]

    @property
    def heads(self) -> list[str]:
        """The headings of the columns for people."""
        return [column.head for column in self.shown]

    @property
    def lines(self) -> list[list[str]]:
        """The cells of each row as texts, in the columns for people."""
        columns = self.shown
        lines = []
        for row in self.rows:
            lines.append([column.show(row) for column in columns])
        return lines

    @property
    def numeric(self) -> list[str]:
        """The headings of the columns that are aligned to the right."""
        return [column.head for column in self.columns if column.is_number]

    def without_empty(self) -> "Table[Row]":
        """Return the table with those columns for people that have text in some row."""
        kept = [column for column in self.shown if any(map(column.show, self.rows))]
        return replace(self, columns=kept)

    def to_markdown(self, escape: Callable[[str], str]) -> str:
        """Return the table in Markdown; `escape` makes a text safe for Markdown."""
        marks = []
        for head in self.heads:
            mark = "---:" if head in self.numeric else "---"
            marks.append(mark)
        rows = []
        for cells in (self.heads, *self.lines):
            rows.append(f"| {' | '.join(map(escape, cells))} |")
        head, *lines = rows
        return "\n".join([head, f"|{'|'.join(marks)}|", *lines])

    def print(self, console: Console, **options: Any) -> None:
        """Print the table; `options` are further arguments of `console.print_table`."""
        heads = self.heads
        right = [index for index, head in enumerate(heads) if head in self.numeric]
        print_table(console, heads, self.lines, title=self.title, right=right, **options)


def to_csv(*tables: Table[Any]) -> str:
    """Return tables as one CSV text with unrounded values; columns that a table lacks are empty."""

    # Collect the keys of all tables, in order
    keys: dict[str, None] = {}
    for table in tables:
        for column in table.columns:
            if column.key:
                keys[column.key] = None
    rows: list[list[object]] = [[*keys]]
    for table in tables:
        columns = {column.key: column for column in table.columns}
        for row in table.rows:
            cells: list[object] = []
            for key in keys:
                cell = columns[key].value(row) if key in columns else ""
                cells.append(cell)
            rows.append(cells)
    return files.to_csv(rows)


def show_kb(size_bytes: float) -> str:
    """Return a size in bytes as text in kB, with one decimal."""
    return f"{size_bytes / 1000:.1f}"
