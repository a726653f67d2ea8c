"""Names of a table's rows in messages: the lines that an editor shows, or the rows by number."""

import csv
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

LINE = "line"
ROW = "row"
_CHUNK_BYTES = 2**24


@dataclass(frozen=True)
class FileRows:
    """The rows that a table has from one file.

    Attributes:
        source: the file, or the folder that a library reads.
        count: number of rows.
        unit: the name of a row, such as `line`.
        first: the number of the first row, after which the numbers ascend by 1.
        numbers: the number of each row [count], in place of `first`; the numbers may have gaps.
    """

    source: Path
    count: int
    unit: str = ROW
    first: int = 1
    numbers: NDArray[np.int64] | None = None

    def say(self, index: int) -> str:
        """Return the unit and number of the row at `index`, which counts from 0.

        >>> FileRows(Path("a.csv"), count=9, unit=LINE, first=2).say(0)
        'line 2'
        """
        number = index + self.first if self.numbers is None else self.numbers[index]
        return f"{self.unit} {number}"


@dataclass(frozen=True)
class RowNames:
    """The names of the rows of a table, which has the rows of its files in order."""

    files: Sequence[FileRows]

    def name(self, row: int) -> str:
        """Return a row's file, unit and number.

        Args:
            row: counted from 0, through all files.
        """
        file, index = self._find(row)
        return f"{file.source}: {file.say(index)}"

    def cell(self, column: str, row: int) -> str:
        """Return the name of a cell: its file, column and row; see `name`."""
        file, index = self._find(row)
        return f"{file.source}: column {column!r}, {file.say(index)}"

    @cached_property
    def _ends(self) -> list[int]:
        """For each file, the index in the table of the row after its last."""
        return [*accumulate(file.count for file in self.files)]

    def _find(self, row: int) -> tuple[FileRows, int]:
        number = bisect_right(self._ends, row)
        file = self.files[number]
        return file, row - self._ends[number] + file.count


def find_csv_rows(path: Path, count: int, separator: str) -> FileRows:
    """Return the lines of a CSV file in which its rows begin.

    Blank lines, which are no rows, and line breaks in cells shift the lines. If Python finds
    another number of rows than Arrow, messages number the rows, not the lines.

    Args:
        count: Arrow's number of rows, without the line of names.
    """
    if _count_lines(path) == count + 1:
        return FileRows(path, count, LINE, first=2)
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        try:
            begins = [*_find_begins(file, separator)]
        except csv.Error:  # a cell may be too long
            begins = []
    return _number(path, count, begins[1:])


def find_json_rows(path: Path, count: int) -> FileRows:
    """Return the lines of a JSON Lines file that are not blank, if their number is `count`.

    Otherwise messages number the rows, not the lines.
    """
    begins = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                begins.append(number)
    return _number(path, count, begins)


def _number(path: Path, count: int, lines: Sequence[int]) -> FileRows:
    if len(lines) != count:
        return FileRows(path, count)
    return FileRows(path, count, LINE, numbers=np.array(lines, np.int64))


def _count_lines(path: Path) -> int:
    count = 0
    last = b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            count += chunk.count(b"\n")
            last = chunk[-1:]
    return count + (last not in (b"", b"\n"))


def _find_begins(file: TextIO, separator: str) -> Iterator[int]:
    """Yield the number of the first line of each row, names included; blank lines are no rows."""
    reader = csv.reader(file, delimiter=separator)
    begin = 1
    for cells in reader:
        if cells:
            yield begin
        begin = reader.line_num + 1
