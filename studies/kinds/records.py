"""Rows as a CSV file, read again and completed."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args

from resnet8ptq.core import files
from studies.kinds.measuring import Row

_TYPES: dict[str, Any] = {field.name: field.type for field in fields(Row)}


def read_rows(path: Path, folders: Mapping[str, str]) -> list[Row]:
    """Return the rows of a file; none if it does not exist.

    Args:
        folders: the local folders, by the names that replace them in the file.
    """
    if not path.exists():
        return []
    text = path.read_text()
    for name, folder in folders.items():
        text = text.replace(name, folder)
    return [_to_row(line) for line in csv.DictReader(io.StringIO(text))]


def write_rows(path: Path, rows: Sequence[Row], folders: Mapping[str, str]) -> None:
    """Write the rows, with names in place of folders."""
    lines: list[list[Any]] = [list(_TYPES)]
    for row in rows:
        lines.append([_to_cell(value) for value in asdict(row).values()])
    text = files.to_csv(lines)
    for name, folder in folders.items():
        text = text.replace(folder, name)
    files.write_text(path, text)


def _to_cell(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else value


def _to_row(line: dict[str, str]) -> Row:
    values: dict[str, Any] = {}
    for name, text in line.items():
        numbers = [kind for kind in get_args(_TYPES[name]) if kind in (int, float)]
        if not numbers:
            values[name] = text
        elif text == "":
            values[name] = None
        else:
            values[name] = numbers[0](text)
    return Row(**values)
