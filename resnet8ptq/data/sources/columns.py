"""Reads columns of an Arrow table as numbers, pictures, labels and groups."""

import logging
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from resnet8ptq.core.errors import ConfigError, DataError, errors_as
from resnet8ptq.core.text import list_names, printable
from resnet8ptq.data.dataset import MAX_SAMPLES
from resnet8ptq.data.decoding import Picture
from resnet8ptq.data.lazy import AT_ONCE
from resnet8ptq.data.sources import array_names
from resnet8ptq.data.sources.array_names import pick
from resnet8ptq.data.sources.labels import (
    MAX_CLASSES,
    NO_LABELS,
    check_labels,
    name_classes,
    read_binary,
)
from resnet8ptq.data.sources.rows import FileRows, RowNames

PICTURES = ("path", "file", "file_name", "filename", "image", "img", "picture")
LABELS = (*array_names.LABELS, "class")
# Names of columns whose texts are the labels, as of pictures and speech
TRANSCRIPTS = ("transcript", "transcription", "sentence", "text")
SEPARATOR = "|"  # separates several labels in one text
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
# Numbers as people write them: `1.5`, `1,5`, `1,234.5` or `12%`
_WRITTEN_NUMBER = r"^\s*[+-]?(\d{1,3}(,\d{3})+(\.\d*)?|\d+[.,]?\d*|[.,]\d+)([eE][+-]?\d+)?\s*%?\s*$"
_INDEX = "__index_level_"  # begins the name that pandas gives to an index without a name

log = logging.getLogger(__name__)

Column = Any  # pa.ChunkedArray, for which pyarrow has no types
NameCell = Callable[[int], str]  # returns the name of a row's cell; see `RowNames`


@dataclass(frozen=True)
class DataTable:
    """A table of named columns, and the file or folder that it comes from.

    Attributes:
        sha256: identifies the content of all files of the table in cache keys.
        files: the rows of each file, in order. Without any, messages count all rows from 1.
    """

    source: Path
    columns: pa.Table
    sha256: str
    files: Sequence[FileRows] = ()

    @cached_property
    def rows(self) -> RowNames:
        """The names of the rows."""
        return RowNames(self.files or [FileRows(self.source, len(self.columns))])

    @cached_property
    def names(self) -> list[str]:
        """The names of the columns in order."""
        return [str(name) for name in self.columns.column_names]

    def column(self, key: str, name: str) -> Column:
        """Return the column `name`; dictionaries, extension types and decimals become plain types.

        Args:
            key: the setting that names the column, for the error.

        Raises:
            ConfigError: no column or several columns have that name.
        """
        positions = self.columns.schema.get_all_field_indices(name)
        if len(positions) != 1:
            count = "several columns" if positions else "no column"
            raise ConfigError(
                f"{key}: got {name}, and {self.source} has {count} of that name; expected one of "
                f"{list_names(self.names, mistyped=name)}"
            )

        # Unwrap the types that stand for plain ones
        column = self.columns.column(positions[0])
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        while isinstance(column.type, pa.BaseExtensionType):
            column = column.cast(column.type.storage_type)
        if pa.types.is_decimal(column.type):  # databases return decimals
            is_int64 = column.type.scale == 0 and column.type.precision <= 18
            plain = pa.int64() if is_int64 else pa.float64()
            column = column.cast(plain)
        return column

    @cached_property
    def row_numbers(self) -> frozenset[str]:
        """The columns that pandas has written as the index of the rows."""
        indices = {name for name in self.names if name.startswith(_INDEX)}
        described = self.columns.schema.pandas_metadata or {}
        for index in described.get("index_columns", ()):
            if isinstance(index, str):  # other indices, such as ranges, are not columns
                indices.add(index)
        return frozenset(indices)

    def pick(self, usual: Sequence[str]) -> str | None:
        """Return the only column with a usual name; see `array_names.pick`."""
        return pick(self.names, usual, self.source)


@dataclass(frozen=True)
class Limits:
    """The limits of a table; a larger table could take minutes and all memory."""

    columns: int = 100_000
    rows: int = MAX_SAMPLES
    bytes: int = 2**32  # largest size in memory

    def check(self, path: Path, columns: int = 0, rows: int = 0, size: int = 0) -> None:
        """Check the size of a table in columns, rows and bytes.

        Raises:
            DataError: the table exceeds a limit.
        """
        if columns > self.columns:
            raise DataError(
                f"{path}: has {columns:,} columns, expected at most {self.columns:,}; try one "
                "column of lists (Parquet), or data=arrays"
            )
        if rows > self.rows:
            raise DataError(
                f"{path}: has {rows:,} rows, expected at most {self.rows:,}; try a part"
            )
        if size > self.bytes:
            raise DataError(
                f"{path}: unpacks to more than {self.bytes:,} bytes, the most that a table may "
                "take; try fewer rows, or data=arrays"
            )


LIMITS = Limits()


def is_text(column: Column) -> bool:
    """Return whether a column holds text."""
    return pa.types.is_string(column.type) or pa.types.is_large_string(column.type)


def are_words(column: Column) -> bool:
    """Return whether a column holds lists of texts."""
    kind = column.type
    return _is_list(kind) and (
        pa.types.is_string(kind.value_type) or pa.types.is_large_string(kind.value_type)
    )


def is_packed(column: Column) -> bool:
    """Return whether a column holds the bytes of pictures, with or without a path."""
    if pa.types.is_struct(column.type):
        return {"bytes", "path"} == {field.name for field in column.type}
    return pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)


def is_numbers(column: Column) -> bool:
    """Return whether a column holds numbers or booleans, or lists of them."""
    kind = column.type
    while _is_list(kind):
        kind = kind.value_type
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def is_number(column: Column) -> bool:
    """Return whether a column holds one number or boolean in each row."""
    return is_numbers(column) and not _is_list(column.type)


def check_left_out(table: DataTable, name: str, column: Column) -> None:
    """Check that a column of text, which is not taken as an input, is not one of numbers.

    A single cell such as `?` turns a column of numbers into text. Without this check, the samples
    would lack that column.

    Raises:
        DataError: at least half of the cells are numbers; the message names a cell.
    """
    if not is_text(column):
        return
    written = pc.match_substring_regex(column, _WRITTEN_NUMBER).fill_null(False)
    count = pc.sum(written).as_py() or 0
    if 2 * count < len(column):
        return

    # Name the cell that made the column a text
    row, got = _first_not_a_number(column)
    cell = table.rows.cell(name, row)
    mend = "data.inputs='[a,b]' names the columns to take"
    if got[1:-1] and _DECIMAL_COMMA.fullmatch(got[1:-1]):
        mend = "try a decimal point, not a comma"
    raise DataError(
        f"{cell}: got {got}, where {count} of {len(column)} rows hold numbers; expected a number "
        f"in each; {mend}"
    )


def _is_list(kind: pa.DataType) -> bool:
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def pictures_at(table: DataTable, name: str, folder: Path) -> list[Picture]:
    """Return the pictures at the paths in a column; relative paths begin in `folder`.

    Raises:
        DataError: a cell holds no path, or its path leads out of `folder`; the message names the
            row.
    """
    top = folder.resolve()
    pictures = []
    for row, text in enumerate(table.column("data.inputs", name).to_pylist()):
        if not text:
            cell = table.rows.cell(name, row)
            raise DataError(f"{cell}: holds nothing; expected the path of a picture")

        # A path may lead out by `..`, by a link, or as an absolute one
        path = top / text
        try:
            is_inside = "\0" not in text and path.resolve().is_relative_to(top)
        except (OSError, RuntimeError):  # links form a loop
            is_inside = False
        if not is_inside:
            cell = table.rows.cell(name, row)
            raise DataError(
                f"{cell}: got {text}, outside of {top}; expected paths below it; data.folder= sets "
                "another folder"
            )
        pictures.append(Picture(f"{table.rows.name(row)}: {path}", path))
    return pictures


def packed_pictures(table: DataTable, name: str, folder: Path) -> list[Picture]:
    """Return the pictures in a column: their bytes, or their paths if all bytes are null.

    Raises:
        DataError: only some bytes are null; or all are, and paths are missing or lead out of
            `folder`; the message names the row.
    """
    content = table.column("data.inputs", name)
    if pa.types.is_struct(content.type):
        paths = pc.struct_field(content, "path")
        content = pc.struct_field(content, "bytes")
        if content.null_count == len(content):
            return pictures_at(replace(table, columns=pa.table({name: paths})), name, folder)
    check_filled(content, partial(table.rows.cell, name))
    pictures = []
    for row, packed in enumerate(content):
        pictures.append(Picture(table.rows.name(row), packed.as_py))
    return pictures


def write_numbers(
    to: Path, table: DataTable, names: Sequence[str], shape: Sequence[int] | None
) -> None:
    """Write samples [N, ...] from columns of numbers, or from one column of lists of numbers.

    Rows are written in groups, because samples and columns together could exceed the memory.
    If all numbers are integers from 0 to 255, they become uint8, because CSV files have no types.

    Args:
        shape: the shape of a sample; None for the number of columns, or the shape of the lists.

    Raises:
        ConfigError: the numbers of a row do not fit this shape, a name is not that of one column,
            or a column of lists is not alone.
        DataError: a cell is not a finite number, or the lists of a column are empty or differ in
            length; the message names the row and the column.
    """
    parts = [_read_numbers(table, name) for name in names]
    has_lists = any(part.ndim > 1 for part in parts)
    if has_lists and len(parts) > 1:
        raise ConfigError(
            f"data.inputs: got {list_names(names)}, and a column of lists among them; expected "
            "that one alone, or columns of numbers"
        )

    # Find the shape of a sample
    stored: tuple[int, ...] = (len(parts),)
    if has_lists:
        stored = parts[0].shape[1:]
    if shape is None:
        shape = stored
    if math.prod(shape) != math.prod(stored):
        raise ConfigError(
            f"data.shape: got {list(shape)}, expected sizes that make {math.prod(stored)} numbers, "
            f"which each row of {table.source} has"
        )

    # Write the rows in groups
    count = len(parts[0])
    whole = np.lib.format.open_memmap(to, "w+", _common_dtype(parts), (count, *shape))
    for start in range(0, count, AT_ONCE):
        rows = [part[start : start + AT_ONCE] for part in parts]
        whole[start : start + AT_ONCE] = np.stack(rows, axis=1).reshape(-1, *shape)
    whole.flush()


def _common_dtype(parts: Sequence[NDArray[Any]]) -> np.dtype[Any]:
    """Return a dtype that holds all columns; uint8 for integers from 0 to 255."""
    dtype = np.result_type(*{part.dtype for part in parts})
    if dtype.kind in "iu" and all(0 <= part.min() <= part.max() <= 255 for part in parts):
        return np.dtype(np.uint8)
    return dtype


def _read_numbers(table: DataTable, name: str, key: str = "data.inputs") -> NDArray[Any]:
    """Return a column of numbers as [N], or of lists of numbers as [N, ...]; booleans as uint8.

    Args:
        key: the setting that names the column, for the error.

    Raises:
        ConfigError: the name is not that of one column.
        DataError: a cell is not a finite number, or lists are empty or differ in length.
    """
    column = table.column(key, name)
    cell = partial(table.rows.cell, name)
    shape = [len(column)]
    if not is_numbers(column):
        row, got = _first_not_a_number(column)
        raise DataError(f"{cell(row)}: got {got}, expected a number")

    # Flatten nested lists, each level of which adds an axis
    while _is_list(column.type):
        per_row = math.prod(shape[1:])
        check_filled(column, cell, per_row)
        lengths = pc.list_value_length(column).to_numpy()
        odd = np.flatnonzero((lengths != lengths[0]) | (lengths == 0))
        if odd.size:
            raise DataError(
                f"{cell(odd[0] // per_row)}: has {lengths[odd[0]]} values, the first row "
                f"{lengths[0]}; expected equal numbers"
            )
        shape.append(int(lengths[0]))
        column = pc.list_flatten(column)

    # Check the numbers themselves
    check_filled(column, cell, math.prod(shape[1:]))
    values = column.to_numpy().reshape(shape)
    if values.dtype.kind == "b":
        return values.astype(np.uint8)
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        first = int(np.argwhere(~np.isfinite(values))[0, 0])
        raise DataError(f"{cell(first)}: NaN or infinity; expected finite numbers")
    return values


def check_filled(column: Column, cell: NameCell, per_row: int = 1) -> None:
    """Check that no cell of a column is null; empty texts, as CSV files have, are not null.

    Args:
        cell: returns the name of a row's cell for the error.
        per_row: number of cells for each row of the table.

    Raises:
        DataError: a cell is null; the message names the row.
    """
    if column.null_count:
        first = int(np.flatnonzero(pc.is_null(column))[0])
        raise _empty(cell(first // per_row))


def _empty(cell: str) -> DataError:
    return DataError(f"{cell}: holds nothing, or NaN; expected a value in each row")


def _first_not_a_number(column: Column) -> tuple[int, str]:
    for row, value in enumerate(column.to_pylist()):
        try:
            float(value)
        except (TypeError, ValueError):
            return row, printable(repr(value))[:80]
    return 0, str(column.type)


def labels(
    table: DataTable, names: Sequence[str], classes: Sequence[str] | None
) -> tuple[NDArray[Any] | None, tuple[str, ...], bool]:
    """Return the labels in columns, the class names, and the attribute `Dataset.named`.

    The labels are None if `names` is `[NO_LABELS]`.

    Integers are labels from 0. Texts and booleans are names of classes, in the order of `classes`,
    or by default in alphabetical order. Floats are regression targets, without classes. Lists,
    texts with `SEPARATOR`, and several columns of 0 and 1 give several labels for each sample,
    [N, classes] bool; one-hot lists and columns give classes. Without `classes`, a text column
    with a name in `TRANSCRIPTS` holds texts, [N].

    Raises:
        ConfigError: a name is not that of one column.
        DataError: a label is missing, has none of these types, or is no class, or there are too few
            or too many classes.
    """
    [name, *others] = names
    if name == NO_LABELS:
        return None, (), True
    if others:
        return _of_columns(table, names, classes)
    column = table.column("data.labels", name)
    source = f"{table.source}: column {name!r}"
    cell = partial(table.rows.cell, name)
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.string())
        if classes is not None:  # Arrow writes booleans in lower case
            classes = [text.lower() for text in classes]
    check_filled(column, cell)

    # The type of the column decides how its cells become labels
    if is_text(column) and classes is None and name.lower() in TRANSCRIPTS:
        return np.array(column.to_pylist(), np.str_), (), True
    if is_text(column) and pc.any(pc.match_substring(column, SEPARATOR)).as_py():
        rows = []
        for text in column.to_pylist():
            parts = map(str.strip, text.split(SEPARATOR))
            rows.append(list(filter(None, parts)))
        return _several(rows, source, cell, classes)
    if is_text(column):
        return _by_name(column, source, cell, classes)
    if _is_list(column.type) and pa.types.is_floating(column.type.value_type):
        with suppress(pa.ArrowInvalid):  # fractions are refused below
            column = column.cast(pa.list_(pa.int64()))  # labels are one-hot, as Keras writes them
    if _is_list(column.type) and not pa.types.is_floating(column.type.value_type):
        return _several(column.to_pylist(), source, cell, classes)
    if pa.types.is_floating(column.type):
        return _read_numbers(table, name, "data.labels"), (), True
    if not pa.types.is_integer(column.type):
        raise DataError(
            f"{source}: got {column.type}, expected labels as integers from 0 or as text, or "
            "values as floats"
        )
    numbers = check_labels(column.to_numpy(), source)
    return numbers, *name_classes(source, int(numbers.max()), classes)


def word_labels(
    table: DataTable, names: Sequence[str], classes: Sequence[str] | None, words: str
) -> tuple[NDArray[np.object_], tuple[str, ...], bool]:
    """Return the labels of the words of each row [N], and the classes as `labels` returns them.

    Args:
        names: the column with lists of labels: integers from 0, or texts.
        words: the column with lists of words.

    Raises:
        ConfigError: a name is not that of one column.
        DataError: the labels are not lists in one column; a row has more or fewer labels than
            words; a label is missing, has another type, or is no class; or there are too few or too
            many classes.
    """
    column = table.column("data.labels", names[0])
    source = f"{table.source}: column {names[0]!r}"
    cell = partial(table.rows.cell, names[0])
    check_filled(column, cell)
    if len(names) > 1 or not _is_list(column.type):
        raise DataError(f"{source}: got {column.type}, expected lists of a label for each word")
    sizes = pc.list_value_length(column).to_numpy()
    of_text = table.column("data.text", words)
    check_filled(of_text, partial(table.rows.cell, words))
    expected = pc.list_value_length(of_text).to_numpy()
    odd = np.flatnonzero(sizes != expected)
    if odd.size:
        first = odd[0]
        raise DataError(
            f"{cell(first)}: has {sizes[first]} labels and {expected[first]} words; "
            "expected one for each"
        )

    # Read the labels of all words at once, then divide them by text
    flat = pc.list_flatten(column)
    if not len(flat):
        raise DataError(f"{source}: all lists are empty, expected a label for each word")
    ends = np.cumsum(sizes)

    def cell_of_word(index: int) -> str:
        return cell(int(np.searchsorted(ends, index, side="right")))

    check_filled(flat, cell_of_word)
    if is_text(flat):
        numbers, tags, named = _by_name(flat, source, cell_of_word, classes)
    elif not pa.types.is_integer(flat.type):
        raise DataError(f"{source}: got lists of {flat.type}, expected integers from 0 or texts")
    else:
        numbers = check_labels(flat.to_numpy(), source)
        tags, named = name_classes(source, int(numbers.max()), classes)
    rows = np.empty(len(sizes), np.object_)
    for row, end in enumerate(ends):
        rows[row] = numbers[end - sizes[row] : end]
    return rows, tags, named


def _of_columns(
    table: DataTable, names: Sequence[str], classes: Sequence[str] | None
) -> tuple[NDArray[Any], tuple[str, ...], bool]:
    """Return columns of 0 and 1, one for each class, as labels; `classes` renames the classes.

    Raises:
        ConfigError: a name is not that of one column.
        DataError: a cell is neither 0 nor 1, or `classes` does not fit the number of columns.
    """
    rows = np.stack([_read_numbers(table, name, "data.labels") for name in names], axis=1)
    if not np.isin(rows, (0, 1)).all():
        raise DataError(
            f"{table.source}: columns {list_names(names)}: got other values than 0 and 1; expected "
            "a column of 0 and 1 for each class"
        )
    source = f"{table.source}: columns {list_names(names)}"
    labels = read_binary(rows, source)
    named, _ = name_classes(source, len(names) - 1, classes or names, exact=labels.ndim == 2)
    return labels, named, True


def _several(
    rows: Sequence[Sequence[Any]], source: str, cell: NameCell, classes: Sequence[str] | None
) -> tuple[NDArray[Any], tuple[str, ...], bool]:
    """Return lists of labels, texts or integers from 0, as [N, classes]; a list may be empty.

    Lists of 0 and 1 of equal length may be lists of labels, or rows of the matrix [N, classes].
    They are rows if a list repeats a value, which a list of labels does not. They are also rows if
    each list has two values, because as lists of labels all would have both labels. A one-hot
    matrix is returned as classes, [N].

    Raises:
        DataError: a label is no class, or neither a text nor an integer from 0; there are too few
            or too many classes; or `classes` does not fit the matrix.
    """
    # Are the lists rows of a matrix?
    different: set[Any] = set()
    is_repeated = False
    for row in rows:
        if not all(isinstance(label, int | str) for label in row):
            raise DataError(
                f"{source}: got lists of other values; expected integers from 0 or texts"
            )
        different.update(row)
        if len(set(row)) < len(row):
            is_repeated = True
    lengths = {len(row) for row in rows}
    of_one_length = len(lengths) == 1
    if of_one_length and (is_repeated or len(rows[0]) == 2) and different <= {0, 1}:
        labels = read_binary(np.array(rows), source)
        highest = len(rows[0]) - 1
        return labels, *name_classes(source, highest, classes, exact=labels.ndim == 2)

    # Find the classes, and the number of each label
    known: dict[Any, int]
    if all(isinstance(label, int) for label in different):
        numbers = check_labels(np.array([*different] or [0]), source)
        names, named = name_classes(source, int(numbers.max()), classes)
        known = {number: number for number in range(len(names))}
    else:
        names = tuple(classes) if classes is not None else tuple(sorted(map(str, different)))
        named = True
        known = {name: number for number, name in enumerate(names)}
    if not 2 <= len(names) <= MAX_CLASSES:
        raise DataError(f"{source}: has {len(names)} classes; expected 2 to {MAX_CLASSES}")
    labels = np.zeros((len(rows), len(names)), np.bool_)
    for number, row in enumerate(rows):
        for label in row:
            if label not in known:
                raise DataError(
                    f"{cell(number)}: class {printable(str(label))!r} is none of data.classes="
                    f"{list(names)}"
                )
            labels[number, known[label]] = True
    return labels, names, named


def groups(table: DataTable, name: str) -> NDArray[np.int64]:
    """Return the groups [N] of a column: equal numbers for equal cells.

    Raises:
        ConfigError: the name is not that of one column.
        DataError: a cell is empty, or the column has an unsuitable type, such as lists.
    """
    cells = table.column("data.groups", name)
    check_filled(cells, partial(table.rows.cell, name))
    if is_text(cells):  # in CSV files, empty texts are not null
        texts = cells.to_pylist()
        if "" in texts:
            raise _empty(table.rows.cell(name, texts.index("")))
    got = f"{table.source}: column {name!r}: got {cells.type}"
    with errors_as(DataError, got, "expected groups as numbers or texts"):
        encoded = cells.combine_chunks().dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64)


def _by_name(
    column: Column, source: str, cell: NameCell, classes: Sequence[str] | None
) -> tuple[NDArray[np.int64], tuple[str, ...], bool]:
    """Return labels of texts as `labels` returns them; a text is the name of its class.

    Raises:
        DataError: a text is empty or is not in `classes`, or there are too few or too many classes.
    """
    texts = [printable(text) for text in column.to_pylist()]
    if "" in texts:
        raise _empty(cell(texts.index("")))

    # The classes are those of the settings, or all different texts
    if classes is None:
        classes = sorted(set(texts))
        log.info(
            "%s: classes in alphabetical order: %s; data.classes= sets the network's order",
            source,
            list_names(classes),
        )
    unknown = sorted(set(texts) - set(classes))
    if unknown:
        first = cell(texts.index(unknown[0]))
        raise DataError(f"{first}: class {unknown[0]!r} is none of data.classes={list(classes)}")
    if not 2 <= len(classes) <= MAX_CLASSES:
        mend = ""
        if all(map(_DECIMAL_COMMA.fullmatch, classes)):
            mend = ", or numbers with a decimal point, not a comma"
        raise DataError(
            f"{source}: has {len(classes)} different labels; expected 2 to {MAX_CLASSES} classes"
            f"{mend}"
        )
    numbers = {text: label for label, text in enumerate(classes)}
    return np.array([numbers[text] for text in texts], np.int64), tuple(classes), True
