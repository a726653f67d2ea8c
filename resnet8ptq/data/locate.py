"""Finds the files of a data set."""

import functools
import logging
import os
from dataclasses import replace
from pathlib import Path

from resnet8ptq.config.schema import DataConfig, TableConfig
from resnet8ptq.core import cache, files
from resnet8ptq.core.console import warn_once
from resnet8ptq.core.errors import ConfigError, DataNotFoundError
from resnet8ptq.core.registry import look_up
from resnet8ptq.data.sources import SOURCES, cifar10, mend_archive

log = logging.getLogger(__name__)


def find_data(config: DataConfig, own_network: bool = False) -> DataConfig:
    """Return the settings of the data set, with the paths of its files.

    `data.root` names the data set; for `data=coco`, `data.images` does. If it is null for
    `data=cifar10`, `$CIFAR10_DIR` names the folder. Without that variable, the search goes through
    `data/cifar-10-batches-py` and the download cache; then CIFAR-10 is downloaded. If that fails,
    `data.on_missing=shapes` falls back to the embedded set, unless the user has named a network.

    Args:
        own_network: whether the user has named a network, which the embedded set does not fit.

    Returns:
        The config, with absolute paths in `data.root` (`data.images` for `data=coco`), `data.test`
        and `data.tokenizer`. For the embedded set, `root` is None; where it replaces CIFAR-10,
        `name` becomes `shapes`.

    Raises:
        ConfigError: the data set is unknown, or is named without its settings; or a path is null,
            does not exist, or is a file in place of a folder or the reverse.
        DataNotFoundError: CIFAR-10 is not available, and `data.on_missing=error` or the user
            has named a network.
    """
    source = look_up("data.name", config.name, SOURCES)
    if not source.takes:
        return replace(config, root=None)
    if not isinstance(config, source.schema):
        raise ConfigError(f"data.name: got {config.name!r} alone; try data={config.name}")
    name = getattr(config, source.key)
    if name is None and config.name == "cifar10":
        return _find_cifar10_data(config, own_network)

    # The user names the file or folder
    root = files.expand(name or "").absolute()
    fits = (source.file and root.is_file()) or (source.folder and root.is_dir())
    if name is None or not fits:
        got = name or "null"
        mend = mend_archive(root)
        if not root.exists():
            got += " (not there)"
            mend = files.name_nearest(name)
        raise ConfigError(f"data.{source.key}: got {got}, expected {source.takes}{mend}")
    config = replace(config, **{source.key: str(root)})
    if isinstance(config, TableConfig):
        config = replace(config, test=_file(config, "test"), tokenizer=_file(config, "tokenizer"))
    return config


def _file(config: TableConfig, key: str) -> str | None:
    """Return the absolute path of the file that a setting names; None if it is null."""
    name = getattr(config, key)
    if name is None:
        return None
    path = files.expand(name).absolute()
    if not path.is_file():
        raise ConfigError(f"data.{key}: got {name} (not there), expected a file")
    return str(path)


def _find_cifar10_data(config: DataConfig, own_network: bool) -> DataConfig:
    root, tried = _find_cifar10()
    if root is not None:
        return replace(config, root=str(root))
    if config.on_missing == "error" or own_network:
        raise DataNotFoundError(
            f"data.root: no CIFAR-10 found; tried {tried}; try data.root= or CIFAR10_DIR with the "
            "folder of data_batch_1..5"
        )
    warn_once(
        log,
        "CIFAR-10 NOT FOUND (tried %s): the run uses drawn pictures, `shapes`, and their own "
        "network; its results do not apply to CIFAR-10; to fix it, set CIFAR10_DIR or data.root",
        tried,
    )
    return replace(config, name="shapes", root=None)


@functools.cache  # one search, and at most one download, per process
def _find_cifar10() -> tuple[Path | None, str]:
    """Return the folder of CIFAR-10, and ""; if there is none, None and the places tried."""
    folder = os.environ.get("CIFAR10_DIR")
    if folder:
        path = files.expand(folder).absolute()
        if not path.is_dir():
            raise ConfigError(
                f"$CIFAR10_DIR: got {folder} (not there), expected a folder with data_batch_1..5; "
                "try data=shapes, or unset it to look elsewhere"
            )
        return path, ""

    # Look in the working folder, then in the download cache, then on the web
    local = Path("data", cifar10.FOLDER).absolute()
    if local.is_dir():
        return local, ""
    try:
        return cifar10.fetch(cache.downloads_folder()).absolute(), ""
    except Exception as error:  # errors of requests, urllib or pooch
        log.debug("download failed", exc_info=True)
        return None, f"{local} (no such folder), {cifar10.URL} ({type(error).__name__})"
