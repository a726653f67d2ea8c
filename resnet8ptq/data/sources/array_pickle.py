"""Reads untrusted pickles with uint8 arrays, such as CIFAR-10's files, which Python 2 wrote.

The unpickler accepts only the classes and functions in `_ALLOWED`, and replaces them. A pickle that
names others is refused before it can call them.
"""

import pickle
import pickletools
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray


class _Dtype:
    """Replaces numpy.dtype and keeps its arguments: `u1`, 0, 1 for uint8."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        """Ignore byte order and flags, which do not matter for single bytes."""


class Array:
    """Replaces a numpy array and keeps its pickled state."""

    def __init__(self, *args: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def to_numpy(self) -> NDArray[np.uint8]:
        """Return the array.

        Raises:
            Exception: the state is not a uint8 array in C order, or its bytes do not fit the
                shape.
        """
        _, shape, dtype, fortran_order, content = self.state
        if not isinstance(dtype, _Dtype) or dtype.args[0] != "u1" or fortran_order:
            raise ValueError("it is not a uint8 array in C order")
        if isinstance(content, str):  # the content is a string of Python 2
            content = content.encode("latin1")
        return np.frombuffer(content, np.uint8).reshape(shape)


def _ndarray(*args: Any) -> Any:
    """Refuse a call of numpy.ndarray, which CIFAR-10's files name but never call."""
    raise pickle.UnpicklingError("it calls numpy.ndarray")


# The globals in the published files, under the module names of numpy 1 and numpy 2. numpy's own
# classes are replaced, because they accept any state from a pickle, and some states crash them.
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): Array,
    ("numpy._core.multiarray", "_reconstruct"): Array,
    ("numpy", "ndarray"): _ndarray,
    ("numpy", "dtype"): _Dtype,
}


class _ArrayUnpickler(pickle.Unpickler):
    """Accepts the classes and functions in `_ALLOWED` and refuses all others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _ALLOWED[module, name]


def loads(content: bytes) -> Any:
    """Return the content of a pickle, with its arrays as `Array`.

    Raises:
        Exception: any type, from a damaged or hostile pickle.
    """
    # This also checks that no argument is cut
    for opcode, argument, _ in pickletools.genops(content):
        # The unpickler would allocate a memo of this size at once.
        if opcode.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > len(content):
            raise pickle.UnpicklingError("its memo is larger than the file")
    return _ArrayUnpickler(BytesIO(content), encoding="latin1").load()
