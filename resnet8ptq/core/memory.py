"""The memory budget for the tensors of a run, from which batch sizes follow."""

import ctypes
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

# The bounds of the budget, in bytes
MOST = 2**31
LEAST = 2**28
STEP = 8  # the tensors of one batch may take an eighth of the budget

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_CGROUP = Path("/sys/fs/cgroup")
_VARIABLE = "RESNET8PTQ_MEMORY_GB"  # child processes inherit the limit


def set_limit(gigabytes: float | None) -> None:
    """Set the memory from which `budget` follows, for this process and its later children.

    Args:
        gigabytes: in units of 10^9 bytes; None for half of the free memory.
    """
    if gigabytes is None:
        os.environ.pop(_VARIABLE, None)
    else:
        os.environ[_VARIABLE] = str(gigabytes)


def budget() -> int:
    """Return the number of bytes for a run's tensors.

    The budget is the largest power of two up to half of the memory that `set_limit` sets, but at
    least `LEAST` and at most `MOST`. The other half is for libraries, weights and their copies.
    With a power of two, a small difference in memory rarely changes the batches and the sums over
    them.
    """
    asked = os.environ.get(_VARIABLE)
    whole = int(float(asked) * 1e9) if asked else _half_of_free()
    return max(LEAST, min(MOST, 2 ** ((whole // 2).bit_length() - 1)))


@cache
def _half_of_free() -> int:
    """Return half of the memory that was free at this process's first call.

    If the system does not report it, return enough for the largest budget.
    """
    free = free_bytes()
    if free is None:
        return 2 * MOST
    return free // 2


def step() -> int:
    """Return the number of bytes for the tensors of one step of a run, such as one batch."""
    return budget() // STEP


def fitting(bytes_of_one: int, within: int) -> int:
    """Return how many items of `bytes_of_one` bytes fit into `within` bytes; at least 1.

    >>> fitting(30, 100), fitting(300, 100)
    (3, 1)
    """
    return max(1, within // max(1, bytes_of_one))


def in_groups(sizes: Sequence[int], within: int) -> list[slice]:
    """Divide sizes, in order, into groups of at most `within` bytes; a larger size gets its own.

    >>> in_groups([40, 50, 30, 200, 10], 100)
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None), slice(4, 5, None)]
    """
    starts = [0]
    total = 0
    for index, size in enumerate(sizes):
        if total and total + size > within:
            starts.append(index)
            total = 0
        total += size
    return [slice(*pair) for pair in zip(starts, [*starts[1:], len(sizes)], strict=True)]


@cache
def return_large_blocks() -> None:
    """Make this process return blocks of 4 MB or more to the system as soon as they are freed.

    By default glibc keeps freed blocks of up to 32 MB, often in pieces of unsuitable sizes.
    Returning a block takes a little time, so this is called only for networks with large tensors.
    The call has an effect with glibc only (`man 3 mallopt`).
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**22)


def free_bytes(file_cache: bool = False) -> int | None:
    """Return the memory that is free for this process; None if the system does not report it.

    The result is the smaller of the free memory of the machine (`man 5 proc`, MemAvailable) and
    that of the control group at /sys/fs/cgroup (version 2), if any.

    Args:
        file_cache: whether the control group's inactive file cache counts as free.
    """
    free = []
    with suppress(OSError):
        free.append(_read_number(Path("/proc/meminfo"), "MemAvailable:") * 1024)
    with suppress(OSError, ValueError):  # "max", for no limit, raises ValueError
        left = int((_CGROUP / "memory.max").read_text())
        left -= int((_CGROUP / "memory.current").read_text())
        if file_cache:
            left += _read_number(_CGROUP / "memory.stat", "inactive_file")
        free.append(max(0, left))
    return min(free, default=None)


def _read_number(path: Path, name: str) -> int:
    line = re.search(rf"^{name}\s+(\d+)", path.read_text(), re.MULTILINE)
    if line is None:
        raise OSError(f"{path}: no {name}")
    return int(line[1])
