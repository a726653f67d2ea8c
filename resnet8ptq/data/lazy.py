"""Selections and batches of samples in an array that may be mapped from a file."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

AT_ONCE = 256  # samples in memory during a pass over many


@dataclass(frozen=True, eq=False)
class LazySamples:
    """The samples of `whole` [M, ...] at `indices`, in that order, read on access.

    A slice or an index array returns an array. To convert all samples to one array, as numpy's
    functions do, needs the memory that this class saves.
    """

    whole: NDArray[Any]
    indices: NDArray[np.int64]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of `whole`."""
        return self.whole.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape (N, ...) of the samples."""
        return (len(self), *self.whole.shape[1:])

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, chosen: int | slice | NDArray[Any]) -> NDArray[Any]:
        return self.whole[self.indices[chosen]]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        for part in in_parts(self):
            yield from part

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)

    def astype(self, dtype: DTypeLike) -> NDArray[Any]:
        """Return all samples as an array of `dtype`."""
        return self[:].astype(dtype)


Stored = NDArray[Any] | LazySamples


def in_parts(samples: Stored) -> Iterator[NDArray[Any]]:
    """Yield samples [N, ...] in parts of at most `AT_ONCE`."""
    for start in range(0, len(samples), AT_ONCE):
        yield samples[start : start + AT_ONCE]


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches of samples as network inputs, prepared one at a time to save memory.

    Attributes:
        stored: the samples [N, ...].
        parts: the sample indices of each batch.
        prepare: turns stored samples into network inputs.
        order: the sample indices in the order of the batches; None if the order is unchanged.
    """

    stored: Stored
    parts: Sequence[slice | NDArray[np.int64]]
    prepare: Callable[[NDArray[Any]], NDArray[Any]]
    order: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[NDArray[Any]]:
        for part in self.parts:
            yield self.prepare(self.stored[part])

    def restore(self, results: NDArray[Any]) -> NDArray[Any]:
        """Return the joined results [N, ...] of all batches in the order of the samples."""
        if self.order is None:
            return results
        restored = np.empty_like(results)
        restored[self.order] = results
        return restored
