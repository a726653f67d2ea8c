"""Images that are read when they are asked for, with an array's face."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

AT_ONCE = 256  # images that one step of a pass over many holds in memory


class Store(Protocol):
    """Where images lie: an array [M, H, W, C] uint8, or files."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(M, H, W, C)."""

    def __getitem__(self, indices: NDArray[np.int64], /) -> NDArray[np.uint8]:
        """Return the images [n, H, W, C] at `indices` [n]."""


@dataclass(frozen=True, eq=False)
class LazyImages:
    """The images of a store at `indices`, in that order; of them, only the indices are in memory.

    Slices and index arrays give arrays, and so do numpy's functions; those of all images at once
    take the memory that this class is there to save.
    """

    store: Store
    indices: NDArray[np.int64]

    dtype = np.dtype(np.uint8)

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, H, W, C)."""
        return (len(self), *self.store.shape[1:])

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, chosen: int | slice | NDArray[Any]) -> NDArray[np.uint8]:
        found = self.indices[chosen]
        return self.store[found] if np.ndim(found) else self.store[found[np.newaxis]][0]

    def __iter__(self) -> Iterator[NDArray[np.uint8]]:
        for start in range(0, len(self), AT_ONCE):
            yield from self[start : start + AT_ONCE]

    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> NDArray[np.uint8]:
        return np.asarray(self[:], dtype)

    def astype(self, dtype: DTypeLike) -> NDArray[Any]:
        """Return all images as an array of `dtype`."""
        return self[:].astype(dtype)


Images = NDArray[np.uint8] | LazyImages


@dataclass(frozen=True)
class Batches:
    """Slices of images, turned into float32 one at a time: memory stays flat."""

    images: Images
    size: int

    def __len__(self) -> int:
        return -(-len(self.images) // self.size)

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        for start in range(0, len(self.images), self.size):
            yield self.images[start : start + self.size].astype(np.float32)
