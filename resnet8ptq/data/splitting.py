"""Splits samples into training and test, and checks the split of samples that have one."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import SplitConfig
from resnet8ptq.core.console import warn_once
from resnet8ptq.core.errors import DataError
from resnet8ptq.data.dataset import Dataset, Split

log = logging.getLogger(__name__)

LISTED = 3  # equal samples that a warning names
TRAIN_NAMES = ("train", "training")  # names of a side, in lower case
# The names in the first group have priority
TEST_NAMES = (("test", "testing"), ("val", "valid", "validation", "dev"))
COPIES = 0.01  # the largest share of repeated test samples without a warning

Indices = NDArray[np.int64]


def stratify(
    labels: NDArray[np.int64], units: NDArray[Any], test_fraction: float, seed: int
) -> tuple[Indices, Indices]:
    """Return training and test indices: about the same fraction of each class, drawn with `seed`.

    Equal samples, or samples of one group, stay on one side; otherwise calibration samples could
    also be test samples. They count once, with the class of the first of them. Classes that count
    one sample are pooled. With hashes as units, the draw does not depend on the order of the
    samples, unless equal samples differ in class.

    Args:
        labels: the class of each sample [N].
        units: hashes or groups [N]; samples with equal values stay together. At least two values
            must differ.
    """
    random = np.random.default_rng(seed)
    _, first, groups = np.unique(units, return_index=True, return_inverse=True)
    order = np.argsort(labels[first], kind="stable")
    starts = np.unique(labels[first][order], return_index=True)[1]
    strata = np.split(order, starts[1:])
    is_test = np.zeros(len(first), np.bool_)
    for members in join_lone(strata):
        number = round(test_fraction * len(members))
        if len(members) > 1:
            number = int(np.clip(number, 1, len(members) - 1))
        is_test[random.permutation(members)[:number]] = True
    return np.flatnonzero(~is_test[groups]), np.flatnonzero(is_test[groups])


def join_lone(strata: Sequence[Indices]) -> list[Indices]:
    """Return the strata without empty ones; those of a single sample are joined into one, the last.

    Otherwise all single samples would be on the same side of a split.

    >>> strata = [np.array([1]), np.array([0, 3]), np.array([2])]
    >>> [members.tolist() for members in join_lone(strata)]
    [[0, 3], [1, 2]]
    """
    several = []
    lone = []
    for members in strata:
        if len(members) > 1:
            several.append(members)
        elif len(members) == 1:
            lone.append(members)
    if lone:
        several.append(np.concatenate(lone))
    return several


@dataclass(frozen=True)
class NamedSplit:
    """A split, and the name of each sample for messages."""

    split: Split
    names: Sequence[str]


def split_one(
    name: str,
    class_names: tuple[str, ...],
    whole: Split,
    root: Path,
    config: SplitConfig,
    named: bool = True,
    mend: str = "",
) -> Dataset:
    """Divide samples [N, ...] into training and test samples; warn about flaws of the split.

    Args:
        class_names, named: see `Dataset`.
        root: the file or folder of the samples, for messages.
        mend: the setting or files that name the user's own test samples, for the warning that the
            network may have been trained on test pictures; if empty, that warning is omitted.

    Raises:
        DataError: there are fewer than two different samples or groups.
    """
    units: NDArray[Any]
    if whole.groups is not None:
        units = whole.groups
        kind = "groups"
    else:
        units = whole.pixel_hashes  # reads all samples
        kind = "samples"
    strata = np.zeros(len(whole), np.int64)  # without classes, all samples are one stratum
    for label, members in enumerate(whole.strata(len(class_names))):
        strata[members] = label
    different = strata[np.unique(units, return_index=True)[1]]
    if len(different) < 2:
        raise DataError(
            f"{root}: has {len(different)} different {kind}; expected 2, one to train and one to "
            "test"
        )
    if whole.has_classes:
        _warn_rare(np.bincount(different, minlength=len(class_names)), class_names, root, kind)

    # Draw the split, and describe it in the log
    trained, tested = stratify(strata, units, config.test_fraction, config.split_seed)
    train = whole.take(trained)
    test = whole.take(tested)
    _warn_repeated(test, root)
    by_class = ", the same fraction of each class" if whole.has_classes else ""
    log.info(
        "%s: has no split: %d samples to train, %d to test%s, by data.split_seed=%d and "
        "data.test_fraction=%g%s",
        root,
        len(train),
        len(test),
        by_class,
        config.split_seed,
        config.test_fraction,
        _describe_equal(len(whole), len(different), kind),
    )
    if whole.has_pictures and mend:
        warn_once(
            log,
            "%s: the network may have been trained on some of the %d scored pictures, which hides "
            "losses; to score pictures that it has not seen: %s",
            root,
            len(test),
            mend,
        )
    return Dataset(name, class_names, train, test, named)


def _warn_rare(
    counts: NDArray[np.int64], class_names: Sequence[str], root: Path, kind: str
) -> None:
    """Warn about classes with fewer than two different samples or groups.

    Args:
        counts: number of different samples or groups of each class.
        kind: `samples` or `groups`.
    """
    # A class needs one sample for each side
    lone = np.flatnonzero(counts == 1)
    missing = np.flatnonzero(counts == 0)
    if len(lone):
        log.warning(
            "%s: %d of %d classes have one distinct %s, such as %r: it is on one side only",
            root,
            len(lone),
            len(counts),
            kind.removesuffix("s"),
            class_names[lone[0]],
        )
    if len(missing):
        log.warning(
            "%s: %d of %d classes have no %s, such as %r: they are not measured",
            root,
            len(missing),
            len(counts),
            kind,
            class_names[missing[0]],
        )


def _describe_equal(samples: int, different: int, kind: str) -> str:
    if kind == "groups":
        return f"; {different} groups, each on one side"
    if different < samples:
        return f"; {different} of {samples} are different"
    return ""


def keep_split(
    name: str,
    class_names: tuple[str, ...],
    train: NamedSplit,
    test: NamedSplit,
    root: Path,
    named: bool = True,
) -> Dataset:
    """Return samples with their own split; warn about samples or groups that both sides share.

    Further warnings report classes without training samples, and repeated test samples.

    Raises:
        DataError: training and test samples differ in shape.
    """
    # Both sides must have one shape
    sides = (train.split, test.split)
    trained = train.split.stored.shape[1:]
    tested = test.split.stored.shape[1:]
    if trained != tested:
        raise DataError(
            f"{root}: training and test samples are {trained} and {tested}; expected one shape for "
            "both"
        )

    # Report flaws that do not stop a run
    _warn_untrained(sides, class_names, root, named)
    _warn_shared(train, test, root)
    _warn_shared_groups(train.split, test.split, root)
    _warn_repeated(test.split, root)
    return Dataset(name, class_names, *sides, named)


def _warn_untrained(
    sides: tuple[Split, Split], class_names: Sequence[str], root: Path, named: bool
) -> None:
    """Warn about classes without training samples.

    If classes are only numbers, those without test samples too are not reported.

    Args:
        named: see `Dataset`.
    """
    train, test = sides
    trained = train.strata(len(class_names))
    tested = test.strata(len(class_names))
    missing = []
    for name, training, testing in zip(class_names, trained, tested, strict=False):
        if not len(training) and (named or len(testing)):
            missing.append(name)
    if missing:
        log.warning(
            "%s: %d of %d classes have no training samples, such as %r: calibration lacks them",
            root,
            len(missing),
            len(class_names),
            missing[0],
        )


def _warn_repeated(test: Split, root: Path) -> None:
    """Warn if many test samples without groups are equal.

    The significance test of a verdict counts each sample as independent.
    """
    if test.groups is not None:
        return
    copies = len(test) - len(np.unique(test.pixel_hashes))
    if copies > COPIES * len(test):
        log.warning(
            "%s: %d of %d test samples repeat others. If they are copies, a verdict counts each, "
            "and passes or fails too easily: remove them",
            root,
            copies,
            len(test),
        )


def _warn_shared_groups(train: Split, test: Split, root: Path) -> None:
    """Warn about groups on both sides, such as a speaker, if their numbers are comparable."""
    if train.groups is None or test.groups is None or not train.is_of(test):
        return
    tested = np.unique(test.groups)
    shared = int(np.isin(tested, train.groups).sum())
    if shared:
        log.warning(
            "%s: %d of %d groups of the test samples have training samples too: results on them "
            "do not apply to new groups",
            root,
            shared,
            len(tested),
        )


def _warn_shared(train: NamedSplit, test: NamedSplit, root: Path) -> None:
    tested = test.split.pixel_hashes
    trained = train.split.pixel_hashes
    shared = np.flatnonzero(np.isin(tested, trained))
    if not len(shared):
        return

    # Name the first shared samples, each with an equal training sample
    order = np.argsort(trained)
    twins = order[np.searchsorted(trained, tested[shared[:LISTED]], sorter=order)]
    listed = []
    for index, twin in zip(shared.tolist(), twins.tolist(), strict=False):
        listed.append(f"{test.names[index]} is {train.names[twin]}")
    if len(shared) > LISTED:
        listed.append("...")
    log.warning(
        "%s: %d of %d test samples are training samples too (equal in every value): results on "
        "them do not apply to new samples: %s",
        root,
        len(shared),
        len(tested),
        "; ".join(listed),
    )
