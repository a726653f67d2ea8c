"""What a run ran on: versions, CPU, threads, memory, commit."""

import os
import platform
import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    *("resnet8ptq", "numpy", "onnx", "onnxruntime", "tf2onnx", "tensorflow-cpu", "tensorflow"),
    *("keras", "torch", "torchao", "onnx2torch", "onnxscript", "ai-edge-litert"),
)
# Before torch is imported: its threads wait for each other in a loop, long by default. While
# something else runs, learned rounding takes nearly twice the time for it.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
VNNI = frozenset({"avx512_vnni", "avx512vnni", "avx_vnni"})  # flags, as Linux and py-cpuinfo spell


@dataclass(frozen=True)
class Runtime:
    """What a run may use of this machine.

    Attributes:
        cache_root: folder of the work that is kept; see `cache`.
        threads: for the frameworks.
        threads_fixed: as set; else an evaluation takes fewer where those are faster.
    """

    cache_root: Path
    threads: int
    threads_fixed: bool = True


def threads(setting: int | None) -> int:
    """Return the number of threads to use: `setting`, or every core this process may use."""
    if setting is not None:
        return setting
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def cpu() -> tuple[str, tuple[str, ...]]:
    """Return the CPU's name and its feature flags, sorted.

    Linux lists both (`man 5 proc`, /proc/cpuinfo), on most ARM machines without a name. Elsewhere
    py-cpuinfo finds them out, which takes a second: it runs programs.
    """
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        fields = dict(re.findall(r"^(.*?)\s*: *(.*)$", first, re.MULTILINE))
        name, flags = fields.get("model name"), fields.get("flags") or fields.get("Features")
        if name and flags:
            return name, tuple(sorted(set(flags.split())))
    import cpuinfo

    info = cpuinfo.get_cpu_info()
    return info.get("brand_raw", platform.processor()), tuple(sorted(info.get("flags", ())))


def has_vnni() -> bool:
    """Tell whether the CPU multiplies and sums 8-bit integers in one instruction, exactly."""
    return not VNNI.isdisjoint(cpu()[1])


@cache
def versions() -> dict[str, str]:
    """Return `{"version.<package>": version}` of what shapes a result, without importing it."""
    installed = {"version.python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[f"version.{package}"] = version(package)
    return installed


@cache
def describe() -> dict[str, str]:
    """Return versions, CPU and commit, as tags for a run."""
    name, flags = cpu()
    return {
        **versions(),
        "platform": platform.platform(),
        "cpu": name,
        "cpu_flags": " ".join(flags),
        "git_commit": _git_commit(),
    }


def _git_commit() -> str:
    """Return the checkout's commit, `-dirty` behind it where files differ; or `unknown`."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    here = Path(__file__).parents[2]
    if not (here / ".git").exists():  # installed, maybe below the repository of another project
        return "unknown"
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(
            command, cwd=here, stderr=subprocess.DEVNULL, text=True, timeout=10
        ).strip()
    return "unknown"


class PeakMemory:
    """Peak resident memory of this process since the object was made, where Linux can tell.

    The kernel keeps one high-water mark per process, and lets it be reset
    (`man 5 proc`, /proc/pid/clear_refs): without that, a run would report an earlier run's peak.
    """

    def __init__(self) -> None:
        self._resets = False
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
            self._resets = True

    def read_bytes(self) -> int | None:
        """Return the peak in bytes; None where it cannot be measured."""
        if not self._resets:
            return None
        found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
        return None if found is None else int(found[1]) * 1024
