"""Which samples calibrate, which are held out, and which are scored."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core.errors import ConfigError, DataError
from resnet8ptq.data.dataset import CalibrationSet, Dataset, Split


def draw_calibration(data: Dataset, samples_per_class: int, seed: int) -> CalibrationSet:
    """Draw `samples_per_class` training images of each class, without replacement, seeded.

    Raises:
        ConfigError: a class has fewer images than that.
        DataError: a drawn image is also a test image.
    """
    random = np.random.default_rng(seed)
    drawn = []
    for label, name in enumerate(data.class_names):
        members = np.flatnonzero(data.train.labels == label)
        if len(members) < samples_per_class:
            raise ConfigError(
                f"calib.samples_per_class: got {samples_per_class}, takes at most {len(members)}: "
                f"the training images of class {name!r} in {data.name}"
            )
        drawn.append(random.choice(members, samples_per_class, replace=False))
    indices = np.sort(np.concatenate(drawn)).astype(np.int64)
    split = data.train.take(indices)
    shared = np.intersect1d(split.pixel_hashes, data.test.pixel_hashes)
    if len(shared):
        raise DataError(f"{data.name}: {len(shared)} calibration images are test images too")
    return CalibrationSet(split, indices)


def draw_held_out(data: Dataset, calibration: CalibrationSet, images: int, seed: int) -> Split:
    """Draw training images, equally many of each class, that are not calibration images.

    For choices that are made before the test images are looked at. Images whose pixels are also
    those of a calibration or test image are left out.

    Raises:
        ConfigError: `images` is no multiple of the number of classes, or more than there are.
    """
    unseen = _is_in_none(data.train, (calibration.split, data.test))
    members = [
        np.flatnonzero(unseen & (data.train.labels == label))
        for label in range(len(data.class_names))
    ]
    classes, most = len(members), min(len(indices) for indices in members)
    if images % classes or images > classes * most:
        raise ConfigError(
            f"held_out_images: got {images}, takes a multiple of {classes} up to {classes * most}: "
            f"the training images of {data.name}, equally many of each class, without the "
            "calibration images"
        )
    random = np.random.default_rng(seed)
    drawn = [random.choice(indices, images // classes, replace=False) for indices in members]
    return data.train.take(np.sort(np.concatenate(drawn)).astype(np.int64))


def choose_scored(data: Dataset, calibration: CalibrationSet, config: RunConfig) -> Dataset:
    """Return the data set with the images that `evaluate.split` names as its test split.

    Whatever trains or chooses leaves those out, held-out images too.
    """
    if config.evaluate.split == "test":
        return data
    held_out = draw_held_out(data, calibration, config.held_out_images, config.seed)
    return replace(data, test=held_out)


def leave_out(split: Split, others: Iterable[Split]) -> Split:
    """Return the images of `split` whose pixels are in none of `others`."""
    return split.take(np.flatnonzero(_is_in_none(split, others)))


def _is_in_none(split: Split, others: Iterable[Split]) -> NDArray[np.bool_]:
    """Tell for each image of `split` whether its pixels are in none of `others`."""
    seen = np.concatenate([other.pixel_hashes for other in others])
    return np.isin(split.pixel_hashes, seen, invert=True)
