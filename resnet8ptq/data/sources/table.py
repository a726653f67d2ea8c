"""`data=table`: a CSV or Parquet file with a row for each sample."""

import csv
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from resnet8ptq.config.schema import PreprocessConfig, TableConfig
from resnet8ptq.core import cache, code, files
from resnet8ptq.core.errors import ConfigError, DataError, PtqError
from resnet8ptq.core.text import one_line, printable
from resnet8ptq.data import resizing
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.decoding import decode
from resnet8ptq.data.sources import SOURCES, arrays, columns, unpacking
from resnet8ptq.data.sources.arrays import NO_LABELS
from resnet8ptq.data.sources.columns import LABELS, PICTURES, Limits, Table, list_names
from resnet8ptq.data.splitting import Named, keep_split, split_one

log = logging.getLogger(__name__)

TAKES = f"takes {SOURCES['table'].takes}"
SPLITS = ("split", "subset", "set")
TRAIN, TESTS = ("train", "training"), (("test", "testing"), ("val", "valid", "validation", "dev"))
NUMBERING = ("", "id", "index", "row", "unnamed: 0")  # the last as pandas writes it
_SEPARATORS = ",;\t"
MAX_HEAD_BYTES = 2**24  # of the line of names, at most
ROWS_AT_ONCE = 1024


def load(config: TableConfig, preprocess: PreprocessConfig, cache_root: Path) -> Dataset:
    """Read the table that `data.root` names.

    Raises:
        ConfigError: the settings do not say what is what.
        DataError: it is damaged, or a cell does not fit; names the row and the column.
    """
    root = Path(str(config.root))
    sha256 = files.sha256(root)
    table = Table(str(root), read(root, sha256, cache_root))
    return build(table, root, root.parent, sha256, config, preprocess, cache_root)


def build(
    table: Table,
    root: Path,
    folder: Path,
    sha256: str,
    config: TableConfig,
    preprocess: PreprocessConfig,
    cache_root: Path,
) -> Dataset:
    """Return a table's rows as samples, split as a column says, or else by class and seed.

    Args:
        root: where it comes from.
        folder: where paths of pictures begin, if `data.sources.folder` is not set.
        sha256: of the table's content.

    Raises:
        ConfigError, DataError: see `load`.
    """
    if not len(table.columns):
        raise DataError(f"{root}: has no rows; takes one for each sample")
    side_column = config.split or table.pick(SPLITS)
    group_column = config.groups or table.pick(arrays.GROUPS)
    label_column = config.labels or table.pick(LABELS)
    labels: NDArray[Any] | None = None
    names: tuple[str, ...] = ()
    named = True
    if label_column is None:
        pairs = zip(table.names, table.columns.columns, strict=True)
        text_first = [name for name, _ in sorted(pairs, key=lambda p: columns.is_numbers(p[1]))]
        raise ConfigError(
            f"data.labels: got null, and {root} has the columns {list_names(text_first)}; takes "
            f"the name of one, or one named {' | '.join(LABELS)}, or {NO_LABELS}"
        )
    if label_column != NO_LABELS:
        labels, names, named = columns.labels(table, label_column, config.classes)
    groups = None if group_column is None else columns.groups(table, group_column)
    taken = (label_column, side_column, group_column)
    others = [name for name in table.names if name not in taken]
    inputs = _find_inputs(table, config, others)
    first = table.column("data.inputs", inputs[0])
    decoded = len(inputs) == 1 and (columns.is_text(first) or columns.is_packed(first))
    if decoded:
        find = columns.pictures_at if columns.is_text(first) else columns.packed_pictures
        top = folder if config.folder is None else Path(config.folder).expanduser()
        found = find(table, inputs[0], top)
        images, rows = decode(found, preprocess, config.on_bad, cache_root)
        shown = [found[row].name for row in rows]
    else:
        images = _keep_numbers(table, inputs, config.shape, sha256, cache_root)
        rows = np.arange(len(table.columns))
        shown = [f"{root}: row {row + 1}" for row in rows]
    labels, groups = (None if each is None else each[rows] for each in (labels, groups))
    split = Split(images, labels, str(root), groups=groups)
    title = root.name.partition(".")[0] or root.name
    if side_column is None:
        data = split_one(title, names, split, root, config, named)
    else:
        train, test = (
            Named(split.take(places), [shown[place] for place in places])
            for places in _sides(table, side_column, rows)
        )
        data = keep_split(title, names, train, test, root, named)
    sized = preprocess.size is not None or preprocess.channels == "grey"
    return resizing.shape(data, preprocess, cache_root) if sized and not decoded else data


def read(path: Path, sha256: str, cache_root: Path) -> pa.Table:
    """Read a CSV file, by its suffix, or a Parquet file, which is unpacked into the cache.

    CSV columns are separated by commas, semicolons or tabs, whichever the first line has most of;
    a column is of integers, numbers or text, whichever all of its cells are.

    Raises:
        DataError: it cannot be read.
    """
    try:
        if path.suffix.lower() != ".parquet":
            return _read_csv(path)
        return unpacking.unpack(path, _read_parquet, sha256, TAKES, cache_root)
    except PtqError:
        raise
    except Exception as error:  # Arrow's own, csv.Error and OSError
        raise DataError(f"{path}: cannot be read ({one_line(error)}); {TAKES}") from None


def _read_parquet(path: Path, limits: Limits) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    file = pq.ParquetFile(path)
    columns.check_size(path, file.metadata.num_columns, file.metadata.num_rows, limits)
    return file.schema_arrow, file.iter_batches(ROWS_AT_ONCE)


def _read_csv(path: Path) -> pa.Table:
    with path.open("rb") as file:
        head = file.read(MAX_HEAD_BYTES)
    if head.startswith(arrays.GZIP):
        raise DataError(f"{path}: is gzipped; takes it unpacked: gunzip it first")
    text = head.decode("utf-8", "replace")
    separator = max(_SEPARATORS, key=text.partition("\n")[0].count)
    lines = iter(text.splitlines(keepends=True))
    names = next(csv.reader(lines, delimiter=separator), [])
    if len(head) == MAX_HEAD_BYTES and next(lines, None) is None:
        raise DataError(f"{path}: its line of names is longer than {MAX_HEAD_BYTES:,} bytes")
    columns.check_size(path, len(names), 0, columns.limits())
    # One block: the types of the columns are those of the first.
    block = pyarrow.csv.ReadOptions(block_size=min(path.stat().st_size + 1, 2**31 - 1))
    parsing = pyarrow.csv.ParseOptions(delimiter=separator, newlines_in_values=True)
    with pa.OSFile(str(path)) as file:  # by its name, Arrow would unpack it
        return pyarrow.csv.read_csv(file, block, parsing)


def _keep_numbers(
    table: Table,
    names: Sequence[str],
    shape: Sequence[int] | None,
    sha256: str,
    cache_root: Path,
) -> NDArray[Any]:
    """Return the samples that columns of numbers hold, mapped from the cache."""

    def make(entry: Path) -> None:
        columns.write_numbers(entry / "samples.npy", table, names, shape)

    key: cache.Key = {
        "sha256": sha256,
        "columns": json.dumps([list(names), shape]),
        "code": code.behind(__name__),
    }
    entry = cache.entry(cache_root, "tables", key, make)
    return np.load(entry / "samples.npy", mmap_mode="r")


def _find_inputs(table: Table, config: TableConfig, others: Sequence[str]) -> list[str]:
    """Return the columns of inputs: those given, one with a usual name, or all of numbers.

    Those of numbers leave out what numbers the rows.
    """
    if config.inputs is not None:
        return config.inputs if isinstance(config.inputs, list) else [config.inputs]
    usual = [name for name in others if name.lower() in (*PICTURES, *arrays.INPUTS)]
    if len(usual) == 1:
        return usual
    measured = [name for name in others if name.lower() not in NUMBERING]
    found = [name for name in measured if columns.is_numbers(table.column("data.inputs", name))]
    if len(usual) > 1 or not found:
        raise ConfigError(
            f"data.inputs: got null, and {table.place} has the columns {list_names(table.names)}; "
            "takes the name of one with paths or lists, or a list of those with numbers"
        )
    log.info(
        "%s: data.inputs: %d columns of numbers: %s", *(table.place, len(found), list_names(found))
    )
    return found


def _sides(table: Table, name: str, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return which of `rows` train, and which test: `test`, or where there are none, `val`."""
    given = table.column("data.split", name).to_pylist()
    cells = [str(given[row]).strip().lower() for row in rows]
    takes = (*TRAIN, *TESTS[0], *TESTS[1])
    for row, cell in zip(rows, cells, strict=True):
        if cell not in takes:
            raise DataError(
                f"{table.place}: column {name!r}, row {row + 1}: got {printable(cell)[:80]!r}, "
                f"takes {' | '.join(takes)}"
            )
    train, test, validation = (np.flatnonzero(np.isin(cells, side)) for side in (TRAIN, *TESTS))
    sides = [train, test if len(test) else validation]
    if not all(map(len, sides)):
        raise DataError(
            f"{table.place}: column {name!r} has {len(sides[0])} rows to train and "
            f"{len(sides[1])} to test; takes both"
        )
    return sides
