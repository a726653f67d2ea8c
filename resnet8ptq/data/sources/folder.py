"""`data=folder`: pictures in class folders, or without labels."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from resnet8ptq.config.schema import FolderConfig, PreprocessConfig
from resnet8ptq.core.errors import ConfigError, DataError
from resnet8ptq.data import pictures
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.decoding import Picture, decode
from resnet8ptq.data.sources.arrays import MAX_CLASSES, NO_LABELS
from resnet8ptq.data.splitting import Named, keep_split, split_one

log = logging.getLogger(__name__)

TRAIN, TEST = "train", ("test", "val")


def load(config: FolderConfig, preprocess: PreprocessConfig, cache_root: Path) -> Dataset:
    """Read the pictures below `data.root`.

    Raises:
        ConfigError: they differ in size, and `preprocess.size` is not set; or `data.classes` is not
            what the folders are.
        DataError: no class folders, one without pictures, or a picture that cannot be read.
    """
    root = Path(str(config.root))
    tests = [root / name for name in TEST if (root / name).is_dir()]
    if not (root / TRAIN).is_dir() or not tests:
        names = _find_classes(root, config)
        whole = _decode(root, names, config, preprocess, cache_root)
        return split_one(root.name, names, whole.split, root, config)
    names = _find_classes(root / TRAIN, config)
    strange = sorted(set(_find_classes(tests[0], replace(config, classes=None))) - set(names))
    if strange:
        raise DataError(f"{tests[0]}: class {strange[0]!r} has no folder in {root / TRAIN}")
    train, test = (
        _decode(folder, names, config, preprocess, cache_root)
        for folder in (root / TRAIN, tests[0])
    )
    return keep_split(root.name, names, train, test, root)


def read_unlabelled(root: Path, preprocess: PreprocessConfig, cache_root: Path) -> Split:
    """Read all pictures below a folder, without labels.

    Raises:
        DataError: there are none, or one cannot be read.
    """
    return _decode(root, (), FolderConfig(), preprocess, cache_root).split


def _find_classes(folder: Path, config: FolderConfig) -> tuple[str, ...]:
    """Return the names of the class folders in the order that is set; none without labels."""
    if config.labels == NO_LABELS:
        return ()
    names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not 2 <= len(names) <= MAX_CLASSES:
        raise DataError(
            f"{folder}: has {len(names)} class folders; takes 2 to {MAX_CLASSES}, each with the "
            "pictures of a class, or train and test (or val) with these in both; "
            "data.labels=none takes pictures without classes"
        )
    if config.classes is None:
        return tuple(names)
    if set(config.classes) != set(names):
        odd = sorted(set(config.classes) ^ set(names))
        raise ConfigError(
            f"data.classes: got {config.classes}, takes the class folders of {folder} in the order "
            f"of the network's outputs; {odd[0]} is in one of the two only"
        )
    return tuple(config.classes)


def _decode(
    folder: Path,
    names: Sequence[str],
    config: FolderConfig,
    preprocess: PreprocessConfig,
    cache_root: Path,
) -> Named:
    """Return the readable pictures of all classes; without any, all in the folder."""
    paths = [find_pictures(folder / name) for name in names or [""]]
    labels = np.repeat(np.arange(len(paths)), [len(found) for found in paths])
    every = [Picture(str(path), path) for found in paths for path in found]
    images, kept = decode(every, preprocess, config.on_bad, cache_root)
    split = Split(images, labels[kept] if names else None, str(folder))
    return Named(split, [every[place].name for place in kept])


def find_pictures(folder: Path) -> list[Path]:
    """Return the pictures in a folder, however deep, in order.

    Raises:
        DataError: there are none.
    """
    inside = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    found = [path for path in inside if path.suffix.lower() in pictures.SUFFIXES]
    if not found:
        kinds = ", ".join(pictures.SUFFIXES)
        raise DataError(f"{folder}: has no pictures; takes {kinds} files")
    others = Counter(path.suffix for path in inside if path.suffix.lower() not in pictures.SUFFIXES)
    if others:
        log.warning("%s: %d files are no pictures by their names", folder, others.total())
    return found
