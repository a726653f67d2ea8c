"""Compiles a network to an AOTInductor package (.pt2), loads it, and counts its kernels.

The package holds a shared object for the CPU that compiled it; torch checks neither the CPU nor the
input. Loading runs the shared object: load only files that a run of yours has made.
"""

import io
import json
import os
import re
import shutil
import zipfile
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from resnet8ptq.backends.contract import Predictor
from resnet8ptq.backends.kernels import is_x86
from resnet8ptq.backends.torch.program import export
from resnet8ptq.backends.torch.torchscript import Example, infer, known_warnings
from resnet8ptq.core import files, machine
from resnet8ptq.core.errors import QuantizationError, UnsupportedError
from resnet8ptq.core.text import one_line

MODEL_FILE, FORMAT = "model.pt2", "AOTInductor"

_CONFIG = {
    "freezing": True,  # weights are constants, packed for oneDNN's kernels
    "cpp.dynamic_threads": True,  # the number of threads is set at inference, not compiled in
    "cpp.vec_isa_ok": True,  # trust the CPU's flags instead of test programs
    "compile_threads": 1,
    # Inference and its speed need none of these: 1.2 MB of a ResNet8's 1.9.
    **dict.fromkeys(("size_asserts", "scalar_asserts"), False),
    "aot_inductor.enable_line_tables": False,
    "aot_inductor.precompile_headers": False,  # which would stay on disk
}
_KERNELS = "torchao.quantization.pt2e.quantizer.x86_inductor_quantizer"  # registers them
_ABOUT = ".wrapper_metadata.json"
_INTEGER_KERNEL = re.compile(rb"aoti_torch_cpu__q(?:conv|linear)_pointwise\w*\(")
_FLOAT_KERNEL = re.compile(
    rb"aoti_torch_cpu_(?:(?:mkldnn__)?convolution\w*|_linear_pointwise\w*|_mkl_linear"
    rb"|(?:addmm|baddbmm|bmm|mm)_out)\("
)


def check_machine() -> None:
    """Raise `UnsupportedError` without a C++ compiler or an x86 CPU: Inductor needs both."""
    if not is_x86(machine.cpu()[1]):
        raise UnsupportedError("backend.flow=inductor: torchao's integer kernels are those of x86")
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise UnsupportedError(
            f"backend.flow=inductor: needs a C++ compiler, and there is no {compiler}; install "
            "one, or name it in $CXX"
        )


def save(module: Any, example: Example, path: Path, *_: bool) -> None:
    """Compile a network into `path`, all or nothing.

    Raises:
        UnsupportedError: the network has several inputs.
        QuantizationError: AOTInductor failed.
    """
    if len(example.inputs) > 1:
        raise UnsupportedError("backend.flow=inductor: takes networks of one input")
    [sample] = example.inputs
    with torch.no_grad():
        program = export(module, example)
        whole = _compile(program)
    about = {
        "cpu": machine.cpu()[0],
        "cpu_flags": " ".join(machine.cpu()[1]),
        "input_shape": json.dumps(list(sample.shape[1:])),
        "input_dtype": sample.numpy().dtype.name,
    }
    with files.atomic(path) as temporary:
        _copy(whole, temporary, about)


def _compile(program: Any) -> io.BytesIO:
    package, failed = io.BytesIO(), ""
    with known_warnings():
        from torch._inductor import aoti_compile_and_package
        from torch._inductor.utils import fresh_cache

        import_module(_KERNELS)
        with TemporaryDirectory() as scratch, fresh_cache(dir=scratch):
            try:
                aoti_compile_and_package(
                    program, package_path=package, inductor_configs={**_CONFIG}
                )
            except Exception as error:  # torch's own, dozens; the compiler's
                failed = one_line(error)
    if failed:
        raise QuantizationError(f"backend.flow=inductor: AOTInductor failed ({failed})")
    return package


def _copy(whole: io.BytesIO, path: Path, about: dict[str, str]) -> None:
    """Copy a package without the generated code, which names folders of this machine.

    Args:
        about: metadata to add; the numbers of integer and float kernels are added too.
    """
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(path, "w") as new:
        code = b"".join(old.read(name) for name in old.namelist() if name.endswith(".wrapper.cpp"))
        kernels = {"integer_kernels": _INTEGER_KERNEL, "float_kernels": _FLOAT_KERNEL}
        about = about | {name: str(len(calls.findall(code))) for name, calls in kernels.items()}
        for record in old.infolist():
            content = old.read(record)
            if record.filename.endswith((".cpp", ".kernel_metadata.json", "/serialization_id")):
                continue
            if record.filename.endswith(_ABOUT):
                content = json.dumps(json.loads(content) | about).encode()
            new.writestr(record, content)


def _read_about(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as package:
        (name,) = [name for name in package.namelist() if name.endswith(_ABOUT)]
        about: dict[str, str] = json.loads(package.read(name))
        return about


def load(path: Path) -> Predictor:
    """Load a package that `save` wrote, on a CPU with the same features; it gives no logits.

    Raises:
        QuantizationError: this CPU lacks features of the CPU that compiled it.
    """
    about = _read_about(path)
    lacking = sorted({*about["cpu_flags"].split()} - {*machine.cpu()[1]})
    if lacking:
        raise QuantizationError(
            f"{path}: compiled for {about['cpu']}, and this CPU ({machine.cpu()[0]}) lacks "
            f"{', '.join(lacking)} of it; quantize the network here"
        )
    # torch unpacks the shared object and never deletes it; once loaded, it is not read again.
    with TemporaryDirectory() as scratch, patch.dict(os.environ, TMPDIR=scratch), known_warnings():
        package = torch._inductor.aoti_load_package(str(path))
    shape = tuple(json.loads(about["input_shape"]))
    return Predictor(partial(_run, package, shape, about["input_dtype"]), lambda: None)


def _run(
    package: Any, shape: tuple[int, ...], dtype: str, batch: NDArray[Any]
) -> tuple[NDArray[np.float32], ...]:
    """Run a batch, after a check of shape and dtype that the compiled code lacks."""
    if batch.shape[1:] != shape or batch.dtype != dtype:
        raise ValueError(
            f"got {batch.dtype} {batch.shape}, takes {dtype} [n, {', '.join(map(str, shape))}]"
        )
    return infer(package, np.ascontiguousarray(batch))


def count_layers(path: Path) -> tuple[int, int]:
    """Return the numbers of calls of integer and of float kernels in the compiled code."""
    about = _read_about(path)
    return int(about["integer_kernels"]), int(about["float_kernels"])
