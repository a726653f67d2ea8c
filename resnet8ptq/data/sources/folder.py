"""`data=folder`: pictures in class folders, pictures with masks or targets, or without labels."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from resnet8ptq.config.schema import FolderConfig, PreprocessConfig
from resnet8ptq.core import files
from resnet8ptq.core.errors import ConfigError, DataError
from resnet8ptq.data import pictures
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.decoding import Picture, decode
from resnet8ptq.data.sources.labels import MAX_CLASSES, NO_LABELS, name_binary
from resnet8ptq.data.splitting import (
    TEST_NAMES,
    TRAIN_NAMES,
    NamedSplit,
    keep_split,
    split_one,
)

log = logging.getLogger(__name__)

TRAIN = "train"
# Names of folders that look like sides of a split, even if they are not read as such
SPLIT_FOLDERS = {*TRAIN_NAMES, *chain.from_iterable(TEST_NAMES), "eval", "evaluation", "holdout"}
MASK = "_mask"  # the end that a mask's name may add to its picture's name


def load(config: FolderConfig, preprocess: PreprocessConfig, cache_root: Path) -> Dataset:
    """Return the data set of the pictures below `data.root`.

    Raises:
        ConfigError: the pictures differ in size, and `preprocess.size` is null; the class folders
            differ from `data.classes` or are no classes; or `data.masks`, `data.targets` or
            `preprocess.resize` is unsuitable.
        DataError: class folders, pictures, masks or targets are missing or unsuitable, a class has
            no folder of training pictures, or a picture cannot be read.
    """
    root = Path(str(config.root))
    sides = _find_sides(root)
    if config.masks is not None or config.targets is not None:
        return _load_paired(sides, root, config, preprocess, cache_root)
    names = _find_classes(sides[0], config)
    if names:
        _warn_of_loose(dict.fromkeys([root, *sides]))

    # Without folders of both sides, divide the pictures of the root
    if len(sides) == 1:
        whole = _decode(root, names, config, preprocess, cache_root)
        return split_one(
            root.name, names, whole.split, root, config, mend=f"{TRAIN}/ and test/ in data.root"
        )
    tested = _find_classes(sides[1], replace(config, classes=None))
    unknown = sorted(set(tested) - set(names))
    if unknown:
        raise DataError(f"{sides[1]}: class {unknown[0]!r} has no folder in {sides[0]}")
    train, test = [_decode(side, names, config, preprocess, cache_root) for side in sides]
    _check_sizes(train.split, test.split, root)
    return keep_split(root.name, names, train, test, root)


def _check_sizes(train: Split, test: Split, root: Path) -> None:
    """Raise `ConfigError` if training and test pictures differ in size.

    They can differ only if `preprocess.size` is null.
    """
    trained = train.stored.shape[1:]
    tested = test.stored.shape[1:]
    if trained != tested:
        raise ConfigError(
            f"preprocess.size: got null, but {root} has training pictures {trained} and test "
            f"pictures {tested}; expected [height, width], or one number for both"
        )


def _warn_of_loose(folders: Iterable[Path]) -> None:
    """Warn about pictures beside class folders, which have no label and are not read."""
    for folder in folders:
        loose = []
        for path in sorted(folder.iterdir()):
            is_picture = path.suffix.lower() in pictures.SUFFIXES and path.is_file()
            if is_picture and not _is_hidden(path.name):
                loose.append(path.name)
        if loose:
            log.warning(
                "%s: %d pictures beside the folders are not read, because they have no class, "
                "such as %s",
                folder,
                len(loose),
                loose[0],
            )


def _load_paired(
    sides: Sequence[Path],
    root: Path,
    config: FolderConfig,
    preprocess: PreprocessConfig,
    cache_root: Path,
) -> Dataset:
    """Return pictures whose labels are masks [N, H, W] or pictures [N, H, W, C], in uint8.

    Args:
        sides: the folders for training and testing, or only one folder.

    Raises:
        ConfigError: `data.masks`, `data.targets` or `preprocess.resize` is unsuitable, or pictures
            differ in size.
        DataError: there are too few pictures, or one lacks a mask or target of its aspect ratio, or
            a file cannot be read.
    """
    key = "data.targets" if config.masks is None else "data.masks"
    beside = files.expand(config.masks or config.targets)
    if config.masks and config.targets:
        raise ConfigError(f"data.targets: got {config.targets} with data.masks, expected one")
    if not beside.is_dir():
        state = "a file" if beside.exists() else "not there"
        raise ConfigError(f"{key}: got {beside} ({state}), expected a folder of pictures")

    # The masks or targets are split like the pictures
    label_sides = [beside]
    if len(sides) > 1:
        label_sides = _find_sides(beside)
    if len(label_sides) != len(sides):
        raise ConfigError(f"{key}: got {beside}, expected {TRAIN}/ and test/ as in {root}")
    splits = []
    for folder, other in zip(sides, label_sides, strict=True):
        splits.append(_read_paired(folder, other, config, preprocess, cache_root))
    if config.masks is not None:
        is_padded = preprocess.resize == "letterbox"
        named = name_binary([side.split for side in splits], beside, is_padded)
        splits = [replace(side, split=split) for side, split in zip(splits, named, strict=True)]

    # Without folders of both sides, divide the pictures
    if len(splits) == 1:
        mend = f"{TRAIN}/ and test/ in data.root and {key}"
        data = split_one(root.name, (), splits[0].split, root, config, mend=mend)
    else:
        train, test = splits
        _check_sizes(train.split, test.split, root)
        data = keep_split(root.name, (), train, test, root)
    return replace(data, class_names=tuple(config.classes or ()))


def _read_paired(
    folder: Path,
    other: Path,
    config: FolderConfig,
    preprocess: PreprocessConfig,
    cache_root: Path,
) -> NamedSplit:
    """Return the pictures of a folder; pictures of equal names in `other` are their labels.

    With `data.on_bad=skip`, pairs with an unreadable file are left out.
    """
    pairs = _find_pairs(folder, other)
    pictured = [Picture(str(path), path) for path, _ in pairs]
    images, kept = decode(pictured, preprocess, config.on_bad, cache_root)

    # Read the masks or targets of the readable pictures
    targets = []
    for index in kept:
        path, beside = pairs[index]
        _check_shape(path, beside)
        targets.append(Picture(str(beside), beside))
    read = pictures.decode if config.masks is None else pictures.decode_mask
    decoded, good = decode(targets, preprocess, config.on_bad, cache_root, read)
    labels = np.asarray(decoded)
    if config.masks is not None:
        labels = labels[..., 0]
    shown = np.array([pictured[index].name for index in kept], np.object_)
    split = Split(images, None, str(folder), names=shown).take(good)
    return NamedSplit(replace(split, labels=labels), shown[good].tolist())


def _find_pairs(folder: Path, other: Path) -> list[tuple[Path, Path]]:
    """Return each picture of a folder with the picture of the same name in the other folder.

    Names are compared without suffixes, and without `_mask` at their end.

    Raises:
        DataError: a folder has no pictures or only masks, or a picture has no partner in the other
            folder.
    """
    paths = find_pictures(folder)
    named = {_stem(path, other): path for path in find_pictures(other)}
    # Masks beside their pictures do not count as pictures; a picture may be its own target.
    masks = {path for path in named.values() if path.stem.endswith(MASK)}
    pairs = []
    missing = []
    for path in paths:
        beside = named.get(_stem(path, folder))
        if path in masks:
            continue
        if beside is None:
            missing.append(path)
        else:
            pairs.append((path, beside))
    if missing:
        raise DataError(
            f"{folder}: {len(missing)} of {len(pairs) + len(missing)} pictures have none of their "
            f"name in {other}, the first {missing[0]}"
        )
    if not pairs:
        raise DataError(f"{folder}: has only masks ({paths[0].name}); expected their pictures")
    return pairs


def _check_shape(path: Path, beside: Path) -> None:
    """Raise `DataError` if a mask or target has another aspect ratio than its picture.

    The sizes may differ, but with another aspect ratio the two may be misaligned. The ratios are
    compared with a tolerance of one pixel.
    """
    try:
        width, height = pictures.read_size(path)
        wide, high = pictures.read_size(beside)
    except Exception:  # `decode` reports unreadable pictures; Pillow raises a dozen types
        return
    if abs(width * high - height * wide) > max(width, height, wide, high):
        raise DataError(
            f"{beside}: is {wide}x{high} (width x height), its picture {width}x{height}; expected "
            "the same shape, of any size"
        )


def _stem(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder).with_suffix("")).removesuffix(MASK)


def list_pictures(config: FolderConfig, cache_root: Path) -> list[Picture]:
    """Return the pictures in the folders of `data.root` that `load` reads."""
    sides = _find_sides(Path(str(config.root)))
    classes = _find_classes(sides[0], config) or ("",)
    listed = []
    for side in sides:
        for name in classes:
            paths, _ = _list_by_name(side / name)
            listed += [Picture(str(path), path) for path in paths]
    return listed


def _find_sides(root: Path) -> list[Path]:
    """Return the folders for training and testing; only the root if it lacks one of them."""
    named = {path.name.lower(): path for path in root.iterdir() if path.is_dir()}
    train = _find_first(named, TRAIN_NAMES)
    test = _find_first(named, chain.from_iterable(TEST_NAMES))
    if train is None or test is None:
        return [root]
    return [train, test]


def _find_first(named: Mapping[str, Path], names: Iterable[str]) -> Path | None:
    """Return the folder of the first of `names` that occurs; None if none occurs."""
    for name in names:
        if name in named:
            return named[name]
    return None


def read_unlabelled(root: Path, preprocess: PreprocessConfig, cache_root: Path) -> Split:
    """Return all pictures below a folder, without labels.

    Raises:
        ConfigError: the pictures differ in size, and `preprocess.size` is null.
        DataError: there are no pictures, or one cannot be read.
    """
    return _decode(root, (), FolderConfig(), preprocess, cache_root).split


def _find_classes(folder: Path, config: FolderConfig) -> tuple[str, ...]:
    """Return the names of the class folders; empty for unlabelled pictures, masks or targets.

    The order is that of `data.classes`, or by default alphabetical.

    Raises:
        ConfigError: the folders differ from `data.classes`, or look like something else.
        DataError: there are too few or too many folders.
    """
    if config.labels == NO_LABELS or config.masks or config.targets:
        return ()
    names = []
    for path in folder.iterdir():
        if path.is_dir() and not _is_hidden(path.name):
            names.append(path.name)
    names.sort()
    if not 2 <= len(names) <= MAX_CLASSES:
        raise DataError(
            f"{folder}: has {len(names)} class folders; expected 2 to {MAX_CLASSES}, each with the "
            "pictures of a class, or train and test (or val) with these in both; "
            "data.labels=none takes pictures without classes, data.masks=FOLDER those with masks"
        )

    # Refuse folders that are not classes: pictures with masks, or the sides of a split
    if config.classes is None and len(names) == 2 and "images" in names:
        [beside] = {*names} - {"images"}
        if beside in ("masks", "labels", "annotations"):
            raise ConfigError(
                f"data.root: got {folder} with {' and '.join(names)}; for pictures with masks try "
                f"data.root={folder / 'images'} data.masks={folder / beside}"
            )
    if config.classes is None and {name.lower() for name in names} <= SPLIT_FOLDERS:
        raise ConfigError(
            f"data.root: got {folder} with {', '.join(names)}, the sides of a split; expected "
            "train and test (or val), with the class folders in both; data.classes= if these are "
            "the classes"
        )

    # Keep the order in the settings, which is that of the network's outputs
    if config.classes is None:
        return tuple(names)
    if set(config.classes) != set(names):
        odd = sorted(set(config.classes) ^ set(names))
        raise ConfigError(
            f"data.classes: got {config.classes}, expected the class folders of {folder} in the "
            f"order of the network's outputs; {odd[0]} is in one of the two only"
        )
    return tuple(config.classes)


def _decode(
    folder: Path,
    names: Sequence[str],
    config: FolderConfig,
    preprocess: PreprocessConfig,
    cache_root: Path,
) -> NamedSplit:
    """Return the pictures of all classes; without classes, all pictures below the folder.

    With `data.on_bad=skip`, unreadable pictures are left out.
    """
    every = []
    labels = []
    for label, name in enumerate(names or [""]):
        for path in find_pictures(folder / name):
            every.append(Picture(str(path), path))
            labels.append(label)
    images, kept = decode(every, preprocess, config.on_bad, cache_root)
    shown = [every[index].name for index in kept]
    split = Split(images, None, str(folder), names=np.array(shown, np.object_))
    if names:
        split = replace(split, labels=np.array(labels, np.int64)[kept])
    return NamedSplit(split, shown)


def find_pictures(folder: Path) -> list[Path]:
    """Return the pictures in a folder and its subfolders, sorted by path, without hidden ones.

    Raises:
        DataError: there are no pictures.
    """
    by_name, others = _list_by_name(folder)
    if not by_name:
        kinds = ", ".join(pictures.SUFFIXES)
        raise DataError(f"{folder}: has no pictures; expected {kinds} files")
    if others:
        log.warning(
            "%s: %d files are not read, because they are not pictures by their names, or links to "
            "folders, such as %s",
            folder,
            len(others),
            others[0].relative_to(folder),
        )
    return by_name


def _list_by_name(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files below a folder with a picture suffix, and the others; hidden ones are
    omitted.

    A link counts as a file, by the suffix of its name; `decode` reports one to a missing picture as
    unreadable.
    """
    by_name = []
    others = []
    for path in sorted(folder.rglob("*")):
        is_folder = path.is_dir() and not path.is_symlink()
        if is_folder or any(map(_is_hidden, path.relative_to(folder).parts)):
            continue
        if path.suffix.lower() in pictures.SUFFIXES:
            by_name.append(path)
        else:
            others.append(path)
    return by_name, others


def _is_hidden(name: str) -> bool:
    """Return whether a file or folder is hidden, or is the folder that macOS adds to archives."""
    return name.startswith(".") or name == "__MACOSX"
