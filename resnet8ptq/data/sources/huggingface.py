"""`data=huggingface`: a data set that Hugging Face's `datasets` has saved (`save_to_disk`).

Its Arrow files and what describes them are read: nothing is downloaded, and no script of a data set
is run.
"""

import hashlib
import logging
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from resnet8ptq.config.schema import PreprocessConfig, TableConfig
from resnet8ptq.core import files
from resnet8ptq.core.errors import ConfigError, DataError, PtqError
from resnet8ptq.core.text import one_line
from resnet8ptq.data.dataset import Dataset
from resnet8ptq.data.sources import SOURCES, table
from resnet8ptq.data.sources.columns import LABELS, Table, check_size

TAKES = f"takes {SOURCES['huggingface'].takes}"
_SIDE = "split of the data set"  # the column that is added


def load(config: TableConfig, preprocess: PreprocessConfig, cache_root: Path) -> Dataset:
    """Read the data set in the folder that `data.root` names; rows count through all its splits.

    Raises:
        ConfigError: `datasets` is not installed, or the settings do not say what is what.
        DataError: it is damaged, or a cell does not fit; names the row and the column.
    """
    logging.getLogger("datasets").setLevel(logging.WARNING)  # lists the frameworks that it finds
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            "data.name: got 'huggingface', takes the package datasets beside it: "
            "pip install -c constraints.txt -e '.[huggingface]'"
        ) from None
    root = Path(str(config.root))
    try:
        found = datasets.load_from_disk(str(root))
        sides = found if isinstance(found, dict) else {"": found}
        for side in sides.values():
            check_size(root, len(side.features), sum(map(len, sides.values())))
        parts = [
            side.with_format("arrow")[:].append_column(_SIDE, pa.array([name] * len(side)))
            for name, side in sides.items()
        ]
        whole = Table(str(root), pa.concat_tables(parts))
    except PtqError:
        raise
    except Exception as error:  # Arrow's own, and those of datasets
        raise DataError(f"{root}: cannot be read ({one_line(error)}); {TAKES}") from None
    if len(sides) > 1:
        config = replace(config, split=_SIDE)
    else:
        whole = Table(whole.place, whole.columns.drop_columns([_SIDE]))
    label = config.labels or whole.pick(LABELS)
    feature = next(iter(sides.values())).features.get(label)
    if config.classes is None and isinstance(feature, datasets.ClassLabel):
        config = replace(config, classes=feature.names)
    hashes = [files.sha256(path) for path in sorted(root.rglob("*.arrow"))]
    sha256 = hashlib.sha256(" ".join(hashes).encode()).hexdigest()
    return table.build(whole, root, root, sha256, config, preprocess, cache_root)
