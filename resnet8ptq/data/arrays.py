"""Some images of an array, which may lie in a file, without a copy of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

AT_ONCE = 256  # images that one step of a pass over many holds in memory


@dataclass(frozen=True, eq=False)
class LazyImages:
    """The images of `whole` [M, H, W, C] at `indices`, in that order; only these are in memory.

    Slices and index arrays give arrays, and so do numpy's functions; those of all images at once
    take the memory that this class is there to save.
    """

    whole: NDArray[np.uint8]
    indices: NDArray[np.int64]

    dtype = np.dtype(np.uint8)

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, H, W, C)."""
        return (len(self), *self.whole.shape[1:])

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, chosen: int | slice | NDArray[Any]) -> NDArray[np.uint8]:
        return self.whole[self.indices[chosen]]

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
