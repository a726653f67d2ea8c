"""Limits that a process sets itself before it reads an untrusted file."""

import ctypes
import os
import resource
import signal
from contextlib import suppress
from pathlib import Path

from resnet8ptq.core import memory

MAX_SECONDS = 3600  # for each core
MEMORY = 0.9  # fraction of the memory that is free when the process starts

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, even if the parent is killed (Linux).

    Without prctl, the process ends when it next reads its pipe.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def limit() -> None:
    """Limit this process to 90% of the free memory, and to one hour of each core.

    A small file may ask for much: a constant of 10**12 zeros, or an endless loop.
    """
    free = memory.free_bytes(file_cache=True)
    if free is None:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    seconds = MAX_SECONDS * (os.cpu_count() or 1)
    for kind, most in ((resource.RLIMIT_DATA, int(MEMORY * free)), (resource.RLIMIT_CPU, seconds)):
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def cut_network() -> str:
    """Move this process to a network namespace without interfaces; return the reason on failure.

    This needs root, or a user namespace, which the kernel makes only for single-threaded processes.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "unshare"):
        return "only Linux has network namespaces"
    user, group = os.getuid(), os.getgid()
    if library.unshare(_CLONE_NEWNET) == 0:
        return ""
    if library.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        return f"no network namespace ({os.strerror(ctypes.get_errno())})"
    with suppress(OSError):  # access to files does not depend on the names of user and group
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return ""
