"""`data=table`: a CSV, Parquet, JSON Lines or CoNLL file, whose rows are samples.

With `data.pairs=apart`, the two texts of a row are two samples.
"""

import codecs
import csv
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq
from numpy.typing import NDArray

from resnet8ptq.config.schema import PreprocessConfig, TableConfig
from resnet8ptq.core import cache, code, files
from resnet8ptq.core.errors import ConfigError, DataError, errors_as
from resnet8ptq.core.text import list_names, printable
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.decoding import Picture, decode, resize_all
from resnet8ptq.data.lazy import Stored
from resnet8ptq.data.sources import SOURCES, TAGGED, array_names, columns, texts, unpacking
from resnet8ptq.data.sources.array_files import GZIP
from resnet8ptq.data.sources.columns import LABELS, PICTURES, DataTable, Limits
from resnet8ptq.data.sources.labels import NO_LABELS
from resnet8ptq.data.sources.rows import FileRows, RowNames, find_csv_rows, find_json_rows
from resnet8ptq.data.splitting import (
    TEST_NAMES,
    TRAIN_NAMES,
    NamedSplit,
    keep_split,
    split_one,
)

log = logging.getLogger(__name__)

EXPECTED = f"expected {SOURCES['table'].takes}"
SPLITS = ("split", "subset", "set")
SIDE = "split of the data set"  # name of an added column
NUMBERING = ("", "id", "index", "row", "unnamed: 0")  # the last is written by pandas
JSON_LINES = (".jsonl", ".ndjson")
_SEPARATORS = ",;\t"
MEND_ENCODING = "try to save the file as UTF-8"
MAX_HEAD_BYTES = 2**24  # largest first line, which holds the names
ROWS_AT_ONCE = 1024


def load(config: TableConfig, preprocess: PreprocessConfig, cache_root: Path) -> Dataset:
    """Return the data set of the file `data.root`, and of the file `data.test` if it is set.

    Raises:
        ConfigError: columns are not recognized, a setting does not fit them, or a package is
            missing.
        DataError: a file or the tokenizer is damaged or too large, there are too few rows, or a
            column, cell or picture is unsuitable.
    """
    table, config = _open(config, cache_root)
    return build(table, table.source.parent, config, preprocess, cache_root)


def list_pictures(config: TableConfig, cache_root: Path) -> list[Picture]:
    """Return the pictures that `load` decodes; none for numbers and texts."""
    table, config = _open(config, cache_root)
    return find_pictures(table, table.source.parent, config)


def _open(config: TableConfig, cache_root: Path) -> tuple[DataTable, TableConfig]:
    """Return the rows of all files, and the settings.

    With `data.test`, the rows have an added column, and `data.split` names it.
    """
    root = Path(str(config.root))
    sha256 = files.sha256(root)
    rows = read(root, sha256, cache_root)
    numbered = [_number_rows(root, len(rows))]
    if config.test is None:
        return DataTable(root, rows, sha256, numbered), config

    # Append the rows of the test file
    test = Path(config.test)
    of_test = files.sha256(test)
    test_rows = read(test, of_test, cache_root)
    numbered.append(_number_rows(test, len(test_rows)))
    rows = _join(rows, test_rows, config)
    return DataTable(root, rows, f"{sha256} {of_test}", numbered), replace(config, split=SIDE)


def _number_rows(path: Path, count: int) -> FileRows:
    """Return the numbers by which messages name the rows of a file."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return FileRows(path, count)
    if suffix in JSON_LINES:
        return find_json_rows(path, count)
    if suffix in TAGGED:
        return FileRows(path, count, "sentence")
    return find_csv_rows(path, count, _find_separator(_read_head(path)))


def _join(train: pa.Table, test: pa.Table, config: TableConfig) -> pa.Table:
    """Return the rows of both tables, with an added column of `train` or `test`.

    The rows of a table that lacks a column have null in it.

    Raises:
        ConfigError: `data.split` is set too.
        DataError: columns of the same name have types that do not fit.
    """
    if config.split is not None:
        raise ConfigError(
            f"data.split: got {config.split} with data.test={config.test}; expected one of the two"
        )
    odd = sorted({*train.column_names} ^ {*test.column_names})
    if odd:  # a later error names the rows that lack a needed column
        log.info("%s: columns in one of both files only: %s", config.test, list_names(odd))
    sides = [_append_side(train, "train"), _append_side(test, "test")]
    unlike = f"{config.test}: its columns do not fit those of {config.root}"
    with errors_as(DataError, unlike, "expected the same names and types"):
        return pa.concat_tables(sides, promote_options="permissive")


def _append_side(rows: pa.Table, side: str) -> pa.Table:
    return rows.append_column(SIDE, pa.array([side] * len(rows), pa.string()))


def build(
    table: DataTable,
    folder: Path,
    config: TableConfig,
    preprocess: PreprocessConfig,
    cache_root: Path,
) -> Dataset:
    """Return a table's rows as samples, split by a column, or without one by `split_one`.

    Args:
        folder: the folder of relative picture paths, if `data.folder` is null.

    Raises:
        ConfigError: columns are not recognized, a setting does not fit them, or a package is
            missing.
        DataError: the table has too few rows, a column, cell or picture is unsuitable, or the
            tokenizer is damaged.
    """
    root = table.source
    if not len(table.columns):
        raise DataError(f"{root}: has no rows; expected one for each sample")

    # Find the role of each column
    others = _list_inputs(table, config)
    side_column = config.split or table.pick(SPLITS)
    group_column = config.groups or table.pick(array_names.GROUPS)
    label_columns = _find_labels(table, config)
    text_columns = []
    if config.tokenizer is not None:
        text_columns = texts.find_columns(table, config, others)

    # Read labels and groups of all rows
    labels: NDArray[Any] | None
    if texts.are_words(table, text_columns) and label_columns != [NO_LABELS]:
        [words] = text_columns
        labels, names, named = columns.word_labels(table, label_columns, config.classes, words)
    else:
        labels, names, named = columns.labels(table, label_columns, config.classes)
    groups = None
    if group_column is not None:
        groups = columns.groups(table, group_column)
    if config.pairs == "apart" and groups is not None:
        raise ConfigError(
            f"data.pairs: got apart with groups ({group_column}); expected together: the texts of "
            "a row are a group"
        )

    # Read the samples, and keep the labels and groups of readable rows
    if config.tokenizer is not None:
        samples = _read_texts(table, text_columns, config, cache_root)
    else:
        samples = _read_inputs(table, others, folder, config, preprocess, cache_root)
    if config.pairs == "apart":  # the texts of a row form a group
        groups = np.arange(len(table.columns))
    if groups is not None:
        groups = groups[samples.rows]
    if labels is not None and samples.words is not None:  # each word has a label
        labels = texts.align(samples.words, labels)
    elif labels is not None:
        labels = labels[samples.rows]
    split = Split(
        samples.stored,
        labels,
        str(root),
        groups=groups,
        names=np.array(samples.names, np.object_),
    )
    if samples.texts is not None:
        split = replace(split, texts=np.array(samples.texts, np.object_))

    # Split the samples
    title = root.name.partition(".")[0] or root.name
    if side_column is None:
        mend = "data.split=COLUMN with train and test"
        data = split_one(title, names, split, root, config, named, mend)
    else:
        sides = []
        for indices in _find_sides(table, side_column, samples.rows):
            shown = [samples.names[index] for index in indices]
            sides.append(NamedSplit(split.take(indices), shown))
        train, test = sides
        data = keep_split(title, names, train, test, root, named)
    is_changed = preprocess.size is not None or preprocess.channels == "grey"
    if is_changed and not samples.decoded:
        data = resize_all(data, preprocess, cache_root)
    return data


@dataclass(frozen=True)
class _TableSamples:
    """The samples in a table.

    Attributes:
        rows: the row of each sample, from 0.
        names: the name of each sample in messages.
        decoded: whether they are pictures that `decode` has resized by the settings.
        texts: the texts, if the samples are their tokens.
        words: numbers of words by token, see `texts.Encoded`; None if samples are not lists of
            words.
    """

    stored: Stored
    rows: NDArray[np.int64]
    names: Sequence[str]
    decoded: bool = False
    texts: Sequence[str] | None = None
    words: NDArray[np.int64] | None = None


def _read_inputs(
    table: DataTable,
    others: Sequence[str],
    folder: Path,
    config: TableConfig,
    preprocess: PreprocessConfig,
    cache_root: Path,
) -> _TableSamples:
    """Return pictures or numbers of a table as samples.

    Args:
        others: all columns except labels, split and groups.
    """
    inputs = _find_inputs(table, config, others)
    pictures = _find_pictures(table, inputs, folder, config)
    if pictures is None:
        numbers = _keep_numbers(table, inputs, config.shape, cache_root)
        rows = np.arange(len(numbers))
        return _TableSamples(numbers, rows, _name_rows(table, rows))
    _check_folder(pictures, config)
    images, rows = decode(pictures, preprocess, config.on_bad, cache_root)
    return _TableSamples(images, rows, [pictures[row].name for row in rows], decoded=True)


def _check_folder(pictures: Sequence[Picture], config: TableConfig) -> None:
    """Raise `DataError` if no path exists, because then the folder is likely wrong."""
    for picture in pictures:
        if not isinstance(picture.content, Path) or picture.content.exists():
            return
    got = "null" if config.folder is None else config.folder
    raise DataError(
        f"{pictures[0].name}: no such file, nor those of the {len(pictures) - 1} other rows; "
        f"data.folder: got {got}, expected the folder in which the paths begin"
    )


def _list_inputs(table: DataTable, config: TableConfig) -> list[str]:
    """Return all columns except labels, split and groups."""
    split = config.split or table.pick(SPLITS)
    groups = config.groups or table.pick(array_names.GROUPS)
    excluded = {*_find_labels(table, config), split, groups}
    return [name for name in table.names if name not in excluded]


def find_pictures(table: DataTable, folder: Path, config: TableConfig) -> list[Picture]:
    """Return the pictures in a table's rows; none for numbers and texts.

    Args:
        folder: see `build`.
    """
    if config.tokenizer is not None:
        return []
    inputs = _find_named(table, config, _list_inputs(table, config))
    if not inputs:
        return []
    return _find_pictures(table, inputs, folder, config) or []


def _find_pictures(
    table: DataTable, inputs: Sequence[str], folder: Path, config: TableConfig
) -> list[Picture] | None:
    """Return the pictures in the column of inputs.

    None if there are several columns, or if the column holds neither texts nor bytes.

    Raises:
        ConfigError: the first name is not that of one column.
        DataError: a cell is empty, or its path leads out of the folder.
    """
    [name, *others] = inputs
    column = table.column("data.inputs", name)
    if others:
        return None
    if config.folder is not None:
        folder = files.expand(config.folder)
    if columns.is_text(column):
        return columns.pictures_at(table, name, folder)
    if columns.is_packed(column):
        return columns.packed_pictures(table, name, folder)
    return None


def _read_texts(
    table: DataTable, names: Sequence[str], config: TableConfig, cache_root: Path
) -> _TableSamples:
    """Return the tokens of texts: a sample for each row, or with `data.pairs=apart` for each text.

    Args:
        names: the column of texts, or the two columns of pairs.
    """
    encoded = texts.encode(table, names, config, cache_root)
    records = encoded.records
    rows = np.repeat(np.arange(len(table.columns)), len(records) // len(table.columns))
    shown = _name_rows(table, rows)
    return _TableSamples(records, rows, shown, texts=encoded.texts, words=encoded.words)


def _name_rows(table: DataTable, rows: NDArray[np.int64]) -> list[str]:
    return [table.rows.name(row) for row in rows.tolist()]


def read(path: Path, sha256: str, cache_root: Path) -> pa.Table:
    """Return the rows of a file; Parquet and JSON Lines files are unpacked into the cache.

    The separator of a CSV file is the comma, semicolon or tab, whichever is most frequent in the
    first line. Arrow infers the type of a CSV column from its cells, but a column with a name in
    `columns.TRANSCRIPTS` is text. A JSON Lines file has an object for each row; see `read_tagged`
    for words and their tags.

    Raises:
        DataError: the file cannot be read, or exceeds `columns.LIMITS`.
    """
    suffix = path.suffix.lower()
    with errors_as(DataError, f"{path}: cannot be read", EXPECTED):
        if suffix == ".parquet":
            return unpacking.unpack(path, _read_parquet, sha256, EXPECTED, cache_root)
        if suffix in JSON_LINES:
            return unpacking.unpack(path, _read_json, sha256, EXPECTED, cache_root)
        rows = read_tagged(path) if suffix in TAGGED else _read_csv(path)
        columns.LIMITS.check(path, rows=len(rows), size=rows.nbytes)
        return rows


def read_tagged(path: Path) -> pa.Table:
    """Read a CoNLL file: a word and its tag in each line, a blank line between sentences.

    The columns are separated by tabs, or else by spaces. The first column is the word, and the last
    column the tag; others are not read. -DOCSTART- lines are skipped, and so are comments: lines
    that begin with `# `, before the first word or with another number of columns than words have.

    Returns:
        A row for each sentence, of lists: `tokens` and `labels`.

    Raises:
        DataError: a line has no tag, or another number of columns; the message names the line.
        UnicodeDecodeError: the file is not in UTF-8.
    """
    words: list[list[str]] = [[]]
    tags: list[list[str]] = [[]]
    width = 0
    for number, line in enumerate(path.read_text("utf-8-sig").split("\n"), 1):
        cells = line.split("\t")
        if len(cells) == 1:  # split at spaces only, as other white space may be a word
            cells = list(filter(None, line.strip("\r ").split(" ")))
        if not line.strip():
            words.append([])
            tags.append([])
            continue
        is_comment = line.startswith("# ") and len(cells) != width
        if cells[0] == "-DOCSTART-" or is_comment:
            continue

        # The first word's line sets the number of columns
        width = width or len(cells)
        if len(cells) != width or width < 2:
            raise DataError(
                f"{path}: line {number}: has {len(cells)} columns, expected "
                f"{max(width, 2)}: a word, and its tag in the last"
            )
        words[-1].append(cells[0])
        tags[-1].append(cells[-1].strip())

    # Two blank lines in a row leave an empty sentence
    of_texts = pa.list_(pa.string())
    tokens = pa.array(list(filter(None, words)), of_texts)
    labels = pa.array(list(filter(None, tags)), of_texts)
    return pa.table({"tokens": tokens, "labels": labels})


def _read_parquet(path: Path, limits: Limits) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    file = pq.ParquetFile(path)
    limits.check(path, file.metadata.num_columns, file.metadata.num_rows)
    return file.schema_arrow, file.iter_batches(ROWS_AT_ONCE)


def _read_json(path: Path, limits: Limits) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Read a JSON Lines file; callers use a separate process, as deep nesting crashes Arrow."""
    block = pyarrow.json.ReadOptions(block_size=min(path.stat().st_size + 1, 2**31 - 1))
    rows = pyarrow.json.read_json(path, block)
    limits.check(path, rows.num_columns, rows.num_rows)
    return rows.schema, iter(rows.to_batches(ROWS_AT_ONCE))


def _read_head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_HEAD_BYTES)


def _decode_head(head: bytes) -> str:
    return head.decode("utf-8", "replace").removeprefix("\ufeff")


def _find_separator(head: bytes) -> str:
    """Return the most frequent separator in the first line; the comma if it has none."""
    return max(_SEPARATORS, key=_decode_head(head).partition("\n")[0].count)


def _read_csv(path: Path) -> pa.Table:
    head = _read_head(path)
    if head.startswith(GZIP):
        raise DataError(f"{path}: is gzipped, expected it unpacked; try gunzip {path.name}")
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{path}: is in UTF-16, expected UTF-8; {MEND_ENCODING}")
    separator = _find_separator(head)
    lines = iter(_decode_head(head).splitlines(keepends=True))
    names = next(csv.reader(lines, delimiter=separator), [])
    if len(head) == MAX_HEAD_BYTES and next(lines, None) is None:
        raise DataError(f"{path}: its line of names is longer than {MAX_HEAD_BYTES:,} bytes")
    columns.LIMITS.check(path, len(names))

    # Arrow infers the types from the first block, so the file is one block
    block = pyarrow.csv.ReadOptions(block_size=min(path.stat().st_size + 1, 2**31 - 1))
    parsing = pyarrow.csv.ParseOptions(delimiter=separator, newlines_in_values=True)

    # Without a type, texts of digits, such as serial numbers, would lose leading zeros
    as_texts = {}
    for name in names:
        if name.strip().lower() in columns.TRANSCRIPTS:
            as_texts[name] = pa.string()
    converting = pyarrow.csv.ConvertOptions(column_types=as_texts)
    with pa.OSFile(str(path)) as file:  # by a name, Arrow would unpack some files
        rows = pyarrow.csv.read_csv(file, block, parsing, converting)

    # Only now are other encodings visible: in the names, or as columns of bytes
    try:
        stripped = [name.strip() for name in rows.column_names]
    except UnicodeDecodeError:
        raise DataError(f"{path}: its line of names is not in UTF-8; {MEND_ENCODING}") from None
    rows = rows.rename_columns(stripped)
    _check_encoding(path, rows)
    return rows


def _check_encoding(path: Path, rows: pa.Table) -> None:
    """Raise `DataError` for a text that is not UTF-8, whose column Arrow returns as bytes."""
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        if not pa.types.is_binary(column.type):
            continue
        for row, cell in enumerate(column):
            try:
                cell.as_py().decode()
            except UnicodeDecodeError:
                where = RowNames([_number_rows(path, len(rows))]).cell(name, row)
                raise DataError(f"{where}: is not in UTF-8; {MEND_ENCODING}") from None


def _keep_numbers(
    table: DataTable, names: Sequence[str], shape: Sequence[int] | None, cache_root: Path
) -> NDArray[Any]:
    """Return the samples in columns of numbers, mapped from the cache; see `write_numbers`."""

    def make(entry: Path) -> None:
        columns.write_numbers(entry / "samples.npy", table, names, shape)

    selection = json.dumps([list(names), shape])
    key: cache.Key = {"sha256": table.sha256, "columns": selection, "code": code.behind(__name__)}
    entry = cache.entry(cache_root, "tables", key, make)
    return np.load(entry / "samples.npy", mmap_mode="r")


def _find_labels(table: DataTable, config: TableConfig) -> list[str]:
    """Return the columns of labels, or `[NO_LABELS]`.

    Raises:
        ConfigError: `data.labels` is null, and no column or several columns have a usual name.
    """
    if isinstance(config.labels, list):
        return config.labels
    name = config.labels or table.pick(LABELS)
    if name is None and config.tokenizer is None:
        name = table.pick(columns.TRANSCRIPTS)
    elif name is None:
        name = table.pick(texts.LABELS)
    if name is not None:
        return [name]

    # List columns of texts first, because they more likely hold labels
    text_columns = []
    numbers = []
    for column_name, column in zip(table.names, table.columns.columns, strict=True):
        if columns.is_numbers(column):
            numbers.append(column_name)
        else:
            text_columns.append(column_name)
    raise ConfigError(
        f"data.labels: got null, and {table.source} has the columns "
        f"{list_names(text_columns + numbers)}; expected the name of one, or one named "
        f"{' | '.join(LABELS)}, or {NO_LABELS}"
    )


def _find_inputs(table: DataTable, config: TableConfig, others: Sequence[str]) -> list[str]:
    """Return the input columns: `data.inputs`, or one with a usual name, or all columns of numbers.

    Columns that number the rows do not count as columns of numbers.

    Raises:
        ConfigError: no column fits, or several columns have a usual name.
        DataError: a column of text is likely one of numbers, see `columns.check_left_out`.
    """
    named = _find_named(table, config, others)
    if config.inputs is not None or len(named) == 1:
        return named

    # Without one usual name, take all columns of numbers
    numeric = []
    for name in others:
        if name.lower() in NUMBERING or name in table.row_numbers:
            continue
        column = table.column("data.inputs", name)
        if columns.is_numbers(column):
            numeric.append(name)
        else:
            columns.check_left_out(table, name, column)
    if named or not numeric:
        raise ConfigError(
            f"data.inputs: got null, and {table.source} has the columns {list_names(table.names)}; "
            "expected the name of one with paths or lists, or a list of those with numbers; for "
            "texts, data.tokenizer="
        )
    log.info(
        "%s: data.inputs: %d columns of numbers: %s",
        table.source,
        len(numeric),
        list_names(numeric),
    )
    return numeric


def _find_named(table: DataTable, config: TableConfig, others: Sequence[str]) -> list[str]:
    """Return the columns of `data.inputs`; if it is null, those with a usual name.

    A column of single numbers, such as `x` beside `z`, does not count as usual, because it may be
    one of several that make a sample.
    """
    if isinstance(config.inputs, list):
        return config.inputs
    if config.inputs is not None:
        return [config.inputs]
    named = []
    for name in others:
        if name.lower() not in (*PICTURES, *array_names.INPUTS):
            continue
        if not columns.is_number(table.column("data.inputs", name)):
            named.append(name)
    return named


def _find_sides(table: DataTable, name: str, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the indices in `rows` for training and for testing (`test`, or else `val`).

    Args:
        name: the column that names the side of each row.
        rows: the row of each sample, from 0.

    Raises:
        ConfigError: the name is not that of one column.
        DataError: a cell names no side, or a side has no rows.
    """
    # Each cell must name a side
    column = table.column("data.split", name).to_pylist()
    cells = [str(column[row]).strip().lower() for row in rows]
    takes = (*TRAIN_NAMES, *TEST_NAMES[0], *TEST_NAMES[1])
    for row, cell in zip(rows, cells, strict=True):
        if cell not in takes:
            got = repr(printable(cell)[:80])
            mend = ""
            if name == SIDE:
                mend = f"; try a copy without it: del data[{got}], then data.save_to_disk(...)"
            raise DataError(
                f"{table.rows.cell(name, row)}: got {got}, expected {' | '.join(takes)}{mend}"
            )

    # Names such as `val` are test samples only if no row has `test`
    train = np.flatnonzero(np.isin(cells, TRAIN_NAMES))
    for names in TEST_NAMES:
        test = np.flatnonzero(np.isin(cells, names))
        if len(test):
            break
    if not len(train) or not len(test):
        raise DataError(
            f"{table.source}: column {name!r} has {len(train)} rows to train and {len(test)} to "
            "test; expected both"
        )
    return [train, test]
