"""Which samples calibrate, which are held out, and which are scored."""

import functools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.core.errors import ConfigError, DataError
from resnet8ptq.data.dataset import CalibrationSet, Dataset, Split
from resnet8ptq.data.splitting import join_lone

log = logging.getLogger(__name__)

_USUAL = 100  # samples of each class
_WITHOUT_CLASSES = 1000  # in all
_HELD_OUT = 2000  # in all
LEAST_TO_CHOOSE = 50  # samples
_HELD_OUT_SEED = 0  # no setting: the same images for every run


def draw_calibration(
    data: Dataset, samples_per_class: int | None, seed: int, held_out: Sequence[Split] = ()
) -> CalibrationSet:
    """Draw `samples_per_class` training images of each class, without replacement, seeded.

    Without classes, `samples_per_class` in all. Where the data have samples that only calibrate,
    they are drawn from those.

    Args:
        samples_per_class: None: 100, or all of a class that has fewer; without classes 1,000. Where
            that comes to more than half of the training images, those of `draw_held_out` are left
            to choose by.
        held_out: whose images are not drawn.

    Raises:
        ConfigError: every class has fewer images than that.
        DataError: a drawn image is also a test image.
    """
    pool = data.calibrating
    strata = pool.strata(len(data.class_names))
    usual = _USUAL if len(strata) > 1 else _WITHOUT_CLASSES
    if samples_per_class is None and not held_out and data.calibration is None:
        most = sum(min(usual, len(stratum)) for stratum in strata)
        if 2 * most > len(pool) >= 2 * LEAST_TO_CHOOSE:
            held_out = [draw_held_out(data, None)]
    free = _is_in_none(pool, held_out) if held_out else np.ones(len(pool), np.bool_)
    if not free.any():
        if not held_out:
            raise ConfigError(
                f"calib.images: got null, takes a folder of pictures that calibrate: {data.name} "
                "has no training samples"
            )
        raise ConfigError(
            f"held_out_images: leaves none of the {len(pool)} training samples of {data.name} to "
            "calibrate with; takes fewer, or calib.images=, a folder of pictures that calibrate"
        )
    random = np.random.default_rng(seed)
    members = [stratum[free[stratum]] for stratum in strata]
    wanted = usual if samples_per_class is None else samples_per_class
    if samples_per_class is not None:
        _check_wanted(samples_per_class, [*map(len, members)], data, bool(held_out))
    drawn = [random.choice(one, min(wanted, len(one)), replace=False) for one in members]
    indices = np.sort(np.concatenate(drawn)).astype(np.int64)
    split = pool.take(indices)
    shared = np.intersect1d(split.pixel_hashes, data.test.pixel_hashes)
    if len(shared):
        raise DataError(f"{data.name}: {len(shared)} calibration images are test images too")
    return CalibrationSet(split, indices)


def _check_wanted(wanted: int, counts: Sequence[int], data: Dataset, held_out: bool) -> None:
    """Warn where some classes have fewer samples than are wanted; refuse where all have."""
    fewer = sum(count < wanted for count in counts)
    if not fewer:
        return
    left = " that are not held out" if held_out else ""
    if fewer == len(counts):
        largest = int(np.argmax(counts))
        which = f"of class {data.class_names[largest]!r} " if len(counts) > 1 else ""
        raise ConfigError(
            f"calib.samples_per_class: got {wanted}, takes at most {counts[largest]}: the training "
            f"images {which}in {data.name}{left}"
        )
    log.warning(
        "calib.samples_per_class: got %d, but %d of %d classes of %s have fewer training "
        "images%s: all of those calibrate",
        *(wanted, fewer, len(counts), data.name, left),
    )


def draw_held_out(data: Dataset, images: int | None, taken: Sequence[Split] = ()) -> Split:
    """Draw training images, as many of each class as of any other while they last.

    For choices that are made before the test images are looked at. They depend on nothing but the
    data, so that runs of other seeds and calibration draws are measured on the same images, and
    fewer are a part of more. Images whose pixels are also those of a test image are left out.

    Args:
        images: None: 2,000, or half of those that are left, whichever is less.
        taken: whose images are not drawn either.

    Raises:
        ConfigError: `images` is more than there are.
    """
    free = data.unseen & _is_in_none(data.train, taken) if taken else data.unseen
    if images is None:
        images = min(_HELD_OUT, max(free.sum() // 2, 1))
        if images < _HELD_OUT:
            _tell_half(data.name, int(images), int(free.sum()))
    if images > free.sum():
        raise ConfigError(
            f"held_out_images: got {images}, takes at most {free.sum()}: the training images of "
            f"{data.name} that are neither test images nor held out for something else"
        )
    random = np.random.default_rng(_HELD_OUT_SEED)
    classes = [
        random.permutation(stratum[free[stratum]])
        for stratum in data.train.strata(len(data.class_names))
    ]
    # The first of each class, then the second of each: sorting is stable.
    turns = np.concatenate([np.arange(len(members)) for members in classes])
    drawn = np.concatenate(classes)[np.argsort(turns, kind="stable")[:images]]
    return data.train.take(np.sort(drawn).astype(np.int64))


@functools.cache  # once: every run of a sweep draws them, some twice
def _tell_half(name: str, images: int, free: int) -> None:
    log.info(
        "%s: %d of %d training samples are held out, half of them: held_out_images= sets another "
        "number",
        *(name, images, free),
    )


def choose_scored(data: Dataset, split: str, held_out_images: int | None) -> Dataset:
    """Return the data set with the images that `evaluate.split` names as its test split.

    Whatever trains or chooses leaves those out, held-out images too.

    Raises:
        ConfigError: `held_out_images` is more than there are.
    """
    return data if split == "test" else replace(data, test=draw_held_out(data, held_out_images))


def draw_choice(data: Dataset, images: int | None, calibration: Split) -> Split | None:
    """Draw the training images that a sweep chooses by: those of `draw_held_out` that are free.

    Runs with other calibration images have nearly the same ones.

    Returns:
        None where there are fewer than `LEAST_TO_CHOOSE`, or where they have no labels.
    """
    labelled = (data.train.labels is None) == (data.test.labels is None)
    if not labelled or len(data.train) < 2 * LEAST_TO_CHOOSE:
        return None
    found = leave_out(draw_held_out(data, images), [calibration])
    return found if len(found) >= LEAST_TO_CHOOSE else None


def halve(split: Split, classes: int) -> tuple[Split, Split] | None:
    """Part samples at random into two sets with about as many of each class: to choose by, and not.

    The same ones whatever is run; samples of one group stay together.

    Returns:
        None where there would be fewer than `LEAST_TO_CHOOSE` in one of them.
    """
    groups = np.arange(len(split)) if split.groups is None else split.groups
    _, first, group_of = np.unique(groups, return_index=True, return_inverse=True)
    if len(first) < 2 * LEAST_TO_CHOOSE:
        return None
    random = np.random.default_rng(_HELD_OUT_SEED)
    chosen = np.zeros(len(first), np.bool_)
    for stratum in join_lone(split.take(first).strata(classes)):
        members = random.permutation(stratum)
        chosen[members[: len(members) // 2]] = True
    sides = (np.flatnonzero(side[group_of]) for side in (chosen, ~chosen))
    one, other = map(split.take, sides)
    return one, other


def leave_out(split: Split, others: Iterable[Split]) -> Split:
    """Return the images of `split` whose pixels are in none of `others`."""
    return split.take(np.flatnonzero(_is_in_none(split, others)))


def _is_in_none(split: Split, others: Iterable[Split]) -> NDArray[np.bool_]:
    """Tell for each image of `split` whether its pixels are in none of `others`."""
    seen = np.concatenate([other.pixel_hashes for other in others])
    return np.isin(split.pixel_hashes, seen, invert=True)
