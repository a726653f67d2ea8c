"""Where a data set lies."""

import functools
import logging
import os
from dataclasses import replace
from pathlib import Path

from resnet8ptq.config.schema import DataConfig
from resnet8ptq.core import cache
from resnet8ptq.core.errors import ConfigError, DataNotFoundError
from resnet8ptq.core.registry import look_up
from resnet8ptq.data.sources import SOURCES, cifar10

log = logging.getLogger(__name__)


def settle(config: DataConfig) -> DataConfig:
    """Decide which data set this run uses and where it lies.

    The user's own lie where `data.root` says. CIFAR-10 lies there, or where `$CIFAR10_DIR` says.
    Where neither is set, it is looked for in `data/cifar-10-batches-py` and the download cache, and
    then downloaded. Where that fails, `data.on_missing=shapes` falls back to the embedded set.

    Returns:
        The config with `root` set to an absolute path; for the embedded set, `name` is `shapes`
        and `root` is None.

    Raises:
        ConfigError: there is no such data set, or `data.root` or `$CIFAR10_DIR` names none.
        DataNotFoundError: CIFAR-10 is not available and `data.on_missing=error`.
    """
    source = look_up("data.name", config.name, SOURCES)
    if config.name == "shapes":
        return replace(config, root=None)
    if not isinstance(config, source.schema):
        raise ConfigError(f"data.name: got {config.name!r} by itself; takes data={config.name}")
    given = getattr(config, source.key)
    root = None if given is None else Path(given).expanduser().absolute()
    if root is None and config.name == "cifar10":
        return _settle_cifar10(config)
    there = root is not None and (
        (source.file and root.is_file()) or (source.folder and root.is_dir())
    )
    if not there:
        missing = " (not there)" if root is not None and not root.exists() else ""
        raise ConfigError(
            f"data.{source.key}: got {given or 'null'}{missing}, takes {source.takes}"
        )
    return replace(config, **{source.key: str(root)})


def _settle_cifar10(config: DataConfig) -> DataConfig:
    root, tried = _find_cifar10()
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


@functools.cache  # one search, and at most one try to download, per process
def _find_cifar10() -> tuple[Path | None, str]:
    tried = []
    if named := os.environ.get("CIFAR10_DIR"):
        path = Path(named).expanduser().absolute()
        if not path.is_dir():
            raise ConfigError(
                f"$CIFAR10_DIR: got {named} (not there), takes a folder with data_batch_1..5; try "
                "data=shapes, or unset it to look elsewhere"
            )
        return path, ""
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
