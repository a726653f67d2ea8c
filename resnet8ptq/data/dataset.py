"""Samples with labels, and the named sets of them."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.data.arrays import AT_ONCE, Batches, Images, LazyImages

Labels = NDArray[np.int64]


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
        images = self.images
        if isinstance(images, LazyImages):
            taken = LazyImages(images.whole, images.indices[indices])
        else:
            taken = LazyImages(images, np.arange(len(images))[indices])
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
