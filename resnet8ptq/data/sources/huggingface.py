"""`data=huggingface`: a data set saved by Hugging Face's `datasets` (`save_to_disk`).

Nothing is downloaded, and no script of a data set is run.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa

from resnet8ptq.config.schema import PreprocessConfig, TableConfig
from resnet8ptq.core import files, invocation
from resnet8ptq.core.errors import ConfigError, DataError
from resnet8ptq.core.text import list_names
from resnet8ptq.data.dataset import Dataset
from resnet8ptq.data.decoding import Picture
from resnet8ptq.data.sources import SOURCES, table, texts, unpacking
from resnet8ptq.data.sources.columns import LABELS, DataTable, Limits
from resnet8ptq.data.sources.rows import FileRows

EXPECTED = f"expected {SOURCES['huggingface'].takes}"
_NOTES = b"resnet8ptq"


def load(config: TableConfig, preprocess: PreprocessConfig, cache_root: Path) -> Dataset:
    """Return the data set in the folder `data.root`; messages number the rows of each split.

    Raises:
        ConfigError: a package is missing, columns are not recognized, or a setting does not fit
            them.
        DataError: the data set is damaged or too large, refers to files outside of the folder, has
            too few rows, or has an unsuitable column, cell or picture; or the tokenizer is damaged.
    """
    table_of_rows, config = _open(config, cache_root)
    return table.build(table_of_rows, table_of_rows.source, config, preprocess, cache_root)


def list_pictures(config: TableConfig, cache_root: Path) -> list[Picture]:
    """Return the pictures that `load` decodes; none for numbers and texts."""
    table_of_rows, config = _open(config, cache_root)
    return table.find_pictures(table_of_rows, table_of_rows.source, config)


def _open(config: TableConfig, cache_root: Path) -> tuple[DataTable, TableConfig]:
    """Return the rows, and the settings; the data set may set the split and the class names.

    Raises:
        ConfigError: the package datasets is missing, `data.split` is set beside several splits, or
            several columns have a usual name of labels.
        DataError: the data set is damaged or too large, or refers to files outside of the folder.
    """
    if find_spec("datasets") is None:
        raise ConfigError(
            "data.name: got 'huggingface', which needs the package datasets; "
            f"try {invocation.install('huggingface')}"
        )
    root = Path(str(config.root))
    sha256 = files.hash_folder(root)
    rows = unpacking.unpack(root, _read_batches, sha256, EXPECTED, cache_root)

    # Several sides are a split
    notes = json.loads(rows.schema.metadata[_NOTES])
    if len(notes["sides"]) > 1:
        if config.split is not None:
            raise ConfigError(
                f"data.split: got {config.split}, and {root} has the splits "
                f"{list_names(notes['sides'])}; expected null"
            )
        config = replace(config, split=table.SIDE)
    else:
        rows = rows.drop_columns([table.SIDE])
    files_of_sides = []
    for side, count in notes["sides"].items():
        files_of_sides.append(FileRows(root / side, count))
    whole = DataTable(root, rows, sha256, files_of_sides)

    # The class names are those of the column of labels
    label = config.labels or whole.pick(LABELS) or whole.pick(texts.LABELS)
    if config.classes is None and str(label) in notes["classes"]:
        config = replace(config, classes=notes["classes"][str(label)])
    return whole, config


def _read_batches(root: Path, limits: Limits) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Return the rows of all splits; the schema's metadata hold row counts and class names."""
    # The library logs the installed frameworks
    logging.getLogger("datasets").setLevel(logging.WARNING)
    import datasets

    _check_paths(root)
    loaded = datasets.load_from_disk(str(root))
    sides = loaded if isinstance(loaded, dict) else {"": loaded}
    for side in sides.values():
        limits.check(root, len(side.features), sum(map(len, sides.values())))

    # All sides have the same columns; the first one tells the class names
    [first, *_] = sides.values()
    classes = {}
    for name, kind in first.features.items():
        kind = getattr(kind, "feature", kind)  # the type of a list's items
        if isinstance(kind, datasets.ClassLabel):
            classes[name] = kind.names
    counts = {name: len(side) for name, side in sides.items()}
    notes = {"sides": counts, "classes": classes}
    schema = first.features.arrow_schema.append(pa.field(table.SIDE, pa.string()))
    return schema.with_metadata({_NOTES: json.dumps(notes)}), _rows(sides, schema)


def _rows(sides: Mapping[str, Any], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for name, side in sides.items():
        for some in side.with_format("arrow").iter(table.ROWS_AT_ONCE):
            sided = some.append_column(table.SIDE, pa.array([name] * len(some)))
            yield from sided.cast(schema).to_batches()


def _check_paths(root: Path) -> None:
    """Raise `DataError` for a path in the data set's JSON files that leads out of `root`."""
    # A data set of several splits has a folder for each
    described = root / "dataset_dict.json"
    splits = [""]
    if described.is_file():
        splits = json.loads(described.read_bytes())["splits"]
    for name in splits:
        folder = root / name
        stored = json.loads((folder / "state.json").read_bytes())["_data_files"]
        paths = [folder]
        for file in stored:
            paths.append(folder / file["filename"])
        for path in paths:
            if not path.resolve().is_relative_to(root.resolve()):
                raise DataError(f"{root}: names {path}, which lies elsewhere; {EXPECTED}")
