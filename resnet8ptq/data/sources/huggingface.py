"""`data=huggingface`: a data set that Hugging Face's `datasets` has saved (`save_to_disk`).

Its Arrow files and what describes them are read: nothing is downloaded, and no script of a data set
is run.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa

from resnet8ptq.config.schema import PreprocessConfig, TableConfig
from resnet8ptq.core import files
from resnet8ptq.core.errors import ConfigError, DataError
from resnet8ptq.data.dataset import Dataset
from resnet8ptq.data.sources import SOURCES, table, unpacking
from resnet8ptq.data.sources.columns import LABELS, Limits, Table, check_size

TAKES = f"takes {SOURCES['huggingface'].takes}"
_SIDE = "split of the data set"  # the column that is added
_NOTES = b"resnet8ptq"


def load(config: TableConfig, preprocess: PreprocessConfig, cache_root: Path) -> Dataset:
    """Read the data set in the folder that `data.root` names; rows count through all its splits.

    Raises:
        ConfigError: `datasets` is not installed, or the settings do not say what is what.
        DataError: it is damaged, names files elsewhere, or a cell does not fit; names the row and
            the column.
    """
    if find_spec("datasets") is None:
        raise ConfigError(
            "data.name: got 'huggingface', takes the package datasets beside it: "
            "pip install -c constraints.txt -e '.[huggingface]'"
        )
    root = Path(str(config.root))
    inside = sorted(path for path in root.rglob("*") if path.is_file())
    named = "".join(f"{path.relative_to(root)}: {files.sha256(path)}\n" for path in inside)
    sha256 = hashlib.sha256(named.encode()).hexdigest()
    read = unpacking.unpack(root, _read, sha256, TAKES, cache_root)
    whole = Table(str(root), read)
    notes = json.loads(read.schema.metadata[_NOTES])
    if notes["sides"] > 1:
        config = replace(config, split=_SIDE)
    else:
        whole = Table(whole.place, whole.columns.drop_columns([_SIDE]))
    label = config.labels or whole.pick(LABELS)
    if config.classes is None and label in notes["classes"]:
        config = replace(config, classes=notes["classes"][label])
    return table.build(whole, root, root, sha256, config, preprocess, cache_root)


def _read(root: Path, limits: Limits) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Return the rows of all splits, and in the schema's notes the names of classes.

    Raises:
        DataError: too large, or it names files elsewhere.
    """
    logging.getLogger("datasets").setLevel(logging.WARNING)  # lists the frameworks that it finds
    import datasets

    _check_places(root)
    found = datasets.load_from_disk(str(root))
    sides = found if isinstance(found, dict) else {"": found}
    for side in sides.values():
        check_size(root, len(side.features), sum(map(len, sides.values())), limits)
    [first, *_] = sides.values()
    kinds = {
        name: kind for name, kind in first.features.items() if isinstance(kind, datasets.ClassLabel)
    }
    notes = {"sides": len(sides), "classes": {name: kind.names for name, kind in kinds.items()}}
    schema = first.features.arrow_schema.append(pa.field(_SIDE, pa.string()))
    return schema.with_metadata({_NOTES: json.dumps(notes)}), _rows(sides, schema)


def _rows(sides: Mapping[str, Any], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for name, side in sides.items():
        for some in side.with_format("arrow").iter(table.ROWS_AT_ONCE):
            sided = some.append_column(_SIDE, pa.array([name] * len(some)))
            yield from sided.cast(schema).to_batches()


def _check_places(root: Path) -> None:
    """Refuse splits and files that lie elsewhere: the data set's own JSON names them.

    Raises:
        DataError: it names one.
    """
    described = root / "dataset_dict.json"
    splits = json.loads(described.read_bytes())["splits"] if described.is_file() else [""]
    for folder in (root / name for name in splits):
        kept = json.loads((folder / "state.json").read_bytes())["_data_files"]
        for path in (folder, *(folder / file["filename"] for file in kept)):
            if not path.resolve().is_relative_to(root.resolve()):
                raise DataError(f"{root}: names {path}, which lies elsewhere; {TAKES}")
