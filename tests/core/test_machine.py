"""What a run ran on."""

import os
import re
import subprocess
import sys
from pathlib import Path

import cpuinfo
import numpy as np
import pytest

from resnet8ptq.core import machine


@pytest.fixture(autouse=True)
def forget_descriptions():
    machine.describe.cache_clear()
    yield
    machine.describe.cache_clear()


def test_the_setting_decides_the_threads():
    assert machine.threads(3) == 3


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_without_a_setting_every_core_this_process_may_use():
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert machine.threads(None) == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert machine.threads(None) == len(allowed)


def test_without_affinity_every_core(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert machine.threads(None) == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert machine.threads(None) == 1


@pytest.mark.parametrize(
    ("flags", "has"),
    [
        (("avx2", "avx512f"), False),
        ((), False),
        (("avx2", "avx512_vnni"), True),
        (("avx512vnni",), True),
        (("avx_vnni",), True),
    ],
)
def test_vnni_is_read_from_the_flags(monkeypatch, flags, has):
    monkeypatch.setattr(machine, "cpu", lambda: ("some CPU", flags))
    assert machine.has_vnni() is has


X86 = "processor\t: 0\nmodel name\t: Some: CPU\nflags\t\t: sse avx2 sse\n\nmodel name\t: other\n"
ARM = "processor\t: 0\nmodel name\t: ARMv7 Processor rev 4 (v7l)\nFeatures\t: neon half\n"
NAMELESS = "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (X86, ("Some: CPU", ("avx2", "sse"))),
        (ARM, ("ARMv7 Processor rev 4 (v7l)", ("half", "neon"))),
        (NAMELESS, ("py-cpuinfo's", ("neon",))),
        (None, ("py-cpuinfo's", ("neon",))),
    ],
)
def test_the_cpu_is_what_linux_or_else_py_cpuinfo_says(monkeypatch, text, expected):
    def read_text(self: Path) -> str:
        if text is None:
            raise FileNotFoundError
        return text

    result = {"brand_raw": "py-cpuinfo's", "flags": ["neon"]}
    monkeypatch.setattr(cpuinfo, "get_cpu_info", lambda: result)
    monkeypatch.setattr(Path, "read_text", read_text)
    assert machine.cpu.__wrapped__() == expected


def test_linux_and_py_cpuinfo_agree_on_this_cpu():
    name, flags = machine.cpu.__wrapped__()
    cpu = cpuinfo.get_cpu_info()
    assert name == cpu["brand_raw"]
    assert set(flags) <= set(cpu["flags"])  # which adds CPUID's spellings: avx512vnni
    vnni = {"avx512_vnni", "avx512vnni", "avx_vnni"}
    assert set(flags).isdisjoint(vnni) == set(cpu["flags"]).isdisjoint(vnni)


def test_versions_are_those_of_the_installed_packages():
    result = machine.versions()
    assert result["version.python"] == sys.version.split()[0]
    assert result["version.numpy"] == np.__version__
    for package in ("onnx", "onnxruntime", "torch", "onnx2torch", "tf2onnx", "keras"):
        assert re.match(r"\d+\.\d+", result[f"version.{package}"])


def test_a_package_that_is_not_there_has_no_version(monkeypatch):
    monkeypatch.setattr(machine, "PACKAGES", ("numpy", "no-such-package-at-all"))
    monkeypatch.setattr(machine, "find_backends", dict)
    assert set(machine.versions.__wrapped__()) == {"version.python", "version.numpy"}


def test_versions_are_reported_without_importing():
    code = (
        "import sys; from resnet8ptq.core import machine; machine.versions();"
        "print({'torch', 'tensorflow', 'onnx', 'mlflow'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()"


def test_the_description_is_words_for_tags():
    described = machine.describe()
    assert {"platform", "cpu", "cpu_flags", "git_commit", "version.torch"} <= set(described)
    assert all(type(value) is str and "\n" not in value for value in described.values())


def test_the_commit_is_that_of_the_checkout():
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=30
    )
    if done.returncode != 0:
        pytest.skip("no git checkout")
    assert machine._git_commit().removesuffix("-dirty") == done.stdout.strip()


def test_the_commit_of_the_project_is_that_of_the_working_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert machine._find_project_commit() == ""
    identity = ["-c", "user.name=me", "-c", "user.email=me@here"]
    for command in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *command], check=True, timeout=30)
    assert re.fullmatch("[0-9a-f]{40}", machine._find_project_commit())


def test_without_git_the_commit_is_unknown(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine._git_commit() == "unknown"


def measure_peak(size: int) -> int:
    memory = machine.PeakMemory()
    held = np.ones(size, dtype=np.uint8)
    peak = memory.read_bytes()
    if peak is None:
        pytest.skip("the peak cannot be measured here")
    assert held[-1] == 1
    return peak


def test_the_peak_is_that_of_this_run_and_not_of_an_earlier_one():
    size = 200_000_000
    large = measure_peak(size)
    small = measure_peak(1)
    assert large > size
    assert large - small > 0.9 * size


def test_where_the_mark_cannot_be_reset_no_peak_is_reported(monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", refuse)
    assert machine.PeakMemory().read_bytes() is None
