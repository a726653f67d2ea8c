"""The inputs of a network whose samples are records, and the fields that fill them.

Stored records (see `core.records`) of texts are padded to one length. If a network takes any
length, each batch is cut to its longest sample. If the network takes one length, shorter records
are padded to that length.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.core.records import find_mask, names_of, pack, unpack
from resnet8ptq.data.preprocessing import RAW, Preprocessing, arrange

Layout = tuple[int, ...]


@dataclass(frozen=True)
class Field:
    """One input of a network, filled by the field of the same name.

    Attributes:
        layout: the order of a sample's axes in the input, see `preprocessing.arrange`.
        padding: number of zeros after a text, up to the network's length.
    """

    name: str
    dtype: str
    layout: Layout | None = None
    steps: Preprocessing = RAW
    padding: int = 0

    def prepare(self, stored: NDArray[Any]) -> NDArray[Any]:
        """Return stored values [n, ...] as the network's input [n, ...] of `dtype`."""
        values = arrange(self.steps.apply(stored, self.dtype), self.layout)
        if self.padding:
            values = np.pad(values, [(0, 0), (0, self.padding)])
        return np.ascontiguousarray(values)


@dataclass(frozen=True)
class Fields:
    """All inputs of a network, in its order.

    Attributes:
        mask: the field [N, length] that is 0 at padding; None without such a field.
        any_length: names of the inputs [N, length, ...] that take any length; needs `mask`.
    """

    inputs: tuple[Field, ...]
    mask: str | None = None
    any_length: tuple[str, ...] = ()

    @property
    def length_mask(self) -> str | None:
        """The mask that gives the length of a sample; None unless the network takes any length."""
        return self.mask if self.any_length else None

    def longest(self, stored: np.dtype[Any]) -> int | None:
        """Return the padded length of stored records; None unless the network takes any length."""
        if self.length_mask is None:
            return None
        return int(stored[self.length_mask].shape[0])

    def whole(self, stored: NDArray[Any]) -> NDArray[Any]:
        """Return stored records [n] as records of network inputs, without cutting them."""
        return pack(self._fill(stored))

    def prepare(self, stored: NDArray[Any]) -> NDArray[Any]:
        """Return stored records [n] as records of network inputs.

        If the network takes any length, they are cut to the longest sample.
        """
        return pack(self._shorten(self._fill(stored)))

    def cut(self, inputs: NDArray[Any]) -> NDArray[Any]:
        """Return records of network inputs [n], cut to the longest if the network takes any
        length.
        """
        return pack(self._shorten(unpack(inputs)))

    def _fill(self, stored: NDArray[Any]) -> dict[str, NDArray[Any]]:
        return {field.name: field.prepare(stored[field.name]) for field in self.inputs}

    def _shorten(self, inputs: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        if self.length_mask is None:
            return inputs
        length = int(lengths(inputs[self.length_mask]).max(initial=1))
        shortened = dict(inputs)
        for name in self.any_length:
            shortened[name] = inputs[name][:, :length]
        return shortened


def lengths(mask: NDArray[Any]) -> NDArray[np.int64]:
    """Return each sample's length from a mask [N, length]: the end of its last nonzero value.

    >>> lengths(np.array([[1, 1, 0], [0, 1, 1], [0, 0, 0]])).tolist()
    [2, 3, 0]
    """
    behind = np.argmax(mask[:, ::-1] != 0, axis=1)
    return np.where((mask != 0).any(axis=1), mask.shape[1] - behind, 0).astype(np.int64)


def find_masked(dtype: np.dtype[Any]) -> tuple[str, ...]:
    """Return the names of the fields that are as long as the mask, with the mask's own.

    Without a mask, the result is empty.
    """
    mask = find_mask(dtype)
    if mask is None:
        return ()
    length = dtype[mask].shape
    return tuple(name for name in names_of(dtype) if dtype[name].shape[:1] == length)


def picture_shape(dtype: np.dtype[Any]) -> Layout:
    """Return the shape of the first field that holds pictures; () without one."""
    for name in names_of(dtype):
        if is_picture(dtype[name]):
            return dtype[name].shape
    return ()


def steps_of(dtype: np.dtype[Any], steps: Preprocessing) -> Preprocessing:
    """Return the preprocessing of one field: the data set's for pictures, none for others."""
    return steps if is_picture(dtype) else RAW


def is_picture(dtype: np.dtype[Any]) -> bool:
    """Return whether a field of this dtype and shape holds pictures [H, W, C]."""
    return dtype.ndim == 3 and dtype.base == np.uint8
