"""Writes a TFLite file as C for TensorFlow Lite for Microcontrollers, with one test vector.

model.h, model.cc       the file's bytes, aligned as the interpreter requires
resolver.h              the operators that the model needs, registered
test_vector.h           one input and its outputs, in the model's dtypes
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert.schema_py_generated import TensorType
from ai_edge_litert.tools import flatbuffer_utils as flatbuffer
from numpy.typing import NDArray

from resnet8ptq.backends.tflite.predictor import open_interpreter, to_input
from resnet8ptq.core import templates
from resnet8ptq.core.errors import UnsupportedError

FOLDER = "microcontroller"
ALIGNMENT = 16  # bytes to which the model's array and every tensor in the arena are aligned
_SPELLED = {
    "BATCH_MATMUL": "BatchMatMul",
    "CUMSUM": "CumSum",
    "PADV2": "PadV2",
    "UNIDIRECTIONAL_SEQUENCE_LSTM": "UnidirectionalSequenceLSTM",
}
_BYTES = {
    **dict.fromkeys((TensorType.INT8, TensorType.UINT8, TensorType.BOOL), 1),
    **dict.fromkeys((TensorType.INT16, TensorType.FLOAT16), 2),
    **dict.fromkeys((TensorType.INT32, TensorType.FLOAT32), 4),
    TensorType.INT64: 8,
}
_KINDS = {
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "int32": "int",
    "int64": "long long",
    "float32": "float",
    "bool": "bool",
}


def write_sources(
    path: Path, folder: Path, inputs: NDArray[np.float32]
) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Write the C files of a .tflite file into the new `folder`, with the first input and outputs.

    Args:
        inputs: network inputs [n, ...].

    Returns:
        Figures for the card by name, and all inputs and outputs in the file's dtypes by name.

    Raises:
        UnsupportedError: the file has several inputs, or a custom operator.
    """
    content = path.read_bytes()
    model = flatbuffer.convert_bytearray_to_object(content)
    operators = list_operators(model)

    # Run all inputs; only the first becomes the C test vector
    runs = [run_sample(content, inputs[n : n + 1]) for n in range(len(inputs))]
    samples, returned = zip(*runs, strict=True)
    raw = {"raw_inputs": np.concatenate(samples)}
    arrays = {"kTestInput": _array(samples[0])}
    for number, parts in enumerate(zip(*returned, strict=True)):
        raw[f"raw_output_{number}"] = np.concatenate(parts)
        arrays[f"kTestOutput{number}"] = _array(parts[0])
    values = {
        "alignment": ALIGNMENT,
        "length": len(content),
        "bytes": _numbers(content),
        "operators": operators,
        "arrays": arrays,
    }
    folder.mkdir()
    for name in ("model.h", "model.cc", "resolver.h", "test_vector.h"):
        text = templates.load("resnet8ptq.deploy", f"{name}.j2").render(values)
        (folder / name).write_text(text)
    arena = f"{least_arena(model):,}"
    size = f"{len(content):,}"
    return {"operators": ", ".join(operators), "arena": arena, "model": size}, raw


def list_operators(model: Any) -> list[str]:
    """Return the calls of MicroMutableOpResolver that register a model's operators.

    Raises:
        UnsupportedError: an operator is custom.
    """
    names = set()
    for graph in model.subgraphs:
        for operator in graph.operators:
            names.add(flatbuffer.opcode_to_name(model, operator.opcodeIndex))
    if "CUSTOM" in names:
        raise UnsupportedError("the .tflite file has a custom operator: no resolver registers it")
    calls = []
    for name in names:
        calls.append("Add" + (_SPELLED.get(name) or _spell(name)))
    return sorted(calls)


def _spell(name: str) -> str:
    """Return an operator's name as in most names of C++ methods; `_SPELLED` has the others.

    >>> _spell("CONV_2D"), _spell("FULLY_CONNECTED")
    ('Conv2D', 'FullyConnected')
    """
    words = []
    for part in name.split("_"):
        is_rank = re.fullmatch(r"\d+D", part)
        words.append(part if is_rank else part.capitalize())
    return "".join(words)


def least_arena(model: Any) -> int:
    """Return a lower bound of the tensor arena in bytes, from the tensors' lifetimes.

    While an operator runs, the arena holds its inputs, its outputs, and the tensors that later
    operators or the caller read. Constants lie outside of it. The interpreter's structures and the
    kernels' scratch buffers need further memory, and the planner may not reach the bound.
    """
    graph = model.subgraphs[0]
    first = dict.fromkeys(map(int, graph.inputs), 0)
    last = dict.fromkeys(map(int, graph.outputs), len(graph.operators))
    for step, operator in enumerate(graph.operators):
        for index in map(int, operator.outputs):
            first.setdefault(index, step)
            last.setdefault(index, step)
        for index in map(int, operator.inputs):
            last[index] = max(step, last.get(index, 0))

    # Find the step that holds the most bytes
    held = [0] * len(graph.operators)
    for index in first:
        size = _size(graph.tensors[index])
        for step in range(first[index], min(last.get(index, -1) + 1, len(held))):
            held[step] += size
    return max(held)


def _size(tensor: Any) -> int:
    size = _BYTES.get(tensor.type, 4) * int(np.prod(np.abs(tensor.shape)))
    return -(-size // ALIGNMENT) * ALIGNMENT


def run_sample(
    content: bytes, sample: NDArray[np.float32]
) -> tuple[NDArray[Any], list[NDArray[Any]]]:
    """Run the file on an input [1, ...]; return the input and the outputs in the file's dtypes.

    Raises:
        UnsupportedError: the file has several inputs.
    """
    interpreter = open_interpreter(content, 1)
    details = interpreter.get_input_details()
    if len(details) != 1:
        raise UnsupportedError("the .tflite file has several inputs; expected one")
    value = to_input(sample, details[0])
    interpreter.set_tensor(details[0]["index"], value)
    interpreter.invoke()
    outputs = interpreter.get_output_details()
    returned = []
    for output in outputs:
        values = interpreter.get_tensor(output["index"])
        returned.append(np.array(values))  # a copy, which outlives the interpreter
    return value, returned


def _array(values: NDArray[Any]) -> tuple[str, int, str]:
    """Return an array's type in C, its length, and its numbers."""
    flat = values.reshape(-1)
    kind = _KINDS[values.dtype.name]
    numbers = flat.tolist()
    if kind == "float":
        numbers = [f"{value:.9g}" for value in numbers]
    elif kind == "bool":
        numbers = [int(value) for value in numbers]
    return kind, flat.size, _numbers(numbers)


def _numbers(values: Iterable[object]) -> str:
    """Return numbers in C, 16 on a line."""
    numbers = list(map(str, values))
    lines = []
    for start in range(0, len(numbers), 16):
        lines.append("    " + ", ".join(numbers[start : start + 16]))
    return ",\n".join(lines)
