"""`data=arrays`: data sets of arrays in .npz, .npy and idx files."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import ArraysConfig, PreprocessConfig
from resnet8ptq.core import cache, code, files
from resnet8ptq.core.errors import ConfigError, DataError
from resnet8ptq.core.records import pack
from resnet8ptq.core.text import printable
from resnet8ptq.data.dataset import MAX_SAMPLES, Dataset, Split
from resnet8ptq.data.lazy import in_parts
from resnet8ptq.data.sources import array_names
from resnet8ptq.data.sources.array_files import (
    Array,
    Arrays,
    SourcedArray,
    describe,
    open_arrays,
    prepare_array,
)
from resnet8ptq.data.sources.array_names import CLASSES, STEPS, pick
from resnet8ptq.data.sources.labels import (
    MAX_CLASSES,
    NO_LABELS,
    align_several,
    find_highest,
    name_binary,
    name_classes,
    read_labels,
)
from resnet8ptq.data.splitting import NamedSplit, keep_split, split_one

log = logging.getLogger(__name__)

FROM_MEMORY = "samples_from_memory"  # the kind of the cache's entries, see `api.samples`


def load(config: ArraysConfig, preprocess: PreprocessConfig, cache_root: Path) -> Dataset:
    """Return the data set of the arrays in `data.root`, a file or a folder.

    Raises:
        ConfigError: inputs or labels are not recognized, array names are ambiguous, or a setting
            does not fit the arrays.
        DataError: a file is damaged, or arrays are missing or unsuitable.
    """
    root = Path(str(config.root))
    arrays = open_arrays(root, cache_root)

    # Choose arrays by their names, before any is read
    if not isinstance(config.inputs, str) and config.labels in (None, NO_LABELS):
        arrays = array_names.take_validation_as_test(arrays, root)
    chosen = array_names.choose(arrays, config, root)

    # Read the arrays of each side, or of the only one
    find = partial(_find_array, root=root, arrays=arrays, cache_root=cache_root)
    sides = []
    for names in chosen:
        inputs = _find_inputs(find, names.inputs, cache_root)
        labels = find("data.labels", names.labels)
        groups = find("data.groups", names.groups)
        sides.append(_read_split(str(root), inputs, labels, groups))
    sides = align_several(name_binary(sides, root))

    # Scale and offset apply to stored integers only
    for split in sides:
        if split.stored.dtype.kind not in "biu" and (config.offset, config.scale) != (0, 1):
            raise ConfigError(
                f"data.offset, data.scale: got {config.offset:g} and {config.scale:g}, but the "
                f"samples in {root} are {split.stored.dtype}; expected them for one array of "
                "stored integers only"
            )
    if sides[0].stored.dtype.kind in "iu" and (config.offset, config.scale) == (0, 1):
        _warn_unused(arrays, root)

    # Name the classes, then split the samples
    highest = []
    are_columns = False
    for split in sides:
        if split.labels is not None and split.labels.dtype.kind in "ib":
            highest.append(find_highest(split.labels))
            are_columns = are_columns or split.labels.dtype.kind == "b"
    class_names: tuple[str, ...] = ()
    named = True
    if highest:
        wanted, origin = _find_class_names(arrays, config, root)
        class_names, named = name_classes(root, max(highest), wanted, origin, are_columns)
    elif any(map(_has_masks, sides)):
        # The task compares names and labels, because it knows which labels are ignored
        wanted, _ = _find_class_names(arrays, config, root)
        class_names = tuple(wanted or ())
    title = root.name.partition(".")[0] or root.name
    if root.parent.name == FROM_MEMORY:  # the folder's name is a hash
        title = "samples in memory"
    if len(sides) == 1:
        mend = "arrays x_train, y_train, x_test and y_test"
        return split_one(title, class_names, sides[0], root, config, named, mend)
    shown = []
    for split, names in zip(sides, chosen, strict=True):
        source = ", ".join(array_names.list_keys(names.inputs)) or names.inputs
        samples = [f"{source}: sample {number}" for number in range(len(split))]
        shown.append(NamedSplit(split, samples))
    train, test = shown
    return keep_split(title, class_names, train, test, root, named)


def _find_array(
    key: str, name: str | None, root: Path, arrays: Arrays, cache_root: Path
) -> SourcedArray | None:
    """Return the array of this name, or of the file at this path; None without a name.

    Args:
        key: the setting that holds the name, for the error.
    """
    if name is None:
        return None
    array_names.check_name(key, name, root, arrays)
    if name in arrays:
        source = f"{root}: {name}" if len(arrays) > 1 else str(root)
        return SourcedArray(source, arrays[name]())
    path = files.expand(name)
    return SourcedArray(str(path), prepare_array(path, cache_root)())


def _find_inputs(
    find: Callable[[str, str | None], SourcedArray | None], inputs: Any, cache_root: Path
) -> SourcedArray:
    """Return the array of a single input; for a dict of inputs, their records from the cache.

    Raises:
        ConfigError: a name is neither an array nor a file.
        DataError: an array cannot be read; or arrays of a dict are empty, are not finite numbers
            [N, ...], or differ in N.
    """
    if not isinstance(inputs, dict):
        array = find("data.inputs", inputs)
        assert array is not None  # the name of a single input is never None
        return array
    sourced = {}
    for name, array_name in inputs.items():
        array = find(f"data.inputs.{name}", array_name)
        if array is not None:
            sourced[name] = array

    # Check the arrays here, because checks after packing cannot name an array
    first = next(iter(sourced.values()))
    for name, array in sourced.items():
        values = array.values
        if values.dtype.kind not in "biuf" or values.ndim < 1 or 0 in values.shape:
            raise DataError(f"{array}: got {describe(values)}, expected numbers [N, ...]")
        if len(values) != len(first.values):
            raise DataError(
                f"{first} has {len(first.values)} samples, {array} has {len(values)} for the "
                f"input {name}; expected equal numbers"
            )
        array.check_finite()

    def make(folder: Path) -> None:
        fields = {name: array.values for name, array in sourced.items()}
        pack(fields, folder / "records.npy")

    key = {}
    for name, array in sourced.items():
        key[f"input {name}"] = _hash(array.values)
    key["code"] = code.behind(__name__)
    folder = cache.entry(cache_root, "records", key, make)
    records = np.load(folder / "records.npy", mmap_mode="r")
    return SourcedArray(", ".join(map(str, sourced.values())), records)


def _hash(values: Array) -> str:
    digest = hashlib.sha256(describe(values).encode())
    for part in in_parts(values):
        digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


def _read_split(
    source: str, inputs: SourcedArray, labels: SourcedArray | None, groups: SourcedArray | None
) -> Split:
    """Return inputs [N, ...], labels [N, ...] and groups [N] as a split.

    Raises:
        DataError: an array has a wrong dtype, shape or values.
    """
    images = inputs.values
    kind: str = images.dtype.kind
    if kind != "V" and (kind not in "biuf" or images.ndim < 2 or 0 in images.shape):
        raise DataError(f"{inputs}: got {describe(images)}, expected numbers [N, ...]")
    if len(images) > MAX_SAMPLES:
        raise DataError(f"{inputs}: has {len(images):,} samples, expected at most {MAX_SAMPLES:,}")
    inputs.check_finite()

    # Labels and groups must have a value for each sample
    for other, kind in ((labels, "labels"), (groups, "groups")):
        if other is not None and other.values.shape[:1] != images.shape[:1]:
            raise DataError(
                f"{inputs} has {len(images)} samples, {other} is {other.describe()}; "
                f"expected {len(images)} {kind}"
            )
    split = Split(images, None, source)
    if labels is not None:
        split = replace(split, labels=read_labels(labels))
    if groups is not None:
        split = replace(split, groups=_read_groups(groups))
    return split


def _warn_unused(arrays: Arrays, root: Path) -> None:
    """Warn about a single scale or offset among the arrays, because it is not applied."""
    held = []
    settings = []
    for name in arrays:
        if name.lower() in STEPS:
            array = arrays[name]()
            if array.dtype.kind in "iuf" and array.size == 1:
                number = f"{array.item():.7g}"
                held.append(f"{name} {number}")
                settings.append(f"{STEPS[name.lower()]}={number}")
    if held:
        log.warning(
            "%s: holds %s, which are not used; %s applies them",
            root,
            ", ".join(held),
            " ".join(settings),
        )


def _read_groups(groups: SourcedArray) -> NDArray[np.int64]:
    names = groups.values
    if names.dtype.kind not in "iuUS" or names.ndim != 1:
        raise DataError(
            f"{groups}: got {describe(names)}, expected an integer or a name for each sample"
        )
    return np.unique(names, return_inverse=True)[1].astype(np.int64)


def _has_masks(split: Split) -> bool:
    labels = split.labels
    return labels is not None and labels.dtype == np.uint8 and labels.ndim == 3


def _find_class_names(
    arrays: Arrays, config: ArraysConfig, root: Path
) -> tuple[Sequence[str] | None, str]:
    """Return the names of the classes, or None, and the setting or array that they come from.

    Raises:
        ConfigError: several arrays have a usual name for class names.
        DataError: the array cannot be read, or its names are not text, more than 1,000, or not all
            different.
    """
    if config.classes is not None:
        return config.classes, "data.classes"
    stored = pick(arrays, CLASSES, root)
    if stored is None:
        return None, "data.classes"
    array = arrays[stored]()
    if array.dtype.kind != "U" or array.ndim != 1 or len(array) > MAX_CLASSES:
        raise DataError(
            f"{root}: {stored} is {describe(array)}; expected at most {MAX_CLASSES} names, as text"
        )
    if len(set(array.tolist())) != len(array):
        raise DataError(f"{root}: {stored} is {describe(array)}; expected different names as text")
    return [printable(name) for name in array.tolist()], stored
