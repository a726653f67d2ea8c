"""Splitting samples that come without a split of their own."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import SplitConfig
from resnet8ptq.core.errors import ConfigError, DataError
from resnet8ptq.data.dataset import Dataset, Split

log = logging.getLogger(__name__)

LISTED = 3  # equal samples that are named

Indices = NDArray[np.int64]


def stratify(
    labels: NDArray[np.int64], units: NDArray[Any], test_fraction: float, seed: int
) -> tuple[Indices, Indices]:
    """Return which samples train, and which test: of each class the same fraction, drawn by `seed`.

    Samples of equal content stay on one side: else a network would be scored on what calibrated it;
    and so do those of one group. The draw depends on the content alone, or on the groups, and not
    on the order of the samples.

    Args:
        labels: [N]; each class has two samples at least that are not equal.
        units: [N], equal for samples that stay together: their hashes, or their groups.
    """
    random = np.random.default_rng(seed)
    _, first, groups = np.unique(units, return_index=True, return_inverse=True)
    is_test = np.zeros(len(first), np.bool_)
    for label in np.unique(labels):
        members = np.flatnonzero(labels[first] == label)
        number = int(np.clip(round(test_fraction * len(members)), 1, len(members) - 1))
        is_test[random.permutation(members)[:number]] = True
    return np.flatnonzero(~is_test[groups]), np.flatnonzero(is_test[groups])


@dataclass(frozen=True)
class Named:
    """Samples, and what a message calls each of them."""

    split: Split
    names: Sequence[str]


def split_one(
    name: str,
    class_names: tuple[str, ...],
    whole: Split,
    root: Path,
    config: SplitConfig,
    named: bool = True,
) -> Dataset:
    """Split samples [N, ...] that come without a split.

    Raises:
        DataError: a class has fewer than two different samples, or groups of them.
    """
    units = whole.pixel_hashes if whole.groups is None else whole.groups
    kind = "samples" if whole.groups is None else "groups"
    strata = np.zeros(len(whole), np.int64)  # without classes all are of one
    for label, members in enumerate(whole.strata(len(class_names))):
        strata[members] = label
    different = strata[np.unique(units, return_index=True)[1]]
    for label, count in enumerate(np.bincount(different, minlength=len(class_names) or 1)):
        if count < 2 and (named or count == 1):
            which = f"class {class_names[label]!r}" if class_names else "it"
            raise DataError(
                f"{root}: {which} has {count} different {kind}; "
                "takes 2 of each class, one to train and one to test"
            )
    drawn = stratify(strata, units, config.test_fraction, config.split_seed)
    train, test = (whole.take(indices) for indices in drawn)
    log.info(
        "%s: has no split of its own: %d samples to train, %d to test%s, by data.split_seed=%d and "
        "data.test_fraction=%g%s",
        *(root, len(train), len(test), ", the same fraction of each class" if class_names else ""),
        *(config.split_seed, config.test_fraction),
        _tell_equal(len(whole), len(different), kind),
    )
    return Dataset(name, class_names, train, test, named)


def _tell_equal(samples: int, different: int, kind: str) -> str:
    if kind == "groups":
        return f"; {different} groups, each on one side"
    return f"; {different} of {samples} are different" if different < samples else ""


def keep_split(
    name: str,
    class_names: tuple[str, ...],
    train: Named,
    test: Named,
    root: Path,
    named: bool = True,
) -> Dataset:
    """Return samples that come split; warn where a test sample is a training sample too.

    Raises:
        DataError: the two sides differ in shape.
        ConfigError: the same of pictures, which `preprocess.size` would make equal.
    """
    sides = (train.split, test.split)
    shapes = [side.images.shape[1:] for side in sides]
    if shapes[0] != shapes[1]:
        if all(side.has_pictures for side in sides):
            raise ConfigError(
                f"preprocess.size: got null, but {root} has training pictures {shapes[0]} and test "
                f"pictures {shapes[1]}; takes [height, width], or one number for both"
            )
        raise DataError(
            f"{root}: training and test samples are {shapes[0]} and {shapes[1]}; takes one shape "
            "for both"
        )
    if named and class_names:
        strata = zip(class_names, train.split.strata(len(class_names)), strict=False)
        if missing := [name for name, members in strata if not members.any()]:
            log.warning("%s: class %r has no training samples: none calibrates", root, missing[0])
    _tell_shared(train, test, root)
    return Dataset(name, class_names, *sides, named)


def _tell_shared(train: Named, test: Named, root: Path) -> None:
    here, there = test.split.pixel_hashes, train.split.pixel_hashes
    shared = np.flatnonzero(np.isin(here, there))
    if not len(shared):
        return
    order = np.argsort(there)
    twins = order[np.searchsorted(there, here[shared[:LISTED]], sorter=order)]
    pairs = zip(shared.tolist(), twins.tolist(), strict=False)
    listed = "; ".join(f"{test.names[one]} is {train.names[other]}" for one, other in pairs)
    log.warning(
        "%s: %d of %d test samples are training samples too (equal in every value): what is "
        "measured on them says nothing about others: %s%s",
        *(root, len(shared), len(here), listed, "; ..." if len(shared) > LISTED else ""),
    )
