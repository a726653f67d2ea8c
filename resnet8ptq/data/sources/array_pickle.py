"""Pickles of uint8 arrays written by others, such as CIFAR-10's files (Python 2, numpy 1).

They are read by an unpickler that knows the parts of a uint8 array and nothing else, so that a
file made to run code is refused before it runs.
"""

import pickle
import pickletools
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray


class _Dtype:
    """Stands for numpy.dtype, and keeps its arguments: `u1`, 0, 1 for uint8."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        """Ignore byte order and flags: neither matters for single bytes."""


class Array:
    """Stands for a numpy array, and keeps what it would be made of."""

    def __init__(self, *args: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def to_numpy(self) -> NDArray[np.uint8]:
        """Return the array.

        Raises:
            Exception: it is not a uint8 array in C order, or its bytes do not fill the shape.
        """
        _, shape, dtype, fortran_order, content = self.state
        if not isinstance(dtype, _Dtype) or dtype.args[0] != "u1" or fortran_order:
            raise ValueError("it is not a uint8 array in C order")
        if isinstance(content, str):  # what Python 2 called a string
            content = content.encode("latin1")
        return np.frombuffer(content, np.uint8).reshape(shape)


def _ndarray(*args: Any) -> Any:
    """Stands for the class itself, which the files name and never call."""
    raise pickle.UnpicklingError("it calls numpy.ndarray")


# What the published files ask for, under numpy 1's and numpy 2's module names. None of it is
# numpy's own, whose array and dtype take any state from a pickle, and crash on some.
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): Array,
    ("numpy._core.multiarray", "_reconstruct"): Array,
    ("numpy", "ndarray"): _ndarray,
    ("numpy", "dtype"): _Dtype,
}


class _ArrayUnpickler(pickle.Unpickler):
    """Admits the parts of a uint8 array; refuses every other global."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _ALLOWED[module, name]


def loads(content: bytes) -> Any:
    """Read a pickle, in which arrays come back as `Array`.

    Raises:
        Exception: any that a damaged or hostile pickle raises.
    """
    for opcode, argument, _ in pickletools.genops(content):  # every argument is there, and whole
        if opcode.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > len(content):
            raise pickle.UnpicklingError("its memo is larger than the file")  # and made at once
    return _ArrayUnpickler(BytesIO(content), encoding="latin1").load()
