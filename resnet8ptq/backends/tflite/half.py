"""Stores the weights of a float .tflite file in float16.

A DEQUANTIZE operator makes each of them float32 again, once, as LiteRT loads the file. It is the
form of TensorFlow's converter (`supported_types=[tf.float16]`), which only takes its own formats.
"""

import copy
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.schema_py_generated import TensorType

from resnet8ptq.backends.contract import LARGEST_HALF
from resnet8ptq.backends.tflite import contents
from resnet8ptq.core.errors import UnsupportedError

_VERSION = 3  # TensorFlow's number of the operator that takes float16


def store(content: bytes) -> tuple[bytes, int]:
    """Return the file with float16 weights, and the number of layers that have them.

    Weights beyond the range of float16 stay as they are.

    Raises:
        UnsupportedError: no layer has constant float weights.
    """
    model = contents.read(content)
    graph = model.subgraphs[0]
    weights = {id(layer.weights) for layer in contents.layers(model)}
    halved = [
        index
        for index, tensor in enumerate(graph.tensors)
        if id(tensor) in weights and _fits(model, tensor)
    ]
    code = contents.add_code(model, schema.BuiltinOperator.DEQUANTIZE, _VERSION)
    casts = [_halve(model, index, code) for index in halved]
    graph.operators = [*casts, *graph.operators]
    changed = {id(graph.tensors[index]) for index in halved}
    count = sum(id(layer.weights) in changed for layer in contents.layers(model))
    if count == 0:
        raise UnsupportedError(
            "dtype=fp16: the .tflite file has no layer with constant float32 weights"
        )
    return contents.write(model), count


def _fits(model: Any, tensor: Any) -> bool:
    """Return whether a tensor is a float constant within the range of float16."""
    if tensor.type != TensorType.FLOAT32 or not contents.is_constant(model, tensor):
        return False
    return bool(np.abs(contents.read_floats(model, tensor)).max(initial=0) <= LARGEST_HALF)


def _halve(model: Any, index: int, code: int) -> Any:
    """Move a constant into a float16 tensor; return the operator that makes it float32 again."""
    tensors = model.subgraphs[0].tensors
    tensor = tensors[index]
    half = copy.copy(tensor)
    half.type = TensorType.FLOAT16
    half.name = f"{contents.name_of(tensor)}_float16".encode()
    values = contents.read_floats(model, tensor).astype(np.float16)
    # the first buffer is empty
    half.buffer = len(model.buffers)
    tensor.buffer = 0
    model.buffers.append(schema.BufferT(data=values.reshape(-1).view(np.uint8)))
    tensors.append(half)
    return schema.OperatorT(
        opcodeIndex=code,
        inputs=[len(tensors) - 1],
        outputs=[index],
        builtinOptionsType=schema.BuiltinOptions.DequantizeOptions,
        builtinOptions=schema.DequantizeOptionsT(),
    )
