"""Columns of a table (Arrow): numbers become samples, text the paths of pictures or classes.

Rows are counted from 1, without a line of names.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from resnet8ptq.core.errors import ConfigError, DataError
from resnet8ptq.core.text import printable
from resnet8ptq.data.decoding import Picture
from resnet8ptq.data.lazy import AT_ONCE
from resnet8ptq.data.sources import arrays
from resnet8ptq.data.sources.arrays import MAX_CLASSES, MAX_SAMPLES

PICTURES = ("path", "file", "file_name", "filename", "image", "img", "picture")
LABELS = (*arrays.LABELS, "label", "target", "class")

MAX_COLUMNS = 100_000
MAX_BYTES = 2**32  # of a table in memory

log = logging.getLogger(__name__)

Column = Any  # pa.ChunkedArray, which has no types


@dataclass(frozen=True)
class Table:
    """Named columns, and where they come from."""

    place: str
    columns: pa.Table

    @cached_property
    def names(self) -> list[str]:
        """Of the columns, as they stand."""
        return [str(name) for name in self.columns.column_names]

    @cached_property
    def _positions(self) -> dict[str, list[int]]:
        """Where the columns of each name stand, counted from 0."""
        positions: dict[str, list[int]] = {}
        for position, name in enumerate(self.names):
            positions.setdefault(name, []).append(position)
        return positions

    def column(self, key: str, name: str) -> Column:
        """Return a column; `key` named it.

        Raises:
            ConfigError: there is none of that name, or there are several.
        """
        positions = self._positions.get(name, [])
        if len(positions) != 1:
            count = "several columns" if positions else "no column"
            raise ConfigError(
                f"{key}: got {name}, and {self.place} has {count} of that name; takes one of "
                f"{list_names(self.names)}"
            )
        found = self.columns.column(positions[0])
        if pa.types.is_dictionary(found.type):
            found = found.cast(found.type.value_type)
        while isinstance(found.type, pa.BaseExtensionType):
            found = found.cast(found.type.storage_type)
        return found

    def pick(self, usual: Sequence[str]) -> str | None:
        """Return the one column that has a usual name, in whatever case; None where none has.

        Raises:
            ConfigError: several have.
        """
        known = [name for name in self.names if name.lower() in usual]
        if len(known) > 1:
            raise ConfigError(
                f"data.inputs, data.labels: got null, and {self.place} has the columns "
                f"{list_names(known, ' and ')}; takes the name of one"
            )
        return known[0] if known else None


@dataclass(frozen=True)
class Limits:
    """What a table may have at most."""

    columns: int
    rows: int
    bytes: int


def limits() -> Limits:
    """Return the limits, for a process that is to keep them."""
    return Limits(MAX_COLUMNS, MAX_SAMPLES, MAX_BYTES)


def check_size(path: Path, columns: int, rows: int, most: Limits) -> None:
    """Refuse a table, before it is read, that would take minutes and the machine's memory.

    Raises:
        DataError: it has more columns or rows.
    """
    if columns > most.columns:
        raise DataError(
            f"{path}: has {columns:,} columns, takes {most.columns:,} at most; try one column of "
            "lists (Parquet), or data=arrays"
        )
    if rows > most.rows:
        raise DataError(f"{path}: has {rows:,} rows, takes {most.rows:,} at most; try a part")


def check_bytes(path: Path, size: int, most: Limits) -> None:
    """Refuse a table whose rows, so far, take more memory than a table may.

    Raises:
        DataError: they do.
    """
    if size > most.bytes:
        raise DataError(
            f"{path}: unpacks to more than {most.bytes:,} bytes, the most that a table may "
            "take; try fewer rows, or data=arrays"
        )


def list_names(names: Iterable[str], separator: str = ", ") -> str:
    """Return names for a message, cut where they are too many."""
    listed = list(names)
    more = f"{separator}... ({len(listed)} in all)" if len(listed) > 20 else ""
    return printable(separator.join(listed[:20]))[:300] + more


def is_text(column: Column) -> bool:
    """Tell whether a column holds text."""
    return pa.types.is_string(column.type) or pa.types.is_large_string(column.type)


def is_packed(column: Column) -> bool:
    """Tell whether a column holds pictures as their bytes, alone or beside a path."""
    if pa.types.is_struct(column.type):
        return {"bytes", "path"} == {field.name for field in column.type}
    return pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)


def is_numbers(column: Column) -> bool:
    """Tell whether a column holds numbers, or lists of them."""
    kind = column.type
    while _is_list(kind):
        kind = kind.value_type
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def _is_list(kind: pa.DataType) -> bool:
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def pictures_at(table: Table, name: str, folder: Path) -> list[Picture]:
    """Return the pictures whose paths, from `folder` on, a column holds.

    Raises:
        DataError: a path is missing, or leads out of `folder`; names the row.
    """
    top, found = folder.resolve(), []
    for row, text in enumerate(table.column("data.inputs", name).to_pylist(), 1):
        place = f"{table.place}: column {name!r}, row {row}"
        if not text:
            raise DataError(f"{place}: holds nothing; takes the path of a picture")
        path = Path("/") if "\0" in text else top / text
        try:
            inside = path.resolve().is_relative_to(top)
        except (OSError, RuntimeError):  # links in a circle
            inside = False
        if not inside:
            raise DataError(
                f"{place}: got {text}, outside of {top}; takes paths below it; data.folder= sets "
                "another folder"
            )
        found.append(Picture(f"{table.place}: row {row}: {path}", path))
    return found


def packed_pictures(table: Table, name: str, folder: Path) -> list[Picture]:
    """Return the pictures that a column holds as bytes, or where those are null, as paths.

    Raises:
        DataError: a picture has neither, or its path leads out of `folder`; names the row.
    """
    content = table.column("data.inputs", name)
    if pa.types.is_struct(content.type):
        paths, content = (pc.struct_field(content, part) for part in ("path", "bytes"))
        if content.null_count == len(content):
            return pictures_at(Table(table.place, pa.table({name: paths})), name, folder)
    _refuse_nothing(content, f"{table.place}: column {name!r}")
    return [
        Picture(f"{table.place}: row {row}", packed.as_py) for row, packed in enumerate(content, 1)
    ]


def write_numbers(
    to: Path, table: Table, names: Sequence[str], shape: Sequence[int] | None
) -> None:
    """Write the samples [N, ...] that columns of numbers, or one of lists of them, hold.

    They are written by rows, so that the samples are never in memory beside the columns.

    Integers from 0 to 255 become uint8: CSV files do not say what they are.

    Args:
        to: the .npy file to write.
        shape: of a sample; None: as many numbers as there are columns, or as the lists have it.

    Raises:
        ConfigError: the numbers of a row do not make this shape.
        DataError: what is no finite number; names the row and the column.
    """
    parts = [_numbers(table, name) for name in names]
    if len(parts) > 1 and any(part.ndim > 1 for part in parts):
        raise ConfigError(
            f"data.inputs: got {list_names(names)}, and a column of lists among them; takes that "
            "one alone, or columns of numbers"
        )
    stored = (len(parts),) if parts[0].ndim == 1 else parts[0].shape[1:]
    if shape is not None and math.prod(shape) != math.prod(stored):
        raise ConfigError(
            f"data.shape: got {list(shape)}, takes sizes that make {math.prod(stored)} numbers, "
            f"which each row of {table.place} has"
        )
    count = len(parts[0])
    whole = np.lib.format.open_memmap(
        to, "w+", _common_dtype(parts), (count, *(stored if shape is None else shape))
    )
    for start in range(0, count, AT_ONCE):
        rows = [part[start : start + AT_ONCE] for part in parts]
        some = rows[0] if parts[0].ndim > 1 else np.stack(rows, axis=1)
        whole[start : start + AT_ONCE] = some.reshape(-1, *whole.shape[1:])
    whole.flush()


def _common_dtype(parts: Sequence[NDArray[Any]]) -> np.dtype[Any]:
    """Return a dtype that holds all columns; uint8 for integers from 0 to 255."""
    dtype = np.result_type(*{part.dtype for part in parts})
    if dtype.kind in "iu" and all(0 <= part.min() <= part.max() <= 255 for part in parts):
        return np.dtype(np.uint8)
    return dtype


def _numbers(table: Table, name: str) -> NDArray[Any]:
    """Return a column of numbers [N], or of lists of them [N, ...]."""
    column = table.column("data.inputs", name)
    place = f"{table.place}: column {name!r}"
    shape = [len(column)]
    if not is_numbers(column):
        row, got = _first_not_a_number(column)
        raise DataError(f"{place}, row {row}: got {got}, takes a number")
    while _is_list(column.type):
        in_each = int(np.prod(shape[1:]))
        _refuse_nothing(column, place, in_each)
        lengths = pc.list_value_length(column).to_numpy()
        odd = np.flatnonzero((lengths != lengths[0]) | (lengths == 0))
        if odd.size:
            raise DataError(
                f"{place}, row {odd[0] // in_each + 1}: has {lengths[odd[0]]} values, row 1 "
                f"{lengths[0]}; takes as many in each"
            )
        shape.append(int(lengths[0]))
        column = pc.list_flatten(column)
    _refuse_nothing(column, place, int(np.prod(shape[1:])))
    values = column.to_numpy().reshape(shape)
    values = values.astype(np.uint8) if values.dtype.kind == "b" else values
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        first = int(np.argwhere(~np.isfinite(values))[0, 0])
        raise DataError(f"{place}, row {first + 1}: NaN or infinity; takes finite numbers")
    return values


def _refuse_nothing(column: Column, place: str, in_each: int = 1) -> None:
    """Raise `DataError` for an empty cell; each row of the table has `in_each` of these."""
    if column.null_count:
        first = int(np.flatnonzero(pc.is_null(column))[0])
        raise DataError(
            f"{place}, row {first // in_each + 1}: holds nothing, or NaN; takes a value in each row"
        )


def _first_not_a_number(column: Column) -> tuple[int, str]:
    for row, value in enumerate(column.to_pylist(), 1):
        try:
            float(value)
        except (TypeError, ValueError):
            return row, printable(repr(value))[:80]
    return 1, str(column.type)


def labels(
    table: Table, name: str, given: Sequence[str] | None
) -> tuple[NDArray[Any], tuple[str, ...], bool]:
    """Return the labels [N] of a column, the names of the classes, and whether they have any.

    Integers are labels from 0; of text, each different one is a class, in the order of `given`, or
    else of the alphabet. Floats are values to predict, and no classes.

    Raises:
        DataError: a label is missing, or none of these; names the row.
    """
    column, place = table.column("data.labels", name), f"{table.place}: column {name!r}"
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.string())
    _refuse_nothing(column, place)
    if is_text(column):
        return _by_name(column, place, given)
    if pa.types.is_floating(column.type):
        return _numbers(table, name), (), True
    if not pa.types.is_integer(column.type):
        raise DataError(
            f"{place}: holds {column.type}; takes labels as integers from 0 or as text, or values "
            "as floats"
        )
    found = column.to_numpy().astype(np.int64)
    low, high = int(found.min()), int(found.max())
    if not 0 <= low <= high < MAX_CLASSES:
        raise DataError(
            f"{place}: labels from {low} to {high}; takes 0 to {MAX_CLASSES - 1} at most, or "
            "floats for values to predict"
        )
    if given is None:
        return found, tuple(map(str, range(max(high + 1, 2)))), False
    if high >= len(given):
        raise DataError(
            f"{place}: labels up to {high}, but {len(given)} class names (data.classes); takes one "
            "for each"
        )
    return found, tuple(given), True


def groups(table: Table, name: str) -> NDArray[np.int64]:
    """Return the groups [N] of a column: the same number for cells that are equal."""
    cells = table.column("data.groups", name)
    _refuse_nothing(cells, f"{table.place}: column {name!r}")
    found: NDArray[np.int64] = cells.combine_chunks().dictionary_encode().indices.to_numpy()
    return found.astype(np.int64)


def _by_name(
    column: Column, place: str, given: Sequence[str] | None
) -> tuple[NDArray[np.int64], tuple[str, ...], bool]:
    texts = [printable(text) for text in column.to_pylist()]
    if "" in texts:
        raise DataError(
            f"{place}, row {texts.index('') + 1}: holds nothing; takes a value in each row"
        )
    found = sorted(set(texts))
    names = tuple(found if given is None else given)
    if given is None:
        log.info(
            "%s: classes in the order of the alphabet: %s; data.classes= sets the network's own",
            *(place, list_names(names)),
        )
    if strange := sorted(set(found) - set(names)):
        raise DataError(f"{place}: class {strange[0]!r} is none of data.classes={list(names)}")
    if not 2 <= len(names) <= MAX_CLASSES:
        raise DataError(
            f"{place}: has {len(names)} different labels; takes 2 to {MAX_CLASSES} classes"
        )
    places = {text: label for label, text in enumerate(names)}
    return np.array([places[text] for text in texts], np.int64), names, True
