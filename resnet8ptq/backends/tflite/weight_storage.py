"""Stores the weights of a float .tflite file in float16 or 8 bits.

A DEQUANTIZE operator turns each stored tensor into float32 again, once and not in each inference.
TensorFlow's converter writes the same form for float16 (`supported_types=[tf.float16]`), but it
cannot read a .tflite file.
"""

import copy
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.schema_py_generated import TensorType

from resnet8ptq.backends.contract import LARGEST_HALF
from resnet8ptq.backends.tflite import contents
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.graph.embeddings import round_rows

# The versions of DEQUANTIZE that take float16, or a scale for each channel
_OF_FLOAT16 = 3
_OF_CHANNELS = 5


def store(content: bytes, half: bool) -> tuple[bytes, int]:
    """Return the file with weights of fewer bits, and the number of layers that have them.

    Args:
        half: whether to store float16; a tensor with a value beyond its range then stays in
            float32. Otherwise weights have 8 bits, with a scale for each output channel.

    Raises:
        UnsupportedError: no layer has constant float32 weights that can be stored.
    """
    model = contents.read_model(content)
    graph = model.subgraphs[0]

    # Layers may share their weights, which are stored once
    axes = {id(layer.weights): layer.axis for layer in contents.layers(model)}
    stored = []
    for index, tensor in enumerate(graph.tensors):
        if id(tensor) in axes and _fits(model, tensor, half):
            stored.append(index)

    # The layers' kernels take floats: insert a cast before each layer
    version = _OF_FLOAT16 if half else _OF_CHANNELS
    code = contents.add_code(model, schema.BuiltinOperator.DEQUANTIZE, version)
    casts = []
    for index in stored:
        axis = None if half else axes[id(graph.tensors[index])]
        casts.append(_store(model, index, code, axis))
    graph.operators = [*casts, *graph.operators]

    # Count layers, not tensors
    changed = {id(graph.tensors[index]) for index in stored}
    count = 0
    for layer in contents.layers(model):
        count += id(layer.weights) in changed
    if count == 0:
        asked = "dtype=fp16" if half else "method=weight_only"
        raise UnsupportedError(
            f"{asked}: the .tflite file has no layer with constant float32 weights"
        )
    return contents.write_model(model), count


def _fits(model: Any, tensor: Any, half: bool) -> bool:
    """Return whether a tensor is a float32 constant and, with `half`, within float16's range."""
    if tensor.type != TensorType.FLOAT32 or not contents.is_constant(model, tensor):
        return False
    if not half:
        return True
    largest = np.abs(contents.read_floats(model, tensor)).max(initial=0)
    return bool(largest <= LARGEST_HALF)


def _store(model: Any, index: int, code: int, axis: int | None) -> Any:
    """Move a constant into a smaller tensor; return the operator that makes it float32 again.

    Args:
        index: the constant's index among the graph's tensors.
        code: the index of the operator's code in the file.
        axis: the axis of the 8-bit scales; None stores float16.
    """
    tensors = model.subgraphs[0].tensors
    tensor = tensors[index]
    small = copy.copy(tensor)
    values = contents.read_floats(model, tensor)
    if axis is None:
        small.type = TensorType.FLOAT16
        small.name = f"{contents.name_of(tensor)}_float16".encode()
        numbers: Any = values.astype(np.float16)
    else:
        small.type = TensorType.INT8
        small.name = f"{contents.name_of(tensor)}_int8".encode()
        others = set(range(values.ndim)) - {axis}  # a channel's weights share a scale
        numbers, scale = round_rows(values, tuple(sorted(others)))
        small.quantization = schema.QuantizationParametersT(
            scale=scale.reshape(-1),
            zeroPoint=np.zeros(scale.size, np.int64),
            quantizedDimension=axis,
        )

    # The first buffer is empty: the float tensor becomes the cast's output
    small.buffer = len(model.buffers)
    tensor.buffer = 0
    model.buffers.append(schema.BufferT(data=numbers.reshape(-1).view(np.uint8)))
    tensors.append(small)
    return schema.OperatorT(
        opcodeIndex=code,
        inputs=[len(tensors) - 1],
        outputs=[index],
        builtinOptionsType=schema.BuiltinOptions.DequantizeOptions,
        builtinOptions=schema.DequantizeOptionsT(),
    )
