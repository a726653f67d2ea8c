"""How much memory a run may use for tensors: the one number that batch sizes follow from."""

import ctypes
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

MOST, LEAST = 2**31, 2**28  # bytes of the budget
STEP = 8  # what one step of a run holds of a batch is an eighth of the budget: inputs, outputs, ...

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_CGROUP = Path("/sys/fs/cgroup")


@cache
def budget() -> int:
    """Return how many bytes of tensors a run may hold at once: half of what is free, 2 GiB at most.

    A power of two, read once a process, so that batches, and the sums over them, are the same from
    run to run unless memory is very short.
    """
    free = free_bytes()
    if free is None:
        return MOST
    return max(LEAST, min(MOST, 2 ** ((free // 2).bit_length() - 1)))


def step() -> int:
    """Return how many bytes of tensors one step of a run may look at together."""
    return budget() // STEP


def fitting(bytes_of_one: int, within: int) -> int:
    """Return how many of that size are within so many bytes; 1 at least.

    >>> fitting(30, 100), fitting(300, 100)
    (3, 1)
    """
    return max(1, within // max(1, bytes_of_one))


def in_groups(sizes: Sequence[int], within: int) -> list[slice]:
    """Part a row of sizes, in order, so that each part stays within so many bytes, or is one.

    >>> in_groups([40, 50, 30, 200, 10], 100)
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None), slice(4, 5, None)]
    """
    starts, held = [0], 0
    for place, size in enumerate(sizes):
        if held and held + size > within:
            starts.append(place)
            held = 0
        held += size
    return [slice(*pair) for pair in zip(starts, [*starts[1:], len(sizes)], strict=True)]


@cache
def return_large_blocks() -> None:
    """Let large tensors go back to the system as soon as they are freed, for this process.

    glibc keeps freed blocks of up to 32 MB, in pieces that other sizes do not fit. Blocks that are
    returned take a little time each, so only networks with large tensors ask for it. Elsewhere than
    on glibc nothing changes (`man 3 mallopt`).
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**22)


def free_bytes() -> int | None:
    """Return the memory that is free for this process; None where the system does not tell.

    The machine's (`man 5 proc`, MemAvailable) or the control group's, whichever is less.
    """
    free = []
    with suppress(OSError):
        known = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())
        free += [int(known[1]) * 1024] if known else []
    with suppress(OSError, ValueError):  # "max": no limit
        limit = int((_CGROUP / "memory.max").read_text())
        free.append(max(0, limit - int((_CGROUP / "memory.current").read_text())))
    return min(free, default=None)
