"""What a run ran on."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from resnet8ptq import environment


@pytest.fixture(autouse=True)
def forget_descriptions():
    environment.describe.cache_clear()
    yield
    environment.describe.cache_clear()


def test_the_setting_decides_the_threads():
    assert environment.threads(3) == 3


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_without_a_setting_every_core_this_process_may_use():
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert environment.threads(None) == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert environment.threads(None) == len(allowed)


def test_without_affinity_every_core(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert environment.threads(None) == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert environment.threads(None) == 1


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
    monkeypatch.setattr(environment, "cpu", lambda: ("some CPU", flags))
    assert environment.has_vnni() is has


def test_versions_are_those_of_the_installed_packages():
    found = environment.versions()
    assert found["version.python"] == sys.version.split()[0]
    assert found["version.numpy"] == np.__version__
    for package in ("onnx", "onnxruntime", "torch", "onnx2torch", "tf2onnx", "keras"):
        assert re.match(r"\d+\.\d+", found[f"version.{package}"])


def test_a_package_that_is_not_there_has_no_version(monkeypatch):
    monkeypatch.setattr(environment, "PACKAGES", ("numpy", "no-such-package-at-all"))
    assert set(environment.versions.__wrapped__()) == {"version.python", "version.numpy"}


def test_versions_are_told_without_importing():
    code = (
        "import sys; from resnet8ptq import environment; environment.versions();"
        "print({'torch', 'tensorflow', 'onnx', 'mlflow'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()"


def test_the_description_is_words_for_tags():
    described = environment.describe()
    assert {"platform", "cpu", "cpu_flags", "git_commit", "version.torch"} <= set(described)
    assert all(type(value) is str and "\n" not in value for value in described.values())


def test_the_commit_is_that_of_the_checkout():
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=30
    )
    if done.returncode != 0:
        pytest.skip("no git checkout")
    assert environment._git_commit().removesuffix("-dirty") == done.stdout.strip()


def test_without_git_the_commit_is_unknown(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment._git_commit() == "unknown"


def measure_peak(size: int) -> int:
    memory = environment.PeakMemory()
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


def test_where_the_mark_cannot_be_reset_no_peak_is_told(monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", refuse)
    assert environment.PeakMemory().read_bytes() is None
