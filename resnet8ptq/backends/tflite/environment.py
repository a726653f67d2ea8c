"""Installs onnx2tf in a virtual environment in the cache, when a network first needs it.

onnx2tf needs Python 3.12 or 3.13, and other versions of packages than this program. The packages
are pinned wheels, so their installation runs none of their code.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from filelock import FileLock

from resnet8ptq.core import confinement, isolation
from resnet8ptq.core.console import waiting
from resnet8ptq.core.errors import QuantizationError, UnsupportedError
from resnet8ptq.core.text import printable

log = logging.getLogger(__name__)

CONVERTER = "onnx2tf 2.6.9"
VERSIONS = ("3.13", "3.12")  # versions of Python for which all packages below have wheels
SIZE = "a download of 160 MB, 660 MB on disk, 20 seconds to 3 minutes"  # measured on Linux

_PACKAGES = (
    CONVERTER.replace(" ", "=="),
    "ai-edge-litert==2.1.2",
    "backports.strenum==1.2.8",
    "flatbuffers==25.12.19",
    "h5py==3.14.0",
    "iniconfig==2.3.1",
    "markdown-it-py==4.3.0",
    "mdurl==0.1.2",
    "ml_dtypes==0.5.4",
    "mpmath==1.3.0",
    "numpy==2.2.6",
    "onnx==1.20.1",
    "onnx-ir==1.1.0",
    "onnxoptimizer==0.4.2",
    "onnxruntime==1.26.0",
    "onnxscript==0.6.2",
    "onnxsim==0.6.5",
    "opencv-python==4.13.0.92",
    "packaging==26.4",
    "pluggy==1.7.0",
    "protobuf==7.35.1",
    "psutil==5.9.5",
    "Pygments==2.21.0",
    "pytest==9.0.2",
    "rich==15.0.0",
    "sne4onnx==2.0.1",
    "sng4onnx==2.0.1",
    "sympy==1.14.0",
    "tqdm==4.67.1",
    "typing_extensions==4.16.0",
)
_CAN_MAKE = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
_NEEDS = "backend=tflite: to convert this network, onnx2tf needs"


def path_of(cache_root: Path) -> Path:
    """Return the environment's folder, which may not exist yet."""
    digest = hashlib.sha256(" ".join(_PACKAGES).encode()).hexdigest()[:20]
    return cache_root / "environments" / digest


def interpreter_of(folder: Path) -> Path:
    """Return the Python interpreter of a virtual environment."""
    if os.name == "posix":
        return folder / "bin/python"
    return folder / "Scripts/python.exe"


def find_interpreter(cache_root: Path) -> Path:
    """Return the environment's interpreter; make the environment if it is missing.

    A new environment is made under a temporary name and renamed, so it is complete or missing.
    Processes that need the environment wait for each other.

    Raises:
        UnsupportedError: there is no suitable Python and no uv, or the packages cannot be
            installed.
        QuantizationError: the installing process ended early, for example because it was killed.
    """
    path = path_of(cache_root)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.parent / f".{path.name}.lock"):
        if not path.exists():
            _make(path)
    return interpreter_of(path)


def _make(path: Path) -> None:
    commands = next(_ways(), None)
    if commands is None:
        raise UnsupportedError(
            f"{_NEEDS} Python {' or '.join(VERSIONS)} with venv, or uv; got neither; try "
            "apt install python3-venv where Python is new enough, or pip install uv"
        )

    # This process holds the lock, so other temporary folders were left by killed processes
    for abandoned in path.parent.glob(f".{path.name}-*"):
        shutil.rmtree(abandoned, ignore_errors=True)

    # Install under a temporary name
    log.info("backend=tflite: installs %s in %s, once: %s", CONVERTER, path, SIZE)
    with tempfile.TemporaryDirectory(
        prefix=f".{path.name}-", dir=path.parent, ignore_cleanup_errors=True
    ) as name:
        folder = Path(name, "environment")
        crashed = QuantizationError(f"{path}: installing the converter was interrupted")
        with waiting(f"Installing {CONVERTER}"):
            isolation.call(_install, commands, folder, crashed=crashed, network=True)
        folder.replace(path)


def _ways() -> Iterator[tuple[Sequence[str], Sequence[str]]]:
    """Yield pairs of commands: one makes an environment, the other installs the packages in it.

    In the commands, `{}` stands for the environment's folder. The folder may be moved afterwards,
    because only the environment's interpreter is called, not its scripts.
    """
    # Any interpreter with venv can do it; uv can also download one
    made = str(interpreter_of(Path("{}")))
    wheels = ("--only-binary", ":all:", "--no-deps", *_PACKAGES)
    for python in _interpreters():
        pip = (made, "-I", "-m", "pip", "install", "-q", "--disable-pip-version-check", *wheels)
        yield (python, "-I", "-m", "venv", "{}"), pip
    uv = shutil.which("uv")
    if uv is not None:
        newest = (uv, "venv", "-q", "--python", VERSIONS[0], "{}")
        yield newest, (uv, "pip", "install", "-q", "--python", made, *wheels)


def _interpreters() -> Iterator[str]:
    """Yield the interpreters of a suitable version with venv: this one, those on PATH, pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    candidates = [sys.executable, *(f"python{version}" for version in VERSIONS)]
    for version in VERSIONS:
        candidates += map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))
    for candidate in candidates:
        python = shutil.which(candidate)  # may be pyenv's shim, which fails for some versions
        if python and run_program([python, "-I", "-c", _CAN_MAKE]).stdout.strip() in VERSIONS:
            yield python


def _install(commands: Sequence[Sequence[str]], folder: Path) -> None:
    """Run a pair of commands of `_ways`; raise `UnsupportedError` if one fails."""
    die = partial(confinement.die_with, os.getpid())
    for command in commands:
        words = [word.replace("{}", str(folder)) for word in command]
        done = run_program(words, before=die)
        if done.returncode:
            raise UnsupportedError(
                f"{_NEEDS} its packages, which cannot be installed ({last_line(done)}); try again "
                "with a network or a mirror of PyPI"
            )


def run_program(
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    before: Callable[[], None] | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Run a program without this process's variables `PYTHON*`; return exit code and output.

    Args:
        env: variables to set in the environment that the program inherits.
        before: function to call in the new process before the program starts, on POSIX systems;
            safe only while this process has one thread.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**kept, **(env or {})},
        check=False,
        preexec_fn=before if os.name == "posix" else None,
    )


def last_line(done: "subprocess.CompletedProcess[str]") -> str:
    """Return a program's error for a message: the last line of its output, or its exit code."""
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return printable(lines[-1])[:300] if lines else f"exit code {done.returncode}"
