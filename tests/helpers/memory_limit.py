"""A limit on the memory of a process, so that a damaged length does no harm."""

import resource
from pathlib import Path


def limit_memory(extra_bytes: int) -> tuple[int, int]:
    """Let this process take no more than `extra_bytes` beyond what it has; return the old limit."""
    old = resource.getrlimit(resource.RLIMIT_AS)
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + extra_bytes, old[1]))
    return old
