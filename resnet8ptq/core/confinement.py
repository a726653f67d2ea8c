"""Limits that a process sets itself before it reads an untrusted file."""

import ctypes
import os
import re
import resource
import signal
from contextlib import suppress
from pathlib import Path

MAX_SECONDS = 3600  # for each core
MEMORY = 0.9  # of what is free as the process starts

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h


def confine(parent: int, network: bool) -> str:
    """Limit this process, which has one thread yet and was started by the process `parent`.

    Returns:
        Why it can still reach the network although `network` is False; else nothing.
    """
    die_with(parent)
    limit()
    return "" if network else cut_network()


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, however that ends (Linux)."""
    with suppress(AttributeError):  # no prctl: the process ends when it next reads its pipe
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def limit() -> None:
    """Limit this process to most of the memory that is free, and to one hour of each core.

    A file may ask for more than it holds: a constant of 10**12 zeros, a loop without end.
    """
    seconds = MAX_SECONDS * (os.cpu_count() or 1)
    wanted = (resource.RLIMIT_DATA, int(MEMORY * free_bytes())), (resource.RLIMIT_CPU, seconds)
    for kind, most in wanted:
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def free_bytes() -> int:
    """Return the memory that this process could take: of the machine, and of its control group."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError):
        free = _read_number(Path("/proc/meminfo"), "MemAvailable:") * 1024
    group = Path("/sys/fs/cgroup")  # version 2, as a container sees its own
    with suppress(OSError, ValueError):  # no limit: "max"
        used = int((group / "memory.current").read_text())
        cached = _read_number(group / "memory.stat", "inactive_file")
        free = min(free, int((group / "memory.max").read_text()) - used + cached)
    return free


def _read_number(path: Path, name: str) -> int:
    line = re.search(rf"^{name}\s+(\d+)", path.read_text(), re.MULTILINE)
    if line is None:
        raise OSError(f"{path}: no {name}")
    return int(line[1])


def cut_network() -> str:
    """Move this process to a network of its own without interfaces; return why it cannot.

    That takes root, or a user namespace, which the kernel makes for processes of one thread only.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "unshare"):
        return "only Linux can take it away"
    user, group = os.getuid(), os.getgid()
    if library.unshare(_CLONE_NEWNET) == 0:
        return ""
    if library.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        return f"no network namespace ({os.strerror(ctypes.get_errno())})"
    with suppress(OSError):  # the process keeps its rights to files, whatever its user is called
        for name, text in (
            *(("setgroups", "deny"), ("uid_map", f"{user} {user} 1")),
            ("gid_map", f"{group} {group} 1"),
        ):
            Path("/proc/self", name).write_text(text)
    return ""
