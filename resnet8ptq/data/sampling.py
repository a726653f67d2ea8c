"""Draws samples by role: for calibration, for choices and to report, without overlap.

Samples of one group, such as the windows of a clip, have one role, unless the user's own split
divides the group.
"""

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.core.console import log_once
from resnet8ptq.core.errors import ConfigError, DataError
from resnet8ptq.data.dataset import CalibrationSet, Dataset, Split
from resnet8ptq.data.splitting import join_lone

log = logging.getLogger(__name__)

# The defaults for `calib.samples_per_class=null`, which most options of `conf/data` set.
_PER_CLASS = 100  # calibration samples of each class
_OF_ALL_CLASSES = 2000  # calibration samples in total with more than 20 classes
_WITHOUT_CLASSES = 1000  # calibration samples in total

_HELD_OUT = 2000  # held-out samples in total
LEAST_TO_CHOOSE = 50  # least number of samples to choose by
_HELD_OUT_SEED = 0  # a constant, so that all runs hold out the same samples


def draw_calibration(
    data: Dataset, samples_per_class: int | None, seed: int, taken: Sequence[Split] = ()
) -> CalibrationSet:
    """Draw `samples_per_class` training samples of each class, or all free ones of a smaller class.

    Without classes, draw `samples_per_class` samples in total. Separate calibration samples of a
    data set replace its training samples. A sample is free if it is neither a copy of a test sample
    nor in `taken`. Groups are drawn whole, until the next one would exceed the number of samples.
    Of each class with free samples, at least one group is drawn, even if it is larger. The class of
    a group is that of its first free sample.

    Args:
        samples_per_class: None for the defaults at the top of this module. If they make up more
            than half of the training samples and `taken` is empty, the samples of `draw_held_out`
            stay free for choices, unless there are too few to choose by.
        taken: splits whose samples are not drawn.

    Raises:
        ConfigError: every class has fewer than `samples_per_class` free samples, no sample is free,
            or `draw_held_out` raises it.
        DataError: every sample is also a test sample.
    """
    pool = data.calibrating
    strata = pool.strata(len(data.class_names))
    default = _WITHOUT_CLASSES
    if len(strata) > 1:
        default = max(1, min(_PER_CLASS, _OF_ALL_CLASSES // len(strata)))

    # Leave samples for choices where the default would take most of them
    if samples_per_class is None and not taken and data.calibration is None:
        most = sum(min(default, len(stratum)) for stratum in strata)
        leaves_too_few = 2 * most > len(pool)
        if leaves_too_few and count_units(pool) >= 2 * LEAST_TO_CHOOSE:
            taken = [draw_held_out(data, None)]

    # Find the free samples
    unseen = data.unseen
    if data.calibration is not None:
        unseen = _is_in_none(pool, [data.test])
    if len(pool) and not unseen.any():
        raise DataError(f"{data.name}: {len(pool)} calibration samples are test samples too")
    free = unseen & _is_in_none(pool, taken)
    if not free.any():
        if not taken:
            raise ConfigError(
                "calib.images: got null, expected a folder of pictures for calibration: "
                f"{data.name} has no training samples"
            )
        raise ConfigError(
            f"held_out_images: leaves none of the {len(pool)} training samples of {data.name} for "
            "calibration; expected fewer; try calib.images=, a folder of pictures for calibration"
        )

    # Draw from each stratum
    random = np.random.default_rng(seed)
    sizes = _size_units(pool, free)
    wanted = default
    if samples_per_class is not None:
        wanted = samples_per_class
        counts = [int(sizes[stratum].sum()) for stratum in strata]
        _check_wanted(wanted, counts, data, held_out=bool(taken))
    drawn = []
    for stratum in strata:
        members = stratum[sizes[stratum] > 0]
        if len(members):
            chosen = random.choice(members, min(wanted, len(members)), replace=False)
            drawn.append(_join_units(pool, _fit(chosen, sizes, wanted), free))
    indices = np.sort(np.concatenate(drawn)).astype(np.int64)
    if len(indices) == free.sum():
        log_once(
            log,
            "%s: calibration uses all %d free samples: seed has no effect",
            data.name,
            len(indices),
        )
    return CalibrationSet(pool.take(indices), indices)


def _check_wanted(wanted: int, counts: Sequence[int], data: Dataset, held_out: bool) -> None:
    """Warn if some classes have too few samples; raise `ConfigError` if every class has too few.

    Args:
        counts: number of free samples of each class.
        held_out: whether other samples are held out, for the message.
    """
    fewer = sum(count < wanted for count in counts)
    if not fewer:
        return
    left = " that are not held out" if held_out else ""

    # The setting is wrong if no class has enough samples
    if fewer == len(counts):
        largest = int(np.argmax(counts))
        which = f"of class {data.class_names[largest]!r} " if len(counts) > 1 else ""
        raise ConfigError(
            f"calib.samples_per_class: got {wanted}, expected at most {counts[largest]}: the "
            f"training samples {which}in {data.name}{left}"
        )
    log.warning(
        "calib.samples_per_class: got %d, but %d of %d classes of %s have fewer training "
        "samples%s: calibration uses all samples of these classes",
        wanted,
        fewer,
        len(counts),
        data.name,
        left,
    )


def draw_held_out(data: Dataset, samples: int | None, taken: Sequence[Split] = ()) -> Split:
    """Draw training samples for choices, balanced by class as far as possible.

    The seed of the draw is constant, so that runs with different `seed` and calibration samples
    draw the same samples. A smaller draw is a subset of a larger one. Copies of test samples are
    not drawn. Groups are drawn whole, until the next one would exceed the number of samples. At
    least one group is drawn, even if it is larger.

    Args:
        samples: number of samples; None for 2,000, or half of the free samples if this is less.
        taken: splits whose samples are not drawn.

    Raises:
        ConfigError: fewer than `samples` are free; or there are groups, fewer than two of them are
            free, and calibration draws from the same training samples.
    """
    free = data.unseen & _is_in_none(data.train, taken)
    sizes = _size_units(data.train, free)
    groups = np.count_nonzero(sizes)
    if data.train.groups is not None and data.calibration is None and groups < 2:
        raise ConfigError(
            f"data.groups: got {groups} for all free training samples of {data.name}, expected 2 "
            "groups or more: one to calibrate and one for choices; try more training samples"
        )
    if samples is None:
        samples = min(_HELD_OUT, max(int(free.sum()) // 2, 1))
        if samples < _HELD_OUT:
            log_once(
                log,
                "%s: %d of %d training samples are held out, half of them; held_out_images= sets "
                "another number",
                data.name,
                samples,
                int(free.sum()),
            )
    if samples > free.sum():
        raise ConfigError(
            f"held_out_images: got {samples}, expected at most {free.sum()}: the training samples "
            f"of {data.name} that are neither test samples nor held out for something else"
        )

    # Take a sample (or group) of each class, then another of each, and so on: the sort is stable.
    random = np.random.default_rng(_HELD_OUT_SEED)
    classes = []
    turns = []  # for each sample, the number of samples of its class drawn before
    for stratum in data.train.strata(len(data.class_names)):
        members = random.permutation(stratum[sizes[stratum] > 0])
        classes.append(members)
        turns.append(np.cumsum(sizes[members]) - sizes[members])
    order = np.argsort(np.concatenate(turns), kind="stable")
    ordered = np.concatenate(classes)[order]
    drawn = _join_units(data.train, _fit(ordered, sizes, samples), free)
    return data.train.take(np.sort(drawn).astype(np.int64))


def count_units(split: Split) -> int:
    """Return the number of groups, or of samples if there are no groups."""
    if split.groups is None:
        return len(split)
    return len(np.unique(split.groups))


def _size_units(split: Split, free: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return group sizes [N]: a group's number of free samples at its first free sample, else 0.

    Without groups, each sample counts as a group.
    """
    sizes = free.astype(np.int64)
    if split.groups is not None:
        members = np.flatnonzero(free)
        _, first, counts = np.unique(split.groups[free], return_index=True, return_counts=True)
        sizes[members] = 0
        sizes[members[first]] = counts
    return sizes


def _fit(units: NDArray[np.int64], sizes: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Return the first groups with at most `most` samples in total, but at least one group.

    The first free sample of a group stands for the group, see `_size_units`.
    """
    fitting = int(np.searchsorted(np.cumsum(sizes[units]), most, side="right"))
    if not fitting:
        size = int(sizes[units[0]])
        log_once(log, "a group of %d samples is drawn whole, although %d are enough", size, most)
    return units[: max(fitting, 1)]


def _join_units(
    split: Split, units: NDArray[np.int64], free: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Return the free samples of the groups to which `units` belong; without groups, `units`."""
    if split.groups is None:
        return units
    return np.flatnonzero(free & np.isin(split.groups, split.groups[units]))


def draw_selection(data: Dataset, samples: int | None, calibration: Split) -> Split | None:
    """Draw the samples that choose among models: those of `draw_held_out` not in `calibration`.

    Runs with different calibration samples draw from the same held-out samples.

    Returns:
        The samples. None if they are fewer than `LEAST_TO_CHOOSE`, if the training samples are
        fewer than twice that number, or if only one of the splits has labels. A group counts as one
        sample.

    Raises:
        ConfigError: see `draw_held_out`.
    """
    labelled = (data.train.labels is None) == (data.test.labels is None)
    if not labelled or count_units(data.train) < 2 * LEAST_TO_CHOOSE:
        return None
    chosen = leave_out(draw_held_out(data, samples), [calibration])
    if count_units(chosen) < LEAST_TO_CHOOSE:
        return None
    return chosen


def halve(split: Split, classes: int) -> tuple[Split, Split] | None:
    """Divide samples into halves, balanced by class: selection samples and reported samples.

    The division is random with a fixed seed, so that the same samples give the same halves. Samples
    of one group stay together, so that groups of different sizes make unequal halves.

    Returns:
        The halves; None if there are fewer than twice `LEAST_TO_CHOOSE` samples or groups.
    """
    groups = split.groups
    if groups is None:
        groups = np.arange(len(split))
    _, first, group_of = np.unique(groups, return_index=True, return_inverse=True)
    if len(first) < 2 * LEAST_TO_CHOOSE:
        return None

    # Choose half of the groups of each class, then all samples of these groups
    random = np.random.default_rng(_HELD_OUT_SEED)
    chosen = np.zeros(len(first), np.bool_)
    for stratum in join_lone(split.take(first).strata(classes)):
        members = random.permutation(stratum)
        chosen[members[: len(members) // 2]] = True
    is_chosen = chosen[group_of]
    return split.take(np.flatnonzero(is_chosen)), split.take(np.flatnonzero(~is_chosen))


def shuffle(split: Split) -> Split:
    """Return the samples in a random order that depends only on their number.

    Two runs on the same samples therefore score them in the same order.
    """
    return split.take(np.random.default_rng(_HELD_OUT_SEED).permutation(len(split)))


def leave_out(split: Split, others: Sequence[Split]) -> Split:
    """Return the samples of `split` that are in none of `others`, see `_is_in_none`."""
    return split.take(np.flatnonzero(_is_in_none(split, others)))


def _is_in_none(split: Split, others: Sequence[Split]) -> NDArray[np.bool_]:
    """Return whether each sample of `split` is in none of `others`, [N].

    Samples are compared by their values and, if both splits are parts of one array, also by group.
    """
    free = np.ones(len(split), np.bool_)
    for other in others:
        free &= np.isin(split.pixel_hashes, other.pixel_hashes, invert=True)
        if split.groups is not None and other.groups is not None and split.is_of(other):
            free &= np.isin(split.groups, other.groups, invert=True)
    return free
