"""Where a data set lies, and reading it."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

from resnet8ptq.config.schema import DataConfig
from resnet8ptq.core.cache import downloads_folder
from resnet8ptq.core.errors import ConfigError, DataNotFoundError
from resnet8ptq.core.registry import look_up
from resnet8ptq.data import cifar10
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.shapes import pictures

log = logging.getLogger(__name__)
SPLITS: tuple[Literal["train", "test"], ...] = ("train", "test")


def settle(config: DataConfig) -> DataConfig:
    """Decide which data set this run uses and where it lies.

    Looks in `data.root`, `$CIFAR10_DIR`, `data/cifar-10-batches-py`, the download cache, and then
    downloads. Where all that fails, `data.on_missing=shapes` falls back to the embedded set.

    Returns:
        The config with `root` set to the folder of the batches; for the embedded set, `name`
        is `shapes` and `root` is None.

    Raises:
        ConfigError: there is no such data set, or `data.root` is set and is not a folder.
        DataNotFoundError: CIFAR-10 cannot be had and `data.on_missing=error`.
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


@cache  # one search, and at most one try to download, per process
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
        return cifar10.fetch(downloads_folder()), ""
    except Exception as error:  # requests, urllib and pooch each have their own
        log.debug("download failed", exc_info=True)
        tried.append(f"{cifar10.URL} ({type(error).__name__})")
        return None, ", ".join(tried)


def _load_shapes(root: str | None) -> Dataset:
    train, test = (Split(*pictures.draw(s), source="resnet8ptq.data.shapes") for s in SPLITS)
    return Dataset("shapes", pictures.CLASS_NAMES, train, test)


def _load_cifar10(root: str | None) -> Dataset:
    folder = Path(str(root))
    train = Split(*cifar10.read_split(folder, "train"), source=str(folder))
    images, labels = cifar10.read_split(folder, "test")
    # Every run goes through all test images, and more than once; through few of the others.
    test = Split(images[:], labels, source=str(folder))
    return Dataset("cifar10", cifar10.read_class_names(folder), train, test)


SOURCES: dict[str, Callable[[str | None], Dataset]] = {
    "cifar10": _load_cifar10,
    "shapes": _load_shapes,
}


@cache  # the jobs of one sweep share it
def load(name: str, root: str | None) -> Dataset:
    """Load a settled data set.

    Raises:
        DataError: a file is missing, damaged, or its labels do not fit; names the file.
    """
    return look_up("data.name", name, SOURCES)(root)
