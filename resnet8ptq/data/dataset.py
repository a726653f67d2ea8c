"""Samples with labels where there are any, and the named sets of them."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.core import cache, code
from resnet8ptq.data.lazy import AT_ONCE, Batches, Images, LazyImages
from resnet8ptq.data.preprocessing import RAW, Preprocessing, arrange

Labels = NDArray[Any]
Side = Literal["train", "test"]
SIDES: tuple[Side, ...] = ("train", "test")
Layout = tuple[int, ...]


@dataclass(frozen=True)
class Split:
    """Samples [N, ...] as they are stored, their labels, and where they came from.

    Pictures are [N, H, W, C] uint8. The samples may lie in files: what needs many of them goes
    through them in batches.

    Attributes:
        labels: classes [N] int64, values [N, ...] of floats, or boxes (see `boxes`); None without
            any.
        preprocessing: what makes network inputs of them.
        layout: how the network takes the axes of a sample, see `preprocessing.arrange`.
        dtype: of the network's input.
        at_once: how many samples the network takes at once, at most; None: any number.
        within_memory: how many samples at once keep its tensors within the memory budget.
        groups: [N] int64, the same number for samples that belong together, such as the windows of
            one clip; None where each stands by itself.
        hashes: `pixel_hashes`, where they are known.
    """

    images: Images
    labels: Labels | None
    source: str
    preprocessing: Preprocessing = RAW
    layout: Layout | None = None
    dtype: str = "float32"
    at_once: int | None = None
    groups: NDArray[np.int64] | None = None
    hashes: NDArray[np.bytes_] | None = None
    within_memory: int | None = None

    def __len__(self) -> int:
        return len(self.images)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over shape, samples, labels, groups and preprocessing, in hexadecimal.

        Layout and dtype are left out: they follow from the network.
        """
        images, described = self.images, str(self.images.shape)
        if images.dtype != np.uint8:
            described += images.dtype.str
        if self.preprocessing != RAW:
            described += repr(self.preprocessing)
        digest = hashlib.sha256(described.encode())
        for start in range(0, len(self), AT_ONCE):
            digest.update(np.ascontiguousarray(images[start : start + AT_ONCE]).data)
        for array in (self.labels, self.groups):
            if array is not None:
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    @cached_property
    def pixel_hashes(self) -> NDArray[np.bytes_]:
        """A 16-byte hash of each sample as it is stored, [N]: equal where the samples are."""
        return hash_samples(self.images) if self.hashes is None else self.hashes

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one network input."""
        return self.zeros.shape[1:]

    @property
    def zeros(self) -> NDArray[Any]:
        """One network input [1, ...] of zeros, which frameworks trace networks with."""
        stored = np.zeros((1, *self.images.shape[1:]), self.images.dtype)
        return np.zeros_like(self.prepare(stored))

    @property
    def has_pictures(self) -> bool:
        """Whether the samples are pictures [H, W, C], which may be shifted and mirrored.

        Integers of a network that takes integers are none, unless it takes those of pixels.
        """
        pixels = self.images.dtype == np.uint8 and self.dtype in ("float32", "uint8")
        return pixels and len(self.images.shape) == 4

    def take(self, indices: NDArray[np.int64]) -> "Split":
        """Return the samples at `indices`, in that order; they are not copied."""
        images = self.images
        if isinstance(images, LazyImages):
            taken = LazyImages(images.whole, images.indices[indices])
        else:
            taken = LazyImages(images, np.arange(len(images))[indices])
        labels, groups = (
            None if array is None else array[indices] for array in (self.labels, self.groups)
        )
        known = self.hashes is not None or "pixel_hashes" in vars(self)
        hashes = self.pixel_hashes[indices] if known else None
        return replace(self, images=taken, labels=labels, groups=groups, hashes=hashes)

    def strata(self, classes: int) -> list[NDArray[np.int64]]:
        """Return the places of each class's samples, ascending; without classes, of all in one."""
        if self.labels is None or self.labels.dtype.kind != "i":
            return [np.arange(len(self))]
        ends = np.searchsorted(np.sort(self.labels), np.arange(classes), "right")
        starts = [np.count_nonzero(self.labels < 0), *ends[:-1]]
        order = np.argsort(self.labels, kind="stable")
        return [order[start:end] for start, end in zip(starts, ends, strict=True)]

    def prepare(self, stored: NDArray[Any]) -> NDArray[Any]:
        """Return stored samples [n, ...] as network inputs [n, ...] of `dtype`, contiguous."""
        values = self.preprocessing.apply(stored, self.dtype)
        return np.ascontiguousarray(arrange(values, self.layout))

    def inputs(self, indices: NDArray[np.int64] | slice) -> NDArray[Any]:
        """Return the network inputs [n, ...] of the samples at `indices`."""
        return self.prepare(self.images[indices])

    def limit(self, size: int) -> int:
        """Return `size`, or how many samples the network and the memory take at once."""
        return min(size, self.at_once or size, self.within_memory or size)

    def batches(self, size: int) -> Batches:
        """Return network inputs [<=size, ...], of `dtype`; see `limit`."""
        return Batches(self.images, self.limit(size), self.prepare)


def hash_samples(samples: Images) -> NDArray[np.bytes_]:
    """Return a 16-byte hash of each sample, [N]."""
    hashes = (hashlib.blake2b(sample.tobytes(), digest_size=16) for sample in samples)
    return np.fromiter((found.digest() for found in hashes), "S16", len(samples))


@dataclass(frozen=True)
class Dataset:
    """A named training and test split, and the only place that knows classes and sample shape.

    Attributes:
        class_names: none where the labels are no classes.
        named: the classes were given names; else they are numbered up to the largest label, and the
            network may know more of them.
        class_ids: the numbers of the classes in the annotations; empty where they are 0, 1, ...
        calibration: samples that calibrate instead of training samples, without labels.
    """

    name: str
    class_names: tuple[str, ...]
    train: Split
    test: Split
    named: bool = True
    class_ids: tuple[int, ...] = ()
    calibration: Split | None = None

    @property
    def image_shape(self) -> tuple[int, ...]:
        """The shape of one stored sample, such as (H, W, C)."""
        return self.test.images.shape[1:]

    def arranged(
        self, layout: Layout | None, at_once: int | None = None, dtype: str = "float32"
    ) -> "Dataset":
        """Return the data set for a network that takes the axes of a sample in this order.

        Args:
            at_once, dtype: see `Split`.
        """
        test = self.test
        if (layout, at_once, dtype) == (test.layout, test.at_once, test.dtype):
            return self
        return self.with_splits(
            lambda split: replace(split, layout=layout, at_once=at_once, dtype=dtype)
        )

    def with_splits(self, change: Callable[[Split], Split]) -> "Dataset":
        """Return the data set with every split changed."""
        calibration = None if self.calibration is None else change(self.calibration)
        return replace(
            self, train=change(self.train), test=change(self.test), calibration=calibration
        )

    @cached_property
    def unseen(self) -> NDArray[np.bool_]:
        """Whether the pixels of each training sample are those of no test sample, [N]."""
        return np.isin(self.train.pixel_hashes, self.test.pixel_hashes, invert=True)

    @property
    def calibrating(self) -> Split:
        """The samples that calibration draws from."""
        return self.train if self.calibration is None else self.calibration


@dataclass(frozen=True)
class CalibrationSet:
    """Samples for calibration, and their places in the split that they are drawn from."""

    split: Split
    indices: NDArray[np.int64]

    @property
    def digest(self) -> str:
        """SHA-256 over the indices (int64, little endian), in hexadecimal."""
        return hashlib.sha256(self.indices.astype("<i8").tobytes()).hexdigest()


def keep(
    name: str,
    class_names: tuple[str, ...],
    source: str,
    read: Callable[[Side], tuple[NDArray[np.uint8], NDArray[np.int64]]],
    keys: Mapping[Side, cache.Key],
    module: str,
    cache_root: Path,
) -> Dataset:
    """Return a data set of pictures [N, H, W, C], mapped from files that are made by `read`.

    Args:
        keys: what the pictures of each split depend on, besides code.
        module: of `read`, by its `__name__`.
    """

    def open_split(side: Side) -> Split:
        def make(folder: Path) -> None:
            images, labels = read(side)
            np.save(folder / "images.npy", images)
            np.save(folder / "labels.npy", labels)
            np.save(folder / "hashes.npy", hash_samples(images))

        folder = cache.entry(cache_root, name, {**keys[side], "code": code.behind(module)}, make)
        images = np.asarray(np.load(folder / "images.npy", mmap_mode="r"))
        labels, hashes = (np.load(folder / f"{kept}.npy") for kept in ("labels", "hashes"))
        return Split(images, labels, source, hashes=hashes)

    return Dataset(name, class_names, open_split("train"), open_split("test"))
