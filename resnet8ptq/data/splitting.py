"""Splitting samples that come without a split of their own."""

import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import SplitConfig
from resnet8ptq.core.errors import DataError
from resnet8ptq.data.arrays import Images
from resnet8ptq.data.dataset import Dataset, Split, hash_samples

log = logging.getLogger(__name__)

Indices = NDArray[np.int64]


def stratify(
    labels: NDArray[np.int64], hashes: NDArray[np.bytes_], test_fraction: float, seed: int
) -> tuple[Indices, Indices]:
    """Return which samples train, and which test: of each class the same fraction, drawn by `seed`.

    Samples of equal content stay on one side: else a network would be scored on what calibrated it.
    The draw depends on the content alone, and not on the order of the samples.

    Args:
        labels: [N]; each class has two samples at least that are not equal.
        hashes: [N], equal where the samples are.
    """
    random = np.random.default_rng(seed)
    _, first, groups = np.unique(hashes, return_index=True, return_inverse=True)
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
    labels: NDArray[np.int64],
    root: Path,
    config: SplitConfig,
    named: bool = True,
) -> Dataset:
    """Split samples [N, ...] that come without a split.

    Raises:
        DataError: a class has fewer than two different samples.
    """
    hashes = hash_samples(images)
    different = labels[np.unique(hashes, return_index=True)[1]]
    for label, count in enumerate(np.bincount(different, minlength=len(class_names))):
        if count < 2 and (named or count == 1):
            raise DataError(
                f"{root}: class {class_names[label]!r} has {count} different samples; "
                "takes 2 of each class, one to train and one to test"
            )
    drawn = stratify(labels, hashes, config.test_fraction, config.split_seed)
    whole = Split(images, labels, str(root))
    train, test = (whole.take(indices) for indices in drawn)
    log.info(
        "%s: has no split of its own: %d samples to train, %d to test, the same fraction of each "
        "class, by data.split_seed=%d%s",
        *(root, len(train), len(test), config.split_seed, _tell_equal(len(labels), len(different))),
    )
    return Dataset(name, class_names, train, test, named)


def _tell_equal(samples: int, different: int) -> str:
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
