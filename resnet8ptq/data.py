"""The images: CIFAR-10's published files, the embedded set, and the calibration draw."""

import hashlib
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import pooch
from numpy.typing import NDArray

from resnet8ptq import cifar10, shapes
from resnet8ptq.config.schema import DataConfig, RunConfig
from resnet8ptq.core.errors import ConfigError, DataError, DataNotFoundError
from resnet8ptq.images import AT_ONCE, Batches, Images, LazyImages

log = logging.getLogger(__name__)

Labels = NDArray[np.int64]
SPLITS: tuple[Literal["train", "test"], ...] = ("train", "test")


@dataclass(frozen=True)
class Split:
    """Images [N, H, W, C] uint8 (raw pixels) with labels [N] int64, and where they came from.

    The images may lie in files: what needs many of them goes through them in batches.
    """

    images: Images
    labels: Labels
    source: str

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over shape, pixels and labels, in hexadecimal."""
        digest = hashlib.sha256(str(self.images.shape).encode())
        for start in range(0, len(self), AT_ONCE):
            digest.update(np.ascontiguousarray(self.images[start : start + AT_ONCE]).data)
        digest.update(np.ascontiguousarray(self.labels).data)
        return digest.hexdigest()

    @cached_property
    def pixel_hashes(self) -> NDArray[np.bytes_]:
        """A 16-byte hash of the pixels of each image, [N]: equal where the images are."""
        hashes = (hashlib.blake2b(image.tobytes(), digest_size=16) for image in self.images)
        return np.fromiter((found.digest() for found in hashes), "S16", len(self))

    def take(self, indices: NDArray[np.int64]) -> "Split":
        """Return the images at `indices`, in that order; they are not copied."""
        found = self.images
        if isinstance(found, LazyImages):
            taken = LazyImages(found.store, found.indices[indices])
        else:
            taken = LazyImages(found, np.arange(len(found))[indices])
        return Split(taken, self.labels[indices], self.source)

    def batches(self, size: int) -> Batches:
        """Return float32 batches [<=size, H, W, C] of raw pixels 0..255."""
        return Batches(self.images, size)


@dataclass(frozen=True)
class Dataset:
    """A named training and test split, and the only place that knows classes and image shape."""

    name: str
    class_names: tuple[str, ...]
    train: Split
    test: Split

    @property
    def image_shape(self) -> tuple[int, ...]:
        """(H, W, C) of one image."""
        return self.test.images.shape[1:]


@dataclass(frozen=True)
class CalibrationSet:
    """Training images for calibration, and their places in the training split."""

    split: Split
    indices: NDArray[np.int64]

    @property
    def digest(self) -> str:
        """SHA-256 over the indices (int64, little endian), in hexadecimal."""
        return hashlib.sha256(self.indices.astype("<i8").tobytes()).hexdigest()


def settle(config: DataConfig) -> DataConfig:
    """Decide which data set this run uses and where it lies.

    Looks in `data.root`, `$CIFAR10_DIR`, `data/cifar-10-batches-py`, the download cache, and then
    downloads. Where all that fails, `data.on_missing=shapes` falls back to the embedded set.

    Returns:
        The config with `root` set to the folder of the batches; for the embedded set, `name`
        is `shapes` and `root` is None.

    Raises:
        ConfigError: `data.root` is set and is no folder.
        DataNotFoundError: CIFAR-10 cannot be had and `data.on_missing=error`.
    """
    if config.name == "shapes":
        return replace(config, root=None)
    if config.root is not None:
        config = replace(config, root=str(Path(config.root).expanduser()))
    if config.root is not None and not Path(config.root).is_dir():
        raise ConfigError(f"data.root: got {config.root}, takes a folder with data_batch_1..5")
    root, tried = (Path(config.root), "") if config.root is not None else _find_cifar10()
    if root is not None:
        return replace(config, root=str(root.absolute()))
    if config.on_missing == "error":
        raise DataNotFoundError(f"data.root: no CIFAR-10 found; tried {tried}")
    log.warning(
        "CIFAR-10 NOT FOUND: this run uses the embedded data set `shapes` and its own model "
        "instead; its numbers say nothing about CIFAR-10. Tried %s. To fix it, set CIFAR10_DIR or "
        "data.root to the folder of the published batches; data.on_missing=error refuses instead.",
        tried,
    )
    return replace(config, name="shapes", root=None)


@cache  # one search, and at most one try to download, per process
def _find_cifar10() -> tuple[Path | None, str]:
    tried = []
    named = os.environ.get("CIFAR10_DIR")
    if named:
        if Path(named).is_dir():
            return Path(named), ""
        tried.append(f"$CIFAR10_DIR={named} (no such folder)")
    local = Path("data", cifar10.FOLDER).absolute()
    if local.is_dir():
        return local, ""
    tried.append(f"{local} (no such folder)")
    try:
        return cifar10.fetch(downloads_folder()), ""
    except Exception as error:  # requests, urllib and pooch each have their own
        log.debug("download failed", exc_info=True)
        tried.append(f"{cifar10.URL} ({type(error).__name__})")
        return None, ", ".join(tried)


def downloads_folder() -> Path:
    """Return where downloads are kept: pooch's cache folder for this program."""
    return Path(pooch.os_cache("resnet8ptq"))


@cache  # the jobs of one sweep share it
def load(name: str, root: str | None) -> Dataset:
    """Load a settled data set.

    Raises:
        DataError: a file is missing, damaged, or its labels do not fit; names the file.
    """
    if name == "shapes":
        train, test = (Split(*shapes.draw(s), source="resnet8ptq.shapes") for s in SPLITS)
        return Dataset("shapes", shapes.CLASS_NAMES, train, test)
    folder = Path(str(root))
    train = Split(*cifar10.read_split(folder, "train"), source=str(folder))
    images, labels = cifar10.read_split(folder, "test")
    # Every run goes through all test images, and more than once; through few of the others.
    test = Split(images[:], labels, source=str(folder))
    return Dataset("cifar10", cifar10.read_class_names(folder), train, test)


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
