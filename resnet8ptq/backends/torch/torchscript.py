"""Saves a network as a TorchScript file, loads it, and counts its layers.

A TorchScript file loads without the code of this package.
"""

import io
import re
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from resnet8ptq.backends.contract import Predict, Predictor
from resnet8ptq.core import files
from resnet8ptq.core.errors import UnsupportedError, errors_as
from resnet8ptq.core.records import names_of
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.torch_module import as_tensors, infer

MODEL_FILE = "model.pt"
FORMAT = "TorchScript"
_STORED = (torch.float16, torch.int8)  # dtypes of weights that are stored in fewer bits
PT2E = "backend.flow=pt2e (backend=torch_pt2e)"


@dataclass(frozen=True)
class Example:
    """The inputs of a network for one sample, for tracing.

    Attributes:
        inputs: a tensor [1, ...] for each input.
        any_length: for each input, whether the first axis after the batch is free.
    """

    inputs: tuple[torch.Tensor, ...]
    any_length: tuple[bool, ...]

    @classmethod
    def of(cls, samples: Split) -> "Example":
        """Return an example of zeros in the samples' shape."""
        zeros = samples.zeros
        names = names_of(zeros.dtype)
        if samples.fields is None or not names:
            return cls(as_tensors(zeros), (False,) * max(1, len(names)))
        free = samples.fields.any_length
        return cls(as_tensors(zeros), tuple(name in free for name in names))


def load(path: Path) -> Predictor:
    """Load a TorchScript file that `save` wrote; torch packs its weights for the current engine.

    Weights that `weight_storage` made smaller become float32 once, on loading.
    """
    module = _load(path)
    if any(values.dtype in _STORED for values in module.state_dict().values()):
        module = _freeze(module)
    return Predictor(partial(infer, module), partial(_open_logits, path))


def _open_logits(path: Path) -> Predict | None:
    """Return a copy that ends before the final softmax.

    Returns None if no softmax computes the only output. Freezing gives one flat graph, which can be
    cut.
    """
    frozen = _load(path)
    if hasattr(frozen, "training"):  # a module that was saved frozen lacks the attribute
        frozen = _freeze(frozen)
    graph = frozen.graph
    last = next(graph.outputs()).node()
    if last.kind() == "aten::dequantize":
        last = next(last.inputs()).node()
    if last.kind() not in ("aten::softmax", "quantized::softmax"):
        return None
    graph.eraseOutput(0)
    graph.registerOutput(next(last.inputs()))
    return partial(infer, frozen)


def _freeze(module: Any) -> Any:
    with known_warnings():
        return torch.jit.freeze(module.eval())


def _load(path: Path) -> Any:
    with known_warnings():
        return torch.jit.load(path, map_location="cpu")


def save(module: Any, example: Example, path: Path, freeze: bool, debug: bool = False) -> None:
    """Trace `module` and write it to `path` atomically.

    Args:
        freeze: whether to write one class with constant weights, instead of one class for each
            layer.
        debug: whether to keep the records of the traced Python code.

    Raises:
        UnsupportedError: torch cannot trace the network, for example because an operator has no
            quantized kernel.
    """
    archive = io.BytesIO()
    why = "TorchScript cannot trace the network"

    # Tracing runs the network, so a missing kernel shows here
    with known_warnings(), torch.inference_mode():
        with errors_as(UnsupportedError, why, f"try {PT2E}"):
            traced = torch.jit.trace(_Network(module).eval(), example.inputs, check_trace=False)
        if freeze:
            traced = torch.jit.freeze(traced, optimize_numerics=False)
        torch.jit.save(traced, archive)
    with files.atomic(path) as temporary:
        if debug:
            temporary.write_bytes(archive.getvalue())
        else:
            copy_reproducibly(archive, temporary)


class _Network(torch.nn.Module):  # type: ignore[misc]
    """Gives every network the same class name in the file; FX makes a new class each time."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return one or several outputs [n, ...] for network inputs [n, ...]."""
        return self.body(*inputs)


def copy_reproducibly(archive: io.BytesIO, path: Path, compressed: tuple[str, ...] = ()) -> None:
    """Copy an archive without the records that differ between processes.

    Debug records hold the Python origin of each operation. They are a quarter of a small quantized
    file, and depend on the call stack and on the installation's path. The serialization id is a
    hash of all records. Class names contain a counter of the process, which is replaced by one that
    starts at 0.

    Args:
        compressed: suffixes of the records to compress.
    """
    with zipfile.ZipFile(archive) as whole, zipfile.ZipFile(path, "w") as slim:
        names = " ".join(whole.namelist()).encode()
        counts = sorted({int(count) for count in _MANGLED.findall(names)})

        def renumber(match: re.Match[bytes]) -> bytes:
            return b"___torch_mangle_%d" % counts.index(int(match[1]))

        def count_from_zero(text: bytes) -> bytes:
            return _MANGLED.sub(renumber, text)

        # Copy in order, with the new names in names and contents
        for record in whole.infolist():
            if record.filename.endswith((".debug_pkl", "/serialization_id")):
                continue
            content = whole.read(record)
            if record.filename.endswith((".py", "data.pkl")):
                content = count_from_zero(content)
            record.filename = count_from_zero(record.filename.encode()).decode()
            if record.filename.endswith(compressed):
                record.compress_type = zipfile.ZIP_DEFLATED
            slim.writestr(record, content)


_MANGLED = re.compile(rb"___torch_mangle_(\d+)")


def count_layers(path: Path) -> tuple[int, int]:
    """Return the numbers of a file's convolutions and matrix products on integers and in float.

    `quantized::matmul` is in float: without ruy, which torch's builds lack, it dequantizes its
    operands and rounds the product (aten/src/ATen/native/quantized/cpu/qmatmul.cpp).
    """
    graph = str(_load(path).inlined_graph)
    names = r"_convolution|conv\dd|conv_transpose\dd|linear|matmul|addmm|bmm|mm"
    integer = re.findall(r"= quantized::(?:conv\dd|conv_transpose\dd|linear)\w*\(", graph)
    in_float = re.findall(rf"= (?:aten::(?:{names})|quantized::matmul)\(", graph)
    return len(integer), len(in_float)


@contextmanager
def known_warnings() -> Iterator[None]:
    """Silence known warnings of the pinned torch and of onnx2torch."""
    with warnings.catch_warnings():
        for message in (
            # Both APIs, and their quantized tensors, are deprecated.
            "torch.ao.quantization is deprecated",
            r"`torch.jit.\w+` is deprecated",
            "torch.quantize_per_tensor, torch.quantize_per_channel",
            "Please use quant_min and quant_max to specify the range",
            # onnx2torch's Reshape reads its shape, and quantized operators their scale, as
            # constants.
            "(Converting a tensor to a (Python|NumPy)|Iterating over a tensor|Using len to get)",
            # onnx2torch's Slice causes this warning.
            "Using a non-tuple sequence for multidimensional indexing is deprecated",
        ):
            warnings.filterwarnings("ignore", message=message)
        yield
