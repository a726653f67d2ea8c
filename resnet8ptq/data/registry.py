"""Loads a data set by its source, and sets its preprocessing and the size of its pictures."""

import functools
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from resnet8ptq.config.schema import ArraysConfig, DataConfig, PreprocessConfig
from resnet8ptq.core import cache, files
from resnet8ptq.core.errors import ConfigError, DataError, PtqError, errors_as
from resnet8ptq.data import preprocessing
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.sources import SOURCES

log = logging.getLogger(__name__)

# Takes settings, preprocessing and cache folder
Load = Callable[[Any, PreprocessConfig, Path], Dataset]


def load(name: str, root: str | None, cache_root: Path | None = None) -> Dataset:
    """Load CIFAR-10 or the embedded set without preprocessing; see `read`.

    Args:
        name: `cifar10` or `shapes`.
        root: CIFAR-10's folder.
        cache_root: None for the default cache folder.
    """
    return read(DataConfig(name, root), PreprocessConfig(), cache_root or cache.folder(None))


def read(
    config: DataConfig,
    preprocess: PreprocessConfig,
    cache_root: Path,
    calibrating: str | None = None,
) -> Dataset:
    """Load a data set that `locate.find_data` has located; its samples are mapped from files.

    Jobs of one process share the data set.

    Args:
        calibrating: a folder of unlabelled pictures for calibration; None for training samples.

    Raises:
        DataError: a file is missing, damaged or unsuitable, or pictures become too large; the
            message names the file or the setting.
        ConfigError: the settings do not fit the data, a package is missing, or the cache folder
            cannot be written.
    """
    return _read(json.dumps([asdict(config), asdict(preprocess), calibrating]), cache_root)


def list_sizes(config: DataConfig, cache_root: Path) -> frozenset[tuple[int, int]]:
    """Return heights and widths of the pictures of a located data set, by their files' headers.

    The search stops soon after two sizes are known. The result is empty for sources without picture
    files, such as arrays, and if no header is readable.

    Raises:
        PtqError: the pictures cannot be listed.
    """
    return _list_sizes(json.dumps(asdict(config)), cache_root)


def find_size(
    preprocess: PreprocessConfig,
    data: DataConfig,
    cache_root: Path,
    find_networks: Callable[[], tuple[int, int] | None],
) -> PreprocessConfig:
    """Return the preprocessing, with the network's size of pictures if it is needed.

    It is needed if `preprocess.size` is null, and pictures have other sizes than the network takes.
    Errors are suppressed here, because loading data and network raises them again.

    Args:
        data: the located data set.
        find_networks: returns height and width of the network's pictures, or None if it fixes no
            size; called only if the data have picture files, because it is slow.
    """
    if preprocess.size is not None:
        return preprocess

    # Ask for the network's size only if there are pictures
    size = None
    with suppress(PtqError, OSError):
        sizes = list_sizes(data, cache_root)
        if sizes:
            size = find_networks()
        if sizes == {size}:
            return preprocess
    if size is None:
        return preprocess
    log.info(
        "preprocess.size: got null, and the pictures have other sizes than the network takes; the "
        "run uses the network's, %s, by preprocess.resize=%s",
        list(size),
        preprocess.resize,
    )
    return replace(preprocess, size=list(size))


@functools.cache  # shared by the jobs of a sweep
def _list_sizes(settings: str, cache_root: Path) -> frozenset[tuple[int, int]]:
    data = json.loads(settings)
    source = SOURCES[data["name"]]
    if not source.pictures:
        return frozenset()
    from resnet8ptq.data import decoding  # imports Pillow

    config = source.schema(**data)
    with _damage_as_data_error(f"data.{source.key}", getattr(config, source.key)):
        return decoding.list_sizes(resolve_name(source.pictures)(config, cache_root))


@functools.cache  # shared by the jobs of a sweep
def _read(settings: str, cache_root: Path) -> Dataset:
    data, preprocessed, calibrating = json.loads(settings)
    source = SOURCES[data["name"]]
    config = source.schema(**data)
    preprocess = PreprocessConfig(**preprocessed)
    load: Load = resolve_name(source.load)
    with _damage_as_data_error(f"data.{source.key}", getattr(config, source.key)):
        dataset = load(config, preprocess, cache_root)

    # Sources without files of pictures do not resize themselves
    sized = preprocess.size is not None or preprocess.channels == "grey"
    if sized and not source.pictures:
        from resnet8ptq.data import decoding  # imports Pillow

        dataset = decoding.resize_all(dataset, preprocess, cache_root)

    # Stored integers may stand for other values
    offset = 0.0
    step = 1.0
    if isinstance(config, ArraysConfig):
        offset = config.offset
        step = config.scale
    steps = preprocessing.make_preprocessing(preprocess, dataset.image_shape, offset, step)
    if calibrating is not None:
        with _damage_as_data_error("calib.images", calibrating):
            images = _read_calibration(calibrating, dataset, preprocess, cache_root)
        dataset = replace(dataset, calibration=images)
    return dataset.with_splits(lambda split: replace(split, preprocessing=steps))


@contextmanager
def _damage_as_data_error(key: str, path: str | None) -> Iterator[None]:
    """Turn a library's error into a `DataError` of one line, with the setting and its file.

    Libraries raise dozens of error classes. The sources' own errors, which name the damaged part,
    pass unchanged. Without a path, as for the embedded set, no error is converted.
    """
    if path is None:
        yield
        return
    with errors_as(
        DataError,
        f"{key}: got {path}, which cannot be read",
        "expected a whole file, its texts in UTF-8",
    ):
        yield


def _read_calibration(
    name: str, data: Dataset, preprocess: PreprocessConfig, cache_root: Path
) -> Split:
    """Return the pictures in a folder, resized to the size of the data set's pictures.

    Raises:
        ConfigError: the folder does not exist, or the data set has no pictures
            [N, H, W, 1 or 3].
        DataError: the folder has no pictures, or one cannot be read.
    """
    from resnet8ptq.data.sources import folder  # imports Pillow

    path = files.expand(name)
    if not path.is_dir():
        raise ConfigError(f"calib.images: got {name} (not there), expected a folder of pictures")
    if not data.test.has_pictures:
        raise ConfigError(f"calib.images: got {name}, but {data.name} has no pictures")

    # Calibration needs the shape of the other samples
    height, width, channels = data.image_shape
    if channels not in (1, 3):
        raise ConfigError(
            f"calib.images: got {name}, but the pictures of {data.name} are {data.image_shape}; "
            "expected [height, width, 1 or 3]"
        )
    if preprocess.size is None:
        preprocess = replace(preprocess, size=[height, width])
    if channels == 1:
        preprocess = replace(preprocess, channels="grey")
    return folder.read_unlabelled(path, preprocess, cache_root)
