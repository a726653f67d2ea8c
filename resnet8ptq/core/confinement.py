"""Limits that a process sets on itself before it reads an untrusted file."""

import ctypes
import os
import resource
import signal
import struct
from contextlib import suppress
from pathlib import Path

from resnet8ptq.core import memory

MAX_SECONDS = 3600  # CPU time for each core, and wall-clock time
MEMORY = 0.9  # fraction of the memory that is free when the process starts

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_PR_SET_NO_NEW_PRIVS = 38
# from linux/sched.h
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
# Numbers of the system calls to make, extend and obey a rule set; equal on all processors.
_RULES = 444
_ADD_RULE = 445
_OBEY = 446
_VERSION = 1  # from linux/landlock.h
_BENEATH = 1
_WRITE_FILE = 1 << 1
_TRUNCATE = 1 << 14
# The rights to remove, and to make files and folders of each kind.
_CHANGE_FOLDER = sum(1 << bit for bit in range(4, 13))


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends or is killed (Linux).

    If the parent has ended already, end now. On systems without prctl, a process of `isolation`
    ends when it next reads its pipe.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def limit() -> None:
    """Limit the data of this process to 90% of the free memory, and its CPU time to an hour a core.

    If the system does not report its free memory, the limit is 90% of all memory. A small file can
    need huge memory or endless time, for example a constant of 10**12 zeros or an endless loop.
    """
    free = memory.free_bytes(file_cache=True)
    if free is None:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    seconds = MAX_SECONDS * (os.cpu_count() or 1)
    for kind, most in ((resource.RLIMIT_DATA, int(MEMORY * free)), (resource.RLIMIT_CPU, seconds)):
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(kind, (most, most))


def cut_network() -> str:
    """Move this process to a new network namespace, which is connected to no network.

    Returns the reason if this fails, and otherwise an empty text.

    This needs root, or a user namespace, which the kernel makes only for single-threaded processes.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "unshare"):
        return "only Linux has network namespaces"

    # Root may make a network namespace, others only inside of a user namespace
    user = os.getuid()
    group = os.getgid()
    if library.unshare(_CLONE_NEWNET) == 0:
        return ""
    if library.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        return f"no network namespace ({os.strerror(ctypes.get_errno())})"
    with suppress(OSError):  # access to files works without the maps
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return ""


def limits_writes() -> bool:
    """Return whether the kernel can keep a process from writing; see `write_only_to`."""
    return _landlock_version(ctypes.CDLL(None)) > 0


def write_only_to(folder: Path) -> None:
    """Let this thread and its later children open files for writing in one folder only.

    Without Landlock in the kernel (`man 7 landlock`), nothing is limited. Landlock needs no
    privileges. /dev/null stays writable, and so do files that are open already. Reading is not
    limited.

    Raises:
        OSError: the folder cannot be opened, or the kernel has Landlock but refuses the rules.
    """
    library = ctypes.CDLL(None)
    version = _landlock_version(library)
    if version < 1:
        return
    in_files = _WRITE_FILE
    if version >= 3:
        in_files |= _TRUNCATE
    everything = _CHANGE_FOLDER | in_files

    # Forbid all writes except those to the folder; a process cannot loosen such rules again
    attributes = struct.pack("=Q", everything)
    rules = library.syscall(_RULES, attributes, len(attributes), 0)
    for path, allowed in ((folder, everything), (Path(os.devnull), in_files)):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        library.syscall(_ADD_RULE, rules, _BENEATH, struct.pack("=Qi", allowed, descriptor), 0)
        os.close(descriptor)
    library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if library.syscall(_OBEY, rules, 0) != 0:
        raise PermissionError("Landlock's rules have no effect")


def _landlock_version(library: ctypes.CDLL) -> int:
    if not hasattr(library, "prctl"):  # the system is not Linux
        return 0
    return int(library.syscall(_RULES, None, 0, _VERSION))
