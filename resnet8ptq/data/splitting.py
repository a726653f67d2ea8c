"""Splitting samples that come without a split of their own."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import SplitConfig
from resnet8ptq.core.errors import DataError
from resnet8ptq.data.arrays import Images
from resnet8ptq.data.dataset import Dataset, Labels, Split, hash_samples

log = logging.getLogger(__name__)

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


def split_one(
    name: str,
    class_names: tuple[str, ...],
    images: Images,
    labels: Labels | None,
    root: Path,
    config: SplitConfig,
    named: bool = True,
    groups: NDArray[np.int64] | None = None,
) -> Dataset:
    """Split samples [N, ...] that come without a split.

    Args:
        labels, groups: see `Split`.

    Raises:
        DataError: a class has fewer than two different samples, or groups of them.
    """
    whole = Split(images, labels, str(root), groups=groups)
    units = hash_samples(images) if groups is None else groups
    kind = "samples" if groups is None else "groups"
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
        "%s: has no split of its own: %d samples to train, %d to test, the same fraction of each "
        "class, by data.split_seed=%d%s",
        *(root, len(train), len(test), config.split_seed),
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
    train: Split,
    test: Split,
    root: Path,
    named: bool = True,
) -> Dataset:
    """Return samples that come split; warn where a test sample is a training sample too."""
    shared = int(np.isin(test.pixel_hashes, train.pixel_hashes).sum())
    if shared:
        log.warning(
            "%s: %d of %d test samples are training samples too (equal in every value): what is "
            "measured on them says nothing about others",
            *(root, shared, len(test)),
        )
    return Dataset(name, class_names, train, test, named)
