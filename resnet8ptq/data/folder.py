"""`data=folder`: pictures in class folders, decoded once into the cache."""

import json
import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import FolderConfig, PreprocessConfig
from resnet8ptq.core import cache, files, machine
from resnet8ptq.core.console import track
from resnet8ptq.core.errors import ConfigError, DataError
from resnet8ptq.core.text import one_line
from resnet8ptq.data import pictures
from resnet8ptq.data.array_files import MAX_CLASSES
from resnet8ptq.data.arrays import Images
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.splitting import keep_split, split_one

log = logging.getLogger(__name__)

TRAIN, TEST = "train", ("test", "val")
LISTED = 10  # unreadable pictures that are named


def load(config: FolderConfig, preprocess: PreprocessConfig, cache_root: Path) -> Dataset:
    """Read the pictures below `data.root`.

    Raises:
        ConfigError: they differ in size, and `preprocess.size` is not set.
        DataError: no class folders, one without pictures, or a picture that cannot be read.
    """
    root = Path(str(config.root))
    tests = [root / name for name in TEST if (root / name).is_dir()]
    if not (root / TRAIN).is_dir() or not tests:
        names = _class_names(root)
        images, labels = _decode(root, names, config, preprocess, cache_root)
        return split_one(root.name, names, images, labels, root, config)
    names = _class_names(root / TRAIN)
    strange = sorted(set(_class_names(tests[0])) - set(names))
    if strange:
        raise DataError(f"{tests[0]}: class {strange[0]!r} has no folder in {root / TRAIN}")
    train, test = (
        Split(*_decode(folder, names, config, preprocess, cache_root), str(folder))
        for folder in (root / TRAIN, tests[0])
    )
    if train.images.shape[1:] != test.images.shape[1:]:
        raise _sizes_differ(root)
    return keep_split(root.name, names, train, test, root)


def _class_names(folder: Path) -> tuple[str, ...]:
    names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not 2 <= len(names) <= MAX_CLASSES:
        raise DataError(
            f"{folder}: has {len(names)} class folders; takes 2 to {MAX_CLASSES}, each with the "
            "pictures of a class, or train and test (or val) with these in both"
        )
    return tuple(names)


def _decode(
    folder: Path,
    names: Sequence[str],
    config: FolderConfig,
    preprocess: PreprocessConfig,
    cache_root: Path,
) -> tuple[Images, NDArray[np.int64]]:
    """Return the readable pictures of all classes [N, H, W, C], and labels [N]."""
    paths = [_pictures(folder / name) for name in names]
    labels = np.repeat(np.arange(len(names)), [len(found) for found in paths])
    every = [path for found in paths for path in found]
    threads = machine.threads(None)
    with ThreadPoolExecutor(threads) as pool:
        hashes = list(pool.map(files.sha256, every))
    shaping = ("size", "resize", "crop_fraction", "filter", "pad")
    settings = {key: value for key, value in asdict(preprocess).items() if key in shaping}
    key: cache.Key = {
        "pictures": json.dumps([[str(p.relative_to(folder)) for p in every], hashes]),
        "settings": json.dumps([settings, preprocess.channels == "grey"]),
        "code": cache.code("data/pictures", "data/folder"),
        "pillow": version("pillow"),
    }

    def make(entry: Path) -> None:
        bad = _write(every, preprocess, entry / "images.npy", threads)
        (entry / "bad.json").write_text(json.dumps(bad))

    entry = cache.entry(cache_root, "pictures", key, make)
    bad = json.loads((entry / "bad.json").read_text())
    _report([(every[int(place)], reason) for place, reason in bad.items()], config, len(every))
    good = np.array([str(place) not in bad for place in range(len(every))])
    images = Split(np.load(entry / "images.npy", mmap_mode="r"), None, str(folder))
    return (images.take(np.flatnonzero(good)) if bad else images).images, labels[good]


def _pictures(folder: Path) -> list[Path]:
    """Return the pictures of a class, however deep, in order.

    Raises:
        DataError: there are none.
    """
    inside = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    found = [path for path in inside if path.suffix.lower() in pictures.SUFFIXES]
    if not found:
        kinds = ", ".join(pictures.SUFFIXES)
        raise DataError(f"{folder}: has no pictures; takes {kinds} files in each class folder")
    others = Counter(path.suffix for path in inside if path.suffix.lower() not in pictures.SUFFIXES)
    if others:
        log.warning("%s: %d files are no pictures by their names", folder, others.total())
    return found


def _write(
    paths: list[Path], preprocess: PreprocessConfig, to: Path, threads: int
) -> dict[str, str]:
    """Decode into one array file, a picture for each path; return what is wrong, by place."""
    bad: dict[str, str] = {}
    whole: NDArray[np.uint8] | None = None
    decode = partial(_try_decode, preprocess=preprocess)
    with pictures.bombs_refused(), ThreadPoolExecutor(threads) as pool:
        for start in track(range(0, len(paths), 64), f"Decoding {len(paths)} pictures"):
            for place, found in enumerate(pool.map(decode, paths[start : start + 64]), start):
                if isinstance(found, str):
                    bad[str(place)] = found
                    continue
                if whole is None:
                    shape = (len(paths), *found.shape)
                    whole = np.lib.format.open_memmap(to, "w+", np.uint8, shape)
                if found.shape != whole.shape[1:]:
                    raise _sizes_differ(paths[place], found.shape, whole.shape[1:])
                whole[place] = found
    if whole is None:
        raise DataError(f"{paths[0]}: cannot be read ({bad['0']}), and neither can any other")
    whole.flush()  # type: ignore[attr-defined]
    return bad


def _try_decode(path: Path, preprocess: PreprocessConfig) -> NDArray[np.uint8] | str:
    """Return the picture, or what is wrong with it."""
    if path.stat().st_size == 0:
        return "it is empty"
    try:
        return pictures.decode(path, preprocess)
    except Exception as error:  # Pillow's own, of a dozen kinds
        return one_line(error).replace(f" {str(path)!r}", "")


def _sizes_differ(path: Path, *shapes: tuple[int, ...]) -> ConfigError:
    sizes = " and ".join(f"{height}x{width}" for height, width, *_ in shapes) or "two sizes"
    return ConfigError(
        f"preprocess.size: got null, but {path} has pictures of {sizes}; takes [height, width]"
    )


def _report(bad: list[tuple[Path, str]], config: FolderConfig, total: int) -> None:
    if not bad:
        return
    if config.on_bad == "error":
        (path, reason), more = bad[0], f", and {len(bad) - 1} others" if len(bad) > 1 else ""
        raise DataError(f"{path}: cannot be read ({reason}){more}; data.on_bad=skip leaves it out")
    listed = "; ".join(f"{path} ({reason})" for path, reason in bad[:LISTED])
    more = "; ..." if len(bad) > LISTED else ""
    log.warning("%d of %d pictures cannot be read: %s%s", len(bad), total, listed, more)
