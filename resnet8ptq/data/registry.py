"""The sources of data, by name. A source is imported when a run asks for it, not before."""

import functools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from resnet8ptq.config.schema import (
    ArraysConfig,
    CocoConfig,
    DataConfig,
    FolderConfig,
    PreprocessConfig,
    TableConfig,
)
from resnet8ptq.core import cache
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.core.registry import look_up
from resnet8ptq.data import preprocessing
from resnet8ptq.data.dataset import Dataset, Split

Load = Callable[[Any, PreprocessConfig, Path], Dataset]  # settings of the schema, cache


@dataclass(frozen=True)
class Source:
    """Where data may lie.

    Attributes:
        load: the function that loads them, `module:name`.
        takes: what `data.root` names, in words; empty where it names nothing.
        file, folder: whether that may be a file, or a folder.
        key: the key of `data` that names it instead.
        schema: its settings.
        decodes: it decodes pictures, and sizes them as it does.
    """

    load: str
    takes: str = ""
    file: bool = False
    folder: bool = False
    key: str = "root"
    schema: type[DataConfig] = DataConfig
    decodes: bool = False


SOURCES = {
    "cifar10": Source(
        "resnet8ptq.data.sources.cifar10:load",
        "a folder with data_batch_1..5; your own: data=arrays, folder, table or huggingface",
        folder=True,
    ),
    "shapes": Source("resnet8ptq.data.sources.shapes:load"),
    "arrays": Source(
        "resnet8ptq.data.sources.arrays:load",
        "an .npz, .npy or idx file, or a folder of .npy and idx files",
        file=True,
        folder=True,
        schema=ArraysConfig,
    ),
    "folder": Source(
        "resnet8ptq.data.sources.folder:load",
        "a folder with one folder of pictures for each class",
        folder=True,
        schema=FolderConfig,
        decodes=True,
    ),
    "table": Source(
        "resnet8ptq.data.sources.table:load",
        "a .csv or .parquet file",
        file=True,
        schema=TableConfig,
        decodes=True,
    ),
    "coco": Source(
        "resnet8ptq.data.sources.coco:load",
        "a folder of pictures",
        folder=True,
        key="images",
        schema=CocoConfig,
        decodes=True,
    ),
    "huggingface": Source(
        "resnet8ptq.data.sources.huggingface:load",
        "a folder that save_to_disk of Hugging Face's datasets has written",
        folder=True,
        schema=TableConfig,
        decodes=True,
    ),
}


def load(name: str, root: str | None, cache_root: Path | None = None) -> Dataset:
    """Load CIFAR-10 or the embedded set as it is stored; see `read`."""
    return read(DataConfig(name, root), PreprocessConfig(), cache_root or cache.folder(None))


def read(
    config: DataConfig,
    preprocess: PreprocessConfig,
    cache_root: Path,
    calibrating: str | None = None,
) -> Dataset:
    """Load a settled data set. Its samples stay on disk: they are mapped from the cache.

    Args:
        calibrating: a folder of pictures without labels that calibrate; None: training samples do.

    Raises:
        DataError: a file is missing, damaged, or its labels do not fit; names the file.
        ConfigError: the settings do not fit the data, or the cache folder cannot be written.
    """
    look_up("data.name", config.name, SOURCES)
    return _read(json.dumps([asdict(config), asdict(preprocess), calibrating]), cache_root)


@functools.cache  # the jobs of one sweep share it
def _read(settings: str, cache_root: Path) -> Dataset:
    data, preprocessed, calibrating = json.loads(settings)
    source = SOURCES[data["name"]]
    config, preprocess = source.schema(**data), PreprocessConfig(**preprocessed)
    load: Load = resolve_name(source.load)
    found = load(config, preprocess, cache_root)
    sized = preprocess.size is not None or preprocess.channels == "grey"
    if sized and not source.decodes:
        from resnet8ptq.data import resizing  # imports Pillow

        found = resizing.shape(found, preprocess, cache_root)
    stored = (config.offset, config.scale) if isinstance(config, ArraysConfig) else (0.0, 1.0)
    steps = preprocessing.settle(preprocess, found.image_shape, *stored)
    if calibrating is not None:
        found = replace(
            found, calibration=_read_calibration(calibrating, found, preprocess, cache_root)
        )
    return found.with_splits(lambda split: replace(split, preprocessing=steps))


def _read_calibration(
    given: str, data: Dataset, preprocess: PreprocessConfig, cache_root: Path
) -> Split:
    """Return the pictures in a folder, of the size of the data set's own.

    Raises:
        ConfigError: it is no folder, or the data set has no pictures.
    """
    from resnet8ptq.data.sources import folder  # imports Pillow

    path = Path(given).expanduser()
    if not path.is_dir():
        raise ConfigError(f"calib.images: got {given} (not there), takes a folder of pictures")
    if not data.test.has_pictures:
        raise ConfigError(f"calib.images: got {given}, but {data.name} has no pictures")
    height, width, channels = data.image_shape
    sized = preprocess if preprocess.size is not None else replace(preprocess, size=[height, width])
    if channels == 1:
        sized = replace(sized, channels="grey")
    return folder.read_unlabelled(path, sized, cache_root)
