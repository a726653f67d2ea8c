"""Pickles of uint8 arrays written by others, such as CIFAR-10's files (Python 2, numpy 1).

They are read by an unpickler that knows the parts of a uint8 array and nothing else, so that a
file made to run code is refused before it runs. It gets the pickle without its long strings: the
bytes of an array stay in the file, and what is known of them is where they lie.
"""

import math
import mmap
import pickle
import pickletools
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_ARGUMENTS = {ord(op.code): op.arg.n if op.arg else 0 for op in pickletools.opcodes}
# Opcodes of which a file might make too much; they are looked at one by one.
_CHECKED = {code[0] for code in (pickle.LONG_BINPUT, pickle.FRAME, pickle.PERSID, pickle.BINPERSID)}
_FIXED = {code: 1 + n for code, n in _ARGUMENTS.items() if n >= 0 and code not in _CHECKED}
_COUNTED = {code: _LENGTH_BYTES[n] for code, n in _ARGUMENTS.items() if n in _LENGTH_BYTES}
_TWO_LINES = {pickle.GLOBAL[0], pickle.INST[0]}
# How strings of 256 bytes or more are written; Unicode has opcodes of its own.
_LONG = {code[0] for code in (pickle.BINSTRING, pickle.BINBYTES, pickle.BINBYTES8)}


class Span(NamedTuple):
    """Where a long string lies in its file, in bytes."""

    offset: int
    length: int


class _Dtype:
    """Stands for numpy.dtype, and keeps its arguments: `u1`, 0, 1 for uint8."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        """Byte order and flags, of which one byte has nothing to say."""


class Array:
    """Stands for a numpy array, and keeps what it would be made of."""

    def __init__(self, *args: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def locate(self) -> tuple[tuple[int, ...], Span]:
        """Return the array's shape, and where its bytes lie in C order.

        Raises:
            ValueError: it is no uint8 array in C order, or its bytes do not fill the shape.
        """
        _, shape, dtype, fortran_order, content = self.state
        if not isinstance(dtype, _Dtype) or dtype.args[0] != "u1" or fortran_order:
            raise ValueError("it is no uint8 array in C order")
        if not content:
            content = Span(0, 0)
        if not isinstance(content, Span):
            raise ValueError("its bytes are no bytes, or too few")
        if len(shape) > 64 or not all(type(n) is int and 0 <= n < 2**63 for n in shape):
            raise ValueError("its shape is none")
        if math.prod(shape) != content.length:
            raise ValueError("its shape does not fit its bytes")
        return tuple(shape), content


def _ndarray(*args: Any) -> Any:
    """Stands for the class itself, which the files name and never call."""
    raise pickle.UnpicklingError("it builds an array by itself")


# What the published files ask for, under numpy 1's and numpy 2's module names. None of it is
# numpy's own, whose array and dtype take whatever state a pickle gives them, and crash on some.
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

    def persistent_load(self, pid: Any) -> Span:
        """Return the span that `_without_long_strings` put here."""
        return Span(*map(int, pid.split(":")))


def load(path: Path) -> Any:
    """Read a pickle; arrays come back as `Array`, strings of 256 bytes or more as `Span`.

    Raises:
        OSError: the file cannot be read.
        Exception: whatever a damaged or hostile pickle makes of itself.
    """
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        short = _without_long_strings(content)
    return _ArrayUnpickler(BytesIO(short), encoding="latin1").load()


def _without_long_strings(content: mmap.mmap) -> bytes:
    """Return the pickle with spans, as persistent ids, in place of its long strings.

    The pages they lie on are not touched. Nothing is built here: opcodes are only counted off.
    """
    kept: list[bytes] = []
    start = place = 0  # what lies before `start` is in `kept`
    try:
        while (code := content[place]) != pickle.STOP[0]:
            if code in _FIXED:
                place += _FIXED[code]
            elif code in _COUNTED:
                begin = place + 1 + _COUNTED[code]
                length = int.from_bytes(content[place + 1 : begin], "little")
                if code in _LONG:
                    kept += [content[start:place], b"P%d:%d\n" % (begin, length)]
                    start = begin + length
                place = begin + length
            elif code == pickle.FRAME[0]:  # a hint for reading ahead, and now a wrong one
                kept.append(content[start:place])
                start = place = place + 9
            else:
                place = _check(content, place)
    except IndexError:
        raise pickle.UnpicklingError("it ends too early") from None
    return b"".join([*kept, content[start : place + 1]])


def _check(content: mmap.mmap, place: int) -> int:
    """Refuse what only a hostile or damaged file asks for; return where the next opcode lies."""
    code = content[place]
    if code not in _ARGUMENTS:
        raise pickle.UnpicklingError(f"it has an unknown opcode, {code}")
    if code in (pickle.PERSID[0], pickle.BINPERSID[0]):
        raise pickle.UnpicklingError("it asks for an object outside of itself")
    if code == pickle.LONG_BINPUT[0]:
        end = place + 5
        index = int.from_bytes(content[place + 1 : end], "little")
    else:
        end = _end_of_line(content, place)
        index = int(content[place + 1 : end]) if code == pickle.PUT[0] else 0
        if code in _TWO_LINES:
            end = _end_of_line(content, end)
    if index > len(content):  # the unpickler makes a table of that length
        raise pickle.UnpicklingError("its memo is larger than the file")
    return end


def _end_of_line(content: mmap.mmap, place: int) -> int:
    end = content.find(b"\n", place) + 1
    if not end:
        raise pickle.UnpicklingError("it ends too early")
    return end
