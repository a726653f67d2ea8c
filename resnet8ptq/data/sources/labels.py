"""Checks labels, gives them the forms of `Split.labels`, and names their classes."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.core.errors import ConfigError, DataError
from resnet8ptq.data.dataset import Split
from resnet8ptq.data.lazy import in_parts
from resnet8ptq.data.sources.array_files import Array, SourcedArray, describe

log = logging.getLogger(__name__)

NO_LABELS = "none"
IGNORED = -100  # the label of tokens that are not scored, as in PyTorch
MAX_CLASSES = 1000


def read_labels(labels: SourcedArray) -> Array:
    """Return labels in one of the forms of `Split.labels`, by their dtype, shape and values.

    One-hot rows become classes. Integers [N, tokens] are classes of tokens only if one of them is
    -100.

    Raises:
        DataError: the labels have no such form, or one-hot rows have more than `MAX_CLASSES`.
    """
    stored = labels.values
    if 0 in stored.shape:
        raise DataError(f"{labels}: got {describe(stored)}, expected values for each sample")

    # Numbers for each class, values and pictures
    is_binary = _is_binary(stored)
    if is_binary and stored.shape[1] <= MAX_CLASSES:
        return read_binary(stored, labels)
    if stored.dtype.kind == "f":
        labels.check_finite()
        if is_binary and _is_one_hot(stored):
            raise DataError(
                f"{labels}: got one-hot rows of {stored.shape[1]:,} classes, expected at most "
                f"{MAX_CLASSES:,}"
            )
        return stored
    if stored.ndim == 4 and stored.dtype == np.uint8 and stored.shape[3] in (1, 3):
        return stored

    # Masks, texts and classes of tokens
    if stored.ndim == 3 and stored.dtype.kind in "iub":
        return _read_masks(labels)
    if stored.dtype.kind == "U" and stored.ndim == 1:
        return stored
    if stored.dtype.kind == "i" and stored.ndim == 2 and (stored == IGNORED).any():
        scored = stored[stored != IGNORED]
        if not len(scored):
            raise DataError(f"{labels}: every label is {IGNORED}; expected one for some tokens")
        check_labels(scored, labels)
        return stored.astype(np.int64)

    # Classes, one for each sample
    is_column = stored.shape in ((len(stored),), (len(stored), 1))
    if stored.dtype.kind not in "iub" or not is_column:
        mend = ""
        if stored.ndim > 1:
            mend = "; several labels a sample: a column of 0 and 1 for each class"
        raise DataError(
            f"{labels}: got {describe(stored)}, expected labels as integers from 0, [N], values as "
            f"floats, [N, ...], masks as integers, [N, height, width], or pictures as uint8, "
            f"[N, height, width, 1 or 3]{mend}"
        )
    return check_labels(stored.reshape(-1), labels)


def find_highest(labels: Array) -> int:
    """Return the highest class number of integers of any shape, or of bools [N, classes]."""
    if labels.dtype.kind == "b":
        return labels.shape[1] - 1
    return int(labels.max())


def _is_binary(rows: Array) -> bool:
    """Return whether the array is [N, classes] of 0 and 1, with two or more classes."""
    if rows.dtype.kind not in "iubf" or rows.ndim != 2 or rows.shape[1] < 2:
        return False
    return all(np.isin(part, (0, 1)).all() for part in in_parts(rows))


def _is_one_hot(rows: Array) -> bool:
    """Return whether each row of 0 and 1 has a single 1."""
    return bool((rows.sum(axis=1) == 1).all())


def read_binary(rows: Array, source: object) -> Array:
    """Return classes [N] of one-hot rows [N, classes], or several labels [N, classes] bool.

    Args:
        rows: labels of 0 and 1 [N, classes].
    """
    if _is_one_hot(rows):
        log.info("%s: one-hot, taken as %d classes", source, rows.shape[1])
        return rows.argmax(axis=1)
    log.info("%s: 0 and 1, taken as several labels of %d classes", source, rows.shape[1])
    return rows.astype(np.bool_)


def _read_masks(labels: SourcedArray) -> NDArray[np.uint8]:
    """Return masks [N, height, width] as uint8.

    Raises:
        DataError: a value is not from 0 to 255.
    """
    stored = labels.values
    low = int(stored.min())
    high = int(stored.max())
    if not 0 <= low <= high < 256:
        raise DataError(f"{labels}: masks from {low} to {high}; expected 0 to 255")
    return stored.astype(np.uint8, copy=False)


def name_binary(sides: Sequence[Split], source: object, padded: bool = False) -> list[Split]:
    """Return splits with 1 in place of 255 in their masks, if 0 and 255 are the only values.

    The values of all splits are pooled, because one split alone may be all white, or have only
    unlabelled pixels (255) beside class 0.

    Args:
        padded: whether the masks have padding of 255.

    Raises:
        ConfigError: padded masks have 0 and 255 as their only values.
    """
    # Collect the values of all masks
    values: set[int] = set()
    for split in sides:
        if split.labels is not None and split.labels.ndim == 3 and split.labels.dtype == np.uint8:
            values.update(np.unique(split.labels).tolist())
    if values != {0, 255}:
        return list(sides)
    if padded:
        raise ConfigError(
            f"preprocess.resize: got letterbox, which pads with 255, and {source} has masks of 0 "
            "and 255; expected masks of 0 and 1"
        )

    # White pixels are class 1
    log.info("%s: masks of 0 and 255, taken as classes 0 and 1", source)
    named = []
    for split in sides:
        if split.labels is not None:
            split = replace(split, labels=np.minimum(split.labels, 1))
        named.append(split)
    return named


def align_several(sides: Sequence[Split]) -> list[Split]:
    """Return splits with several labels a sample [N, classes] if one of them has these.

    The rows of one split alone may be one-hot, so that they were read as classes [N].
    """
    widths = []
    for split in sides:
        if split.labels is not None and split.labels.dtype == np.bool_:
            widths.append(split.labels.shape[1])
    aligned = []
    for split in sides:
        if widths and split.has_classes and split.labels is not None:
            of_class = np.eye(max(widths), dtype=np.bool_)
            if find_highest(split.labels) < len(of_class):
                log.info("%s: taken as several labels, like the other split", split.source)
                split = replace(split, labels=of_class[split.labels])
        aligned.append(split)
    return aligned


def check_labels(labels: Array, source: object) -> NDArray[np.int64]:
    """Return integer labels [N] as int64.

    Raises:
        DataError: a label is not from 0 to 999.
    """
    wide = labels.astype(np.int64)
    if not 0 <= wide.min() <= wide.max() < MAX_CLASSES:
        raise DataError(
            f"{source}: labels from {wide.min()} to {wide.max()}; "
            f"expected 0 to {MAX_CLASSES - 1} at most, or floats for values to predict"
        )
    return wide


def name_classes(
    source: object,
    highest: int,
    names: Sequence[str] | None,
    origin: str = "data.classes",
    exact: bool = False,
) -> tuple[tuple[str, ...], bool]:
    """Return the names of the classes, and whether `names` is set; by default, numbers are names.

    >>> name_classes("labels.npy", highest=2, names=None)
    (('0', '1', '2'), False)

    Args:
        source: the origin of the labels, for the error.
        highest: the highest class number.
        origin: the setting or array that holds `names`, for the error.
        exact: whether each name needs a class, as for a matrix with a column for each class.

    Raises:
        DataError: the highest class has no name; or, if `exact`, a name has no class.
    """
    if names is None:
        return tuple(map(str, range(max(highest + 1, 2)))), False
    if highest >= len(names) or (exact and highest + 1 < len(names)):
        raise DataError(
            f"{source}: labels up to {highest}, but {len(names)} class names ({origin}); expected "
            "one for each"
        )
    return tuple(names), True
