"""Where a data set lies, and reading it."""

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import DataConfig
from resnet8ptq.core import cache
from resnet8ptq.core.errors import ConfigError, DataNotFoundError
from resnet8ptq.core.registry import look_up
from resnet8ptq.data import cifar10
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.shapes import pictures

log = logging.getLogger(__name__)
SPLITS: tuple[pictures.Split, ...] = ("train", "test")


def settle(config: DataConfig) -> DataConfig:
    """Decide which data set this run uses and where it lies.

    Looks in `data.root`, `$CIFAR10_DIR`, `data/cifar-10-batches-py`, the download cache, and then
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
    if config.root is not None:
        config = replace(config, root=str(Path(config.root).expanduser()))
    if config.root is not None and not Path(config.root).is_dir():
        raise ConfigError(f"data.root: got {config.root}, takes a folder with data_batch_1..5")
    root, tried = (Path(config.root), "") if config.root is not None else _find_cifar10()
    if root is not None:
        return replace(config, root=str(root.absolute()))
    if config.on_missing == "error":
        raise DataNotFoundError(f"data.root: no CIFAR-10 found; tried {tried}")
    log.warning(
        "CIFAR-10 NOT FOUND: this run uses the embedded data set `shapes` and its own model "
        "instead; its numbers say nothing about CIFAR-10. Tried %s. To fix it, set CIFAR10_DIR or "
        "data.root to the folder of the published batches; data.on_missing=error refuses instead.",
        tried,
    )
    return replace(config, name="shapes", root=None)


@functools.cache  # one search, and at most one try to download, per process
def _find_cifar10() -> tuple[Path | None, str]:
    tried = []
    named = os.environ.get("CIFAR10_DIR")
    if named:
        if Path(named).is_dir():
            return Path(named), ""
        tried.append(f"$CIFAR10_DIR={named} (no such folder)")
    local = Path("data", cifar10.FOLDER).absolute()
    if local.is_dir():
        return local, ""
    tried.append(f"{local} (no such folder)")
    try:
        return cifar10.fetch(cache.downloads_folder()), ""
    except Exception as error:  # requests, urllib and pooch each have their own
        log.debug("download failed", exc_info=True)
        tried.append(f"{cifar10.URL} ({type(error).__name__})")
        return None, ", ".join(tried)


def _load_shapes(root: str | None, cache_root: Path) -> Dataset:
    code = cache.code("data/shapes/pictures")
    train, test = (
        _keep("shapes", {"split": split, "code": code}, cache_root, partial(pictures.draw, split))
        for split in SPLITS
    )
    source = "resnet8ptq.data.shapes"
    return Dataset("shapes", pictures.CLASS_NAMES, Split(*train, source), Split(*test, source))


def _load_cifar10(root: str | None, cache_root: Path) -> Dataset:
    folder, code = Path(str(root)), cache.code("data/cifar10", "data/array_pickle")
    train, test = (
        _keep(
            "cifar10",
            {**cifar10.digests(folder, split, cache_root), "code": code},
            cache_root,
            partial(cifar10.read_split, folder, split),
        )
        for split in SPLITS
    )
    names, source = cifar10.read_class_names(folder), str(folder)
    return Dataset("cifar10", names, Split(*train, source), Split(*test, source))


Arrays = tuple[NDArray[np.uint8], NDArray[np.int64]]


def _keep(kind: str, key: cache.Key, cache_root: Path, read: Callable[[], Arrays]) -> Arrays:
    """Return images [N, H, W, C], mapped from a file, and labels [N]; `read` makes that file."""

    def make(folder: Path) -> None:
        images, labels = read()
        np.save(folder / "images.npy", images)
        np.save(folder / "labels.npy", labels)

    folder = cache.entry(cache_root, kind, key, make)
    images = np.load(folder / "images.npy", mmap_mode="r")
    return np.asarray(images), np.load(folder / "labels.npy")


SOURCES: dict[str, Callable[[str | None, Path], Dataset]] = {
    "cifar10": _load_cifar10,
    "shapes": _load_shapes,
}


@functools.cache  # the jobs of one sweep share it
def load(name: str, root: str | None, cache_root: Path | None = None) -> Dataset:
    """Load a settled data set. Its images stay on disk: they are mapped from the cache.

    Raises:
        DataError: a file is missing, damaged, or its labels do not fit; names the file.
        ConfigError: the cache folder cannot be written.
    """
    source = look_up("data.name", name, SOURCES)
    return source(root, cache_root or cache.folder(None))
