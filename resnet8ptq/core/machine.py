"""Describes the machine of a run: versions, CPU, threads, peak memory and commits."""

import os
import platform
import re
import subprocess
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

from resnet8ptq.core.deadline import Deadline
from resnet8ptq.core.descriptor import find_backends

# Packages that read, correct and calibrate networks; each backend lists further packages.
PACKAGES = (
    "resnet8ptq",
    "numpy",
    "onnx",
    "onnxruntime",
    "tf2onnx",
    "tensorflow-cpu",
    "tensorflow",
    "keras",
    "torch",
    "onnx2torch",
    "onnxscript",
    "ai-edge-litert",
)
VNNI = frozenset({"avx512_vnni", "avx512vnni", "avx_vnni"})  # flags of Linux and py-cpuinfo


@dataclass(frozen=True)
class Runtime:
    """The cache, the threads, the time and the device that a run uses.

    Attributes:
        cache_root: see `cache.folder`.
        threads_fixed: whether the user set `threads`; otherwise an evaluation may use half of them
            if that is faster.
        deadline: the time limit of searches and learning, see `core.deadline`.
        device: the setting `device`, see `simulation.device`.
    """

    cache_root: Path
    threads: int
    threads_fixed: bool = True
    deadline: Deadline = field(default_factory=Deadline, compare=False)
    device: str = "auto"


def threads(setting: int | None) -> int:
    """Return the number of threads: `setting`, or one for each core that this process may use."""
    if setting is not None:
        return setting
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def cpu() -> tuple[str, tuple[str, ...]]:
    """Return the CPU's name, and its sorted feature flags.

    On Linux, both are in /proc/cpuinfo (`man 5 proc`), except for the name on most ARM machines. If
    one is missing, py-cpuinfo runs programs to find them, which takes a second.
    """
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        fields = dict(re.findall(r"^(.*?)\s*: *(.*)$", first, re.MULTILINE))
        name = fields.get("model name")
        flags = fields.get("flags") or fields.get("Features")
        if name and flags:
            return name, tuple(sorted(set(flags.split())))
    import cpuinfo

    info = cpuinfo.get_cpu_info()
    return info.get("brand_raw", platform.processor()), tuple(sorted(info.get("flags", ())))


def has_vnni() -> bool:
    """Return whether this is an x86 CPU with VNNI, which sums 8-bit products exactly."""
    return not VNNI.isdisjoint(cpu()[1])


def is_x86(flags: Collection[str]) -> bool:
    """Return whether the flags are those of an x86 CPU with SSE2; all 64-bit x86 CPUs have it."""
    return "sse2" in flags


def sums_exactly(flags: Collection[str] | None = None) -> bool:
    """Return whether a CPU with these flags, by default this one, sums 8-bit products exactly.

    x86 without VNNI sums two products in 16 bits, and such a sum may saturate.
    """
    if flags is None:
        _, flags = cpu()
    return not is_x86(flags) or not VNNI.isdisjoint(flags)


@cache
def versions() -> dict[str, str]:
    """Return `{"version.<package>": version}` of Python and of the packages that affect results.

    The versions are read from metadata, without importing the packages.
    """
    installed = {"version.python": platform.python_version()}
    packages = [*PACKAGES]
    for backend in find_backends().values():
        packages += backend.packages
    for package in dict.fromkeys(packages):
        with suppress(PackageNotFoundError):
            installed[f"version.{package}"] = find_version(package)
    return installed


def find_version(package: str) -> str:
    """Return the installed version of a package.

    Raises:
        PackageNotFoundError: the package is not installed.
    """
    return _find_installed(package)[1]


def pin(package: str) -> str:
    """Return the requirement of a package in its installed version, such as `numpy==2.3.1`.

    The build name of torch, such as `+cpu`, is left out, because registries list only the number.

    Raises:
        PackageNotFoundError: the package is not installed.
    """
    name, number = _find_installed(package)
    return f"{name}=={number.partition('+')[0]}"


def _find_installed(package: str) -> tuple[str, str]:
    """Return the name on PyPI and the version of an installed package.

    ONNX Runtime has a name for each kind of hardware, such as onnxruntime-gpu.

    Raises:
        PackageNotFoundError: the package is not installed.
    """
    try:
        return package, version(package)
    except PackageNotFoundError:
        if package != "onnxruntime":
            raise
        others = packages_distributions().get(package, [])
        if not others:
            raise
        return others[0], version(others[0])


@cache
def describe() -> dict[str, str]:
    """Return versions, platform, CPU and commits, as tags for a run."""
    name, flags = cpu()
    described = {
        **versions(),
        "platform": platform.platform(),
        "cpu": name,
        "cpu_flags": " ".join(flags),
        "git_commit": _git_commit(),
    }
    commit = _find_project_commit()
    if commit:
        described["project_commit"] = commit
    return described


def _find_project_commit() -> str:
    """Return the commit of the repository of the working folder; empty if git finds none.

    Changed files are not checked, because git would then run programs that the repository
    configures.
    """
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "rev-parse", "--verify", "HEAD"]
        return subprocess.check_output(
            command, stderr=subprocess.DEVNULL, text=True, timeout=10
        ).strip()
    return ""


def _git_commit() -> str:
    """Return the commit of this program's checkout, with `-dirty` if tracked files differ.

    Without a checkout or git, it is `unknown`.
    """
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    here = Path(__file__).parents[2]
    if not (here / ".git").exists():  # the package is installed, perhaps inside another repository
        return "unknown"
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(
            command, cwd=here, stderr=subprocess.DEVNULL, text=True, timeout=10
        ).strip()
    return "unknown"


class PeakMemory:
    """Peak resident memory of this process since the last such object was made (Linux).

    The kernel keeps one peak per process. The constructor resets it (`man 5 proc`,
    /proc/pid/clear_refs), so that a run does not report the peak of an earlier run.
    """

    def __init__(self) -> None:
        self._resets = False
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
            self._resets = True

    def read_bytes(self) -> int | None:
        """Return the peak memory in bytes; None if it cannot be measured."""
        if not self._resets:
            return None
        peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
        return None if peak is None else int(peak[1]) * 1024
