"""Reads a .tflite file as an object, returns and changes its parts, and writes it.

Operators and tensors are those of the file's first graph.
"""

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.schema_py_generated import TensorType
from ai_edge_litert.tools import flatbuffer_utils as flatbuffer
from numpy.typing import NDArray

LAYERS = ("CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV", "FULLY_CONNECTED")

# The positions of data, weights and bias among a layer's inputs; the first of TRANSPOSE_CONV is the
# shape of the output
_POSITIONS = {"TRANSPOSE_CONV": (2, 1, 3)}
_USUAL_POSITIONS = (0, 1, 2)

ACTIVATIONS: dict[int, type[np.int8] | type[np.int16]] = {
    TensorType.INT8: np.int8,
    TensorType.INT16: np.int16,
}

# TensorFlow's version numbers of the operators
_INT8_MEAN = 2
_INT8_TRANSPOSE = 2
_ALIGNMENT = 16  # bytes to which TFLite's schema aligns a buffer's data
_INTEGERS = {
    TensorType.INT8: np.int8,
    TensorType.UINT8: np.uint8,
    TensorType.INT32: np.int32,
    TensorType.INT64: np.int64,
}


@dataclass(frozen=True)
class TfliteLayer:
    """A convolution or dense layer: its operator, and its tensors.

    Attributes:
        code: the operator's name, one of `LAYERS`.
        bias: the tensor of the bias; None if the layer has no bias.
    """

    operator: Any
    code: str
    input: Any
    weights: Any
    bias: Any
    output: Any

    @property
    def axis(self) -> int:
        """The axis of the weights that counts output channels."""
        return 3 if self.code == "DEPTHWISE_CONV_2D" else 0

    @property
    def name(self) -> str:
        """The name of the layer's output tensor."""
        return name_of(self.output)


def read_model(content: bytes) -> Any:
    """Return a file's content as a `ModelT`, with the data of all buffers.

    ai-edge-quantizer may write the data of large buffers after the graph; the buffer in the graph
    then holds only offset and size.
    """
    model = flatbuffer.convert_bytearray_to_object(content)
    for buffer in model.buffers:
        if buffer.data is None and buffer.size:
            end = buffer.offset + buffer.size
            buffer.data = np.frombuffer(content[buffer.offset : end], np.uint8)
            buffer.offset = buffer.size = 0
    return model


def write_model(model: Any, share: bool = False) -> bytes:
    """Return the file's content, without unused buffers.

    Args:
        model: the file as an object; its buffers are numbered anew, in place.
        share: whether buffers with equal data are merged, and equal arrays written once.
    """
    _drop_unused_buffers(model, share)
    builder = _Builder(share)
    builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
    return bytes(builder.Output())


def operators(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the object of each operator, in order of execution."""
    for operator in model.subgraphs[0].operators:
        yield flatbuffer.opcode_to_name(model, operator.opcodeIndex) or "", operator


def layers(model: Any) -> Iterator[TfliteLayer]:
    """Yield each operator in `LAYERS`, in order of execution."""
    tensors = model.subgraphs[0].tensors
    for code, operator in operators(model):
        if code not in LAYERS:
            continue
        indices = [*operator.inputs, -1]  # -1 stands for no bias
        data, weights, bias = _POSITIONS.get(code, _USUAL_POSITIONS)
        yield TfliteLayer(
            operator,
            code,
            input=_tensor_at(tensors, indices[data]),
            weights=_tensor_at(tensors, indices[weights]),
            bias=_tensor_at(tensors, indices[bias]),
            output=tensors[operator.outputs[0]],
        )


def _tensor_at(tensors: Any, index: int) -> Any:
    """Return a tensor by its index; None for a negative index, that of an omitted input."""
    return None if index < 0 else tensors[index]


def is_integer(model: Any, operator: Any) -> bool:
    """Return whether an operator's first output is an int8 or int16 tensor."""
    return model.subgraphs[0].tensors[operator.outputs[0]].type in ACTIVATIONS


def count_integer(model: Any) -> str:
    """Return the number of integer operators and of all operators as text, such as `20 of 31`.

    QUANTIZE and DEQUANTIZE are not counted.
    """
    integer = 0
    whole = 0
    for code, operator in operators(model):
        if code not in ("QUANTIZE", "DEQUANTIZE"):
            whole += 1
            integer += is_integer(model, operator)
    return f"{integer} of {whole}"


def name_of(tensor: Any) -> str:
    """Return a tensor's name; empty if it has none."""
    return (tensor.name or b"").decode()


def is_constant(model: Any, tensor: Any) -> bool:
    """Return whether the file holds a tensor's values."""
    return model.buffers[tensor.buffer].data is not None


def read_levels(model: Any, tensor: Any) -> NDArray[np.int64]:
    """Return the integers of a constant, in its shape."""
    data = np.asarray(model.buffers[tensor.buffer].data, np.uint8)
    count = np.prod(tensor.shape)  # the last byte may hold fewer integers

    # Flipping the sign bit and subtracting its value extends the sign
    if tensor.type == TensorType.INT2:  # a byte holds four, the lowest first
        quarters = np.stack([data >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
        levels = (quarters.reshape(-1)[:count] ^ 2).astype(np.int64) - 2
    elif tensor.type == TensorType.INT4:  # a byte holds two, the low half first
        halves = np.stack([data & 15, data >> 4], axis=1)
        levels = (halves.reshape(-1)[:count] ^ 8).astype(np.int64) - 8
    else:
        levels = data.view(_INTEGERS[tensor.type]).astype(np.int64)
    return levels.reshape(tensor.shape)


def read_values(model: Any, tensor: Any) -> NDArray[np.float64]:
    """Return the values of a quantized constant, in its shape; its zero points must be 0."""
    return read_levels(model, tensor) * scales(tensor)


def read_floats(model: Any, tensor: Any) -> NDArray[np.float32]:
    """Return the values of a float32 constant, in its shape."""
    data = np.asarray(model.buffers[tensor.buffer].data, np.uint8)
    return np.array(data.view(np.float32).reshape(tensor.shape))


def write_floats(model: Any, tensor: Any, values: NDArray[np.float32]) -> None:
    """Replace the values of a float32 constant."""
    data = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8)
    tensor.buffer = len(model.buffers)  # other tensors may use the old one
    model.buffers.append(schema.BufferT(data=data))


def scales(tensor: Any) -> NDArray[np.float64]:
    """Return a tensor's scales, shaped to broadcast over its values."""
    shape = [1] * len(tensor.shape)
    if len(tensor.quantization.scale) > 1:
        shape[tensor.quantization.quantizedDimension] = -1
    return np.asarray(tensor.quantization.scale, np.float64).reshape(shape)


def write_levels(
    model: Any, tensor: Any, levels: NDArray[np.int64], scale: NDArray[np.float32]
) -> None:
    """Replace a constant's integers and scales [1 or channels]; the zero points become 0.

    Type and shape of the tensor stay.
    """
    flat = levels.reshape(-1)
    if tensor.type == TensorType.INT4:  # a byte holds two, the low half first
        padded = np.append(flat, [0] * (len(flat) % 2)).astype(np.uint8) & 15
        data = padded[::2] | padded[1::2] << 4
    else:
        data = flat.astype(_INTEGERS[tensor.type]).view(np.uint8)
    tensor.buffer = len(model.buffers)  # other tensors may use the old one
    model.buffers.append(schema.BufferT(data=data))
    tensor.quantization.scale = scale.astype(np.float32)
    tensor.quantization.zeroPoint = np.zeros(len(scale), np.int64)


def to_mean(model: Any, operator: Any) -> None:
    """Turn an operator on maps [N, H, W, C] into the mean of each channel, [N, 1, 1, C]."""
    operator.opcodeIndex = add_code(model, schema.BuiltinOperator.MEAN, _INT8_MEAN)
    operator.inputs = [operator.inputs[0], _add_integers(model, "axes", [1, 2])]
    operator.builtinOptionsType = schema.BuiltinOptions.ReducerOptions
    operator.builtinOptions = schema.ReducerOptionsT(keepDims=True)


def transpose_output(model: Any, number: int, axes: Sequence[int]) -> None:
    """Insert a transposition after an output of a float file, in place.

    Args:
        number: the position of the output among the graph's outputs.
        axes: the permutation, as numpy's `transpose` takes it.
    """
    graph = model.subgraphs[0]
    old = int(graph.outputs[number])
    tensor = copy.copy(graph.tensors[old])
    tensor.shape = [int(tensor.shape[axis]) for axis in axes]
    tensor.shapeSignature = None
    tensor.buffer = 0

    # The new tensor becomes the output, so it takes the old one's name
    graph.tensors[old].name = name_of(tensor).encode() + b"_before"
    graph.tensors.append(tensor)
    new = len(graph.tensors) - 1
    operator = schema.OperatorT(
        opcodeIndex=add_code(model, schema.BuiltinOperator.TRANSPOSE, _INT8_TRANSPOSE),
        inputs=[old, _add_integers(model, f"axes_{number}", axes)],
        outputs=[new],
        builtinOptionsType=schema.BuiltinOptions.TransposeOptions,
        builtinOptions=schema.TransposeOptionsT(),
    )
    graph.operators.append(operator)

    # Outputs and signatures name tensors by their index
    outputs = []
    for index in map(int, graph.outputs):
        outputs.append(new if index == old else index)
    graph.outputs = outputs
    for signature in model.signatureDefs or ():
        for output in signature.outputs:
            if output.tensorIndex == old:
                output.tensorIndex = new


def add_code(model: Any, builtin: int, version: int) -> int:
    """Add the code of an operator type to the file; return its index."""
    code = schema.OperatorCodeT(builtin, builtinCode=builtin, version=version)
    model.operatorCodes.append(code)
    return len(model.operatorCodes) - 1


def _add_integers(model: Any, name: str, values: Sequence[int]) -> int:
    data = np.array(values, np.int32)
    model.buffers.append(schema.BufferT(data=data.view(np.uint8)))
    tensor = schema.TensorT(shape=[len(data)], type=TensorType.INT32, buffer=len(model.buffers) - 1)
    tensor.name = name.encode()
    model.subgraphs[0].tensors.append(tensor)
    return len(model.subgraphs[0].tensors) - 1


class _Builder(flatbuffers.Builder):  # type: ignore[misc]  # without types
    """A builder that aligns the data of buffers, and optionally writes equal arrays once."""

    def __init__(self, share: bool) -> None:
        super().__init__(1024)
        self._share = share
        self._written = dict[tuple[str, bytes], int]()

    def CreateNumpyVector(self, x: NDArray[Any]) -> int:  # noqa: N802
        key = (x.dtype.str, x.tobytes())
        if not self._share or key not in self._written:
            if x.dtype == np.uint8:
                self.Prep(_ALIGNMENT, x.size)
            self._written[key] = int(super().CreateNumpyVector(x))
        return self._written[key]


def _drop_unused_buffers(model: Any, merge: bool) -> None:
    """Drop buffers that nothing uses or that are empty, and renumber the rest.

    The first buffer is empty, as TFLite requires.

    Args:
        merge: whether buffers with equal data become one.
    """
    kept = [schema.BufferT()]
    numbers: dict[object, int] = {}
    tensors = itertools.chain.from_iterable(graph.tensors for graph in model.subgraphs)

    # Tensors and metadata refer to buffers by number
    for holder in itertools.chain(tensors, model.metadata or []):
        data = model.buffers[holder.buffer].data
        if data is None:
            holder.buffer = 0
            continue
        key: object = holder.buffer
        if merge:
            key = bytes(data)
        if key not in numbers:
            numbers[key] = len(kept)
            kept.append(model.buffers[holder.buffer])
        holder.buffer = numbers[key]
    model.buffers = kept
