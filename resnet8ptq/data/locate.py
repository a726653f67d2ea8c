"""Where a data set lies, and reading it."""

import functools
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import (
    ArraysConfig,
    DataConfig,
    FolderConfig,
    PreprocessConfig,
    TableConfig,
)
from resnet8ptq.core import cache
from resnet8ptq.core.errors import ConfigError, DataNotFoundError
from resnet8ptq.core.registry import look_up
from resnet8ptq.data import array_files, cifar10
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.preprocessing import Preprocessing
from resnet8ptq.data.shapes import pictures

log = logging.getLogger(__name__)
SPLITS: tuple[pictures.Split, ...] = ("train", "test")


def settle(config: DataConfig) -> DataConfig:
    """Decide which data set this run uses and where it lies.

    The user's own lie where `data.root` says. CIFAR-10 is looked for there, in `$CIFAR10_DIR`,
    `data/cifar-10-batches-py`, the download cache, and then
    downloads. Where all that fails, `data.on_missing=shapes` falls back to the embedded set.

    Returns:
        The config with `root` set to the folder of the batches; for the embedded set, `name`
        is `shapes` and `root` is None.

    Raises:
        ConfigError: there is no such data set, or `data.root` is set and is not a folder.
        DataNotFoundError: CIFAR-10 is not available and `data.on_missing=error`.
    """
    look_up("data.name", config.name, SOURCES)
    if config.name == "shapes":
        return replace(config, root=None)
    root = None if config.root is None else Path(config.root).expanduser().absolute()
    if config.name in _OWN:
        schema, takes = _OWN[config.name]
        if not isinstance(config, schema):
            raise ConfigError(f"data.name: got {config.name!r} by itself; takes data={config.name}")
        if root is None or not (
            (config.name in _FOLDERS and root.is_dir())
            or (config.name in _FILES and root.is_file())
        ):
            raise ConfigError(f"data.root: got {config.root or 'null'}, {takes}")
        return replace(config, root=str(root))
    if root is not None and not root.is_dir():
        raise ConfigError(f"data.root: got {config.root}, takes a folder with data_batch_1..5")
    root, tried = (root, "") if root is not None else _find_cifar10()
    if root is not None:
        return replace(config, root=str(root))
    if config.on_missing == "error":
        raise DataNotFoundError(f"data.root: no CIFAR-10 found; tried {tried}")
    log.warning(
        "CIFAR-10 NOT FOUND: this run uses the embedded data set `shapes` and its own model "
        "instead; its numbers say nothing about CIFAR-10. Tried %s. To fix it, set CIFAR10_DIR or "
        "data.root to the folder of the published batches; data.on_missing=error refuses instead.",
        tried,
    )
    return replace(config, name="shapes", root=None)


_OWN: dict[str, tuple[type[DataConfig], str]] = {  # the schema, and what `data.root` takes
    "arrays": (ArraysConfig, array_files.TAKES),
    "folder": (FolderConfig, "takes a folder with one folder of pictures for each class"),
    "table": (TableConfig, "takes a .csv or .parquet file"),
    "huggingface": (TableConfig, "takes a folder that save_to_disk of datasets has written"),
}
_FILES, _FOLDERS = ("arrays", "table"), ("arrays", "folder", "huggingface")
_SHAPED = ("folder", "table", "huggingface")  # which size pictures themselves, as they decode


@functools.cache  # one search, and at most one try to download, per process
def _find_cifar10() -> tuple[Path | None, str]:
    tried = []
    named = os.environ.get("CIFAR10_DIR")
    if named:
        if Path(named).is_dir():
            return Path(named).absolute(), ""
        tried.append(f"$CIFAR10_DIR={named} (no such folder)")
    local = Path("data", cifar10.FOLDER).absolute()
    if local.is_dir():
        return local, ""
    tried.append(f"{local} (no such folder)")
    try:
        return cifar10.fetch(cache.downloads_folder()).absolute(), ""
    except Exception as error:  # requests, urllib and pooch each have their own
        log.debug("download failed", exc_info=True)
        tried.append(f"{cifar10.URL} ({type(error).__name__})")
        return None, ", ".join(tried)


def _load_shapes(config: DataConfig, preprocess: PreprocessConfig, cache_root: Path) -> Dataset:
    code, source = cache.code("data/shapes/pictures"), "resnet8ptq.data.shapes"
    keys = {split: {"split": split, "code": code} for split in SPLITS}
    return _keep("shapes", pictures.CLASS_NAMES, source, pictures.draw, keys, cache_root)


def _load_cifar10(config: DataConfig, preprocess: PreprocessConfig, cache_root: Path) -> Dataset:
    folder, code = Path(str(config.root)), cache.code("data/cifar10", "data/array_pickle")
    hashes = {split: cifar10.digests(folder, split, cache_root) for split in SPLITS}
    keys = {split: {**hashes[split], "code": code} for split in SPLITS}
    names, read = cifar10.read_class_names(folder), partial(cifar10.read_split, folder)
    return _keep("cifar10", names, str(folder), read, keys, cache_root)


def _keep(
    name: str,
    class_names: tuple[str, ...],
    source: str,
    read: Callable[[pictures.Split], tuple[NDArray[np.uint8], NDArray[np.int64]]],
    keys: Mapping[pictures.Split, cache.Key],
    cache_root: Path,
) -> Dataset:
    """Return a data set of pictures [N, H, W, C], mapped from files that are made by `read`."""

    def open_split(split: pictures.Split) -> Split:
        def make(folder: Path) -> None:
            images, labels = read(split)
            np.save(folder / "images.npy", images)
            np.save(folder / "labels.npy", labels)

        folder = cache.entry(cache_root, name, keys[split], make)
        images = np.load(folder / "images.npy", mmap_mode="r")
        return Split(np.asarray(images), np.load(folder / "labels.npy"), source)

    return Dataset(name, class_names, open_split("train"), open_split("test"))


Source = Callable[[Any, PreprocessConfig, Path], Dataset]  # the first of the source's own schema


def _import(module: str) -> Source:
    """Return what loads a source whose libraries only it needs, such as Pillow and pyarrow."""
    return lambda *given: resolve_name(f"resnet8ptq.data.{module}:load")(*given)


SOURCES: dict[str, Source] = {
    "cifar10": _load_cifar10,
    "shapes": _load_shapes,
    "arrays": lambda config, _, cache_root: array_files.load(config, cache_root),
    "folder": _import("folder"),
    "table": _import("table"),
    "huggingface": _import("huggingface"),
}


def load(name: str, root: str | None, cache_root: Path | None = None) -> Dataset:
    """Load CIFAR-10 or the embedded set as it is stored; see `read`."""
    return read(DataConfig(name, root), PreprocessConfig(), cache_root or cache.folder(None))


def read(config: DataConfig, preprocess: PreprocessConfig, cache_root: Path) -> Dataset:
    """Load a settled data set. Its samples stay on disk: they are mapped from the cache.

    Raises:
        DataError: a file is missing, damaged, or its labels do not fit; names the file.
        ConfigError: the settings do not fit the data, or the cache folder cannot be written.
    """
    look_up("data.name", config.name, SOURCES)
    return _read(json.dumps([asdict(config), asdict(preprocess)]), cache_root)


@functools.cache  # the jobs of one sweep share it
def _read(settings: str, cache_root: Path) -> Dataset:
    data, preprocessing = json.loads(settings)
    schema = _OWN[data["name"]][0] if data["name"] in _OWN else DataConfig
    config, preprocess = schema(**data), PreprocessConfig(**preprocessing)
    found = SOURCES[config.name](config, preprocess, cache_root)
    sized = preprocess.size is not None or preprocess.channels == "grey"
    if sized and config.name not in _SHAPED:
        from resnet8ptq.data import resizing  # imports Pillow

        found = resizing.shape(found, preprocess, cache_root)
    steps = _arithmetic(config, preprocess, found.image_shape)
    train, test = (replace(split, preprocessing=steps) for split in (found.train, found.test))
    return replace(found, train=train, test=test)


def _arithmetic(
    config: DataConfig, preprocess: PreprocessConfig, shape: tuple[int, ...]
) -> Preprocessing:
    for key, values in (("mean", preprocess.mean), ("std", preprocess.std)):
        if len(values) not in (1, shape[-1]):
            raise ConfigError(
                f"preprocess.{key}: got {len(values)} numbers, takes one, or one for each channel: "
                f"the samples are {shape}, channels last"
            )
    bgr = preprocess.channels == "bgr"
    if bgr and (len(shape) != 3 or shape[-1] != 3):
        raise ConfigError(
            f"preprocess.channels: got 'bgr', takes pictures [H, W, 3]; the samples are {shape}"
        )
    stored = (config.offset, config.scale) if isinstance(config, ArraysConfig) else (0.0, 1.0)
    mean, std = tuple(map(float, preprocess.mean)), tuple(map(float, preprocess.std))
    return Preprocessing(*stored, bgr, preprocess.scale, mean, std)
