"""Describes a quantized ExecuTorch program (.pte), and runs it in ExecuTorch's runtime."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

from resnet8ptq.backends.executorch import contents as executorch
from resnet8ptq.backends.executorch.lowering import check_installed
from resnet8ptq.backends.executorch.predictor import LoadedProgram
from resnet8ptq.backends.file.contents import Contents, Layer, Port, RawRun
from resnet8ptq.core import files
from resnet8ptq.core.errors import ModelError, errors_as
from resnet8ptq.core.records import pack as pack_records

_MAX_BYTES = 2**31 - 1
_KNOWN = re.compile(r"XNN\w+|(aten|quantized_decomposed|executorch_prim|dim_order_ops)::.*")
# By torch's code of a scalar type.
_DTYPES = {0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "float16", 6: "float32"}


def fetch(path: Path) -> bytes:
    """Return the file's content.

    Raises:
        UnsupportedError: ExecuTorch is not installed.
        OSError: the file cannot be read, or is too large.
    """
    check_installed()
    return files.read_bytes(path, _MAX_BYTES)


def read(content: bytes, path: Path) -> Contents:
    """Return the description of a program.

    Raises:
        ModelError: the file is damaged, or has operators beyond those of torch, ExecuTorch and
            XNNPACK.
        Exception: the runtime cannot load the program.
    """
    with errors_as(ModelError, f"{path}: not an ExecuTorch program for XNNPACK"):
        operators = executorch.read_operators(content)
    for operator in operators:
        if not _KNOWN.fullmatch(operator.kind):
            raise ModelError(f"{path}: operator {operator.kind!r}; expected torch's and XNNPACK's")

    # The program does not name its inputs and outputs: number them
    meta = LoadedProgram(content, 1).metadata
    inputs = []
    for number in range(meta.num_inputs()):
        inputs.append(_port(f"input_{number}", meta.input_tensor_meta(number)))
    outputs = []
    for number in range(meta.num_outputs()):
        outputs.append(_port(f"output_{number}", meta.output_tensor_meta(number)))
    layers = [_layer(operator) for operator in operators if operator.is_layer]
    counts = Counter(operator.kind for operator in operators)
    return Contents(
        format="ExecuTorch",
        producer="",
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        layers=tuple(layers),
        operators=dict(counts.most_common()),
        dynamic=any(operator.dynamic for operator in operators),
    )


def open_run(content: bytes, threads: int) -> RawRun:
    """Load a program in ExecuTorch's runtime; a batch beyond its planned size runs in parts."""
    network = LoadedProgram(content, threads)

    def run(values: Any) -> Any:
        if len(values) == 1:
            return network(values[0])
        named = {str(index): array for index, array in enumerate(values)}
        return network(pack_records(named))

    return run


def open_logits(content: bytes, threads: int) -> None:
    """Return None, because a program cannot be cut before its softmax."""


def _port(name: str, value: Any) -> Port:
    sizes = tuple(value.sizes())
    dtype = _DTYPES.get(value.dtype(), "unknown")
    return Port(name, sizes[1:], dtype)


def _layer(operator: executorch.Operator) -> Layer:
    return Layer(operator.kind, "", weights=operator.weights, activations=operator.data)
