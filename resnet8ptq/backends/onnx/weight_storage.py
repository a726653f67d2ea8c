"""Weights stored in 8 bits with a scale for each output channel, or in float16.

In place of a float tensor, the file holds int8 levels with a Cast and a Mul, or float16 values with
a Cast. ONNX Runtime computes these nodes once, as it loads the file. The network then has FP32's
speed, and the weights take a quarter or half of the bytes. ONNX Runtime would compute a
DequantizeLinear for every batch.
"""

import logging
from collections import Counter
from collections.abc import Collection, Iterator

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from resnet8ptq.backends.contract import LARGEST_HALF
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.graph.embeddings import round_rows
from resnet8ptq.graph.layers import LAYERS, RECURRENT, STORED, attribute
from resnet8ptq.graph.links import Links
from resnet8ptq.graph.passes import remove_unused, rewrite

log = logging.getLogger(__name__)

OPERATORS = (*LAYERS, *RECURRENT, *STORED)
LEVELS = "__levels"  # the suffix of a tensor of levels
_RECURRENT = ("GRU", "LSTM", "RNN")
_EMBEDDING = "Gather"


def check_storable(graph: onnx.GraphProto, skipped: Collection[str], half: bool = False) -> None:
    """Raise `UnsupportedError` if `find_weights` yields no weights."""
    if any(find_weights(graph, skipped, half)):
        return
    why = "no layer has constant float weights that {} bits would make smaller"
    if half:
        raise UnsupportedError(f"dtype=fp16: {why.format(16)}")
    raise UnsupportedError(f"method=weight_only: {why.format(8)}")


def find_weights(
    graph: onnx.GraphProto, skipped: Collection[str], half: bool = False
) -> Iterator[tuple[onnx.NodeProto, int, tuple[int, ...]]]:
    """Yield the layers with constant float32 weights to store, once for each weight input.

    With each layer come the index of the input, and the axes along which weights share a scale.
    Weights that `_shrinks` refuses are left out, and with `half` also weights beyond float16's
    range.

    Args:
        skipped: names of nodes that stay in float.
        half: whether weights become float16, including embedding tables; for tables in 8 bits see
            `rewriting.quantize_tables`.
    """
    constants = Links(graph).constants
    operators: tuple[str, ...] = OPERATORS
    if half:
        operators = (*OPERATORS, _EMBEDDING)
    for node in graph.node:
        if node.op_type not in operators or node.name in skipped:
            continue
        # Recurrent layers have weights at the inputs 1 and 2, a MatMul may have them on either side
        for index, name in enumerate(node.input[:3]):
            tensor = constants.get(name)
            if tensor is None or tensor.data_type != TensorProto.FLOAT:
                continue
            axes = _shared_axes(node, index, len(tensor.dims))
            if half and _exceeds_half(tensor):
                continue
            if axes and _shrinks(tensor, axes):
                yield node, index, axes


def _shared_axes(node: onnx.NodeProto, index: int, rank: int) -> tuple[int, ...]:
    """Return the axes along which weights share a scale; empty if none do.

    In a grouped ConvTranspose, the weights of an input channel share a scale.
    """
    if node.op_type in _RECURRENT:  # W and R [directions, gates, inputs]
        return (2,) if index in (1, 2) and rank == 3 else ()
    if node.op_type == _EMBEDDING:  # [words, values]
        return tuple(range(1, rank)) if index == 0 else ()
    if node.op_type == "MatMul" and index == 0 and rank > 1:  # [..., outputs, inputs]
        return (rank - 1,)
    if index != 1 or rank < 2:
        return ()

    # Weights on the right: an output channel is a column, a row, or a filter
    if node.op_type == "MatMul":  # [..., inputs, outputs]
        return (rank - 2,)
    if node.op_type == "Gemm":
        return (1,) if attribute(node, "transB", 0) else (0,)
    if node.op_type == "ConvTranspose" and attribute(node, "group", 1) == 1:
        return (0, *range(2, rank))
    return tuple(range(1, rank))


def _exceeds_half(tensor: onnx.TensorProto) -> bool:
    """Return whether a value of a tensor is beyond the range of float16."""
    magnitudes = np.abs(numpy_helper.to_array(tensor))
    return bool(magnitudes.max(initial=0) > LARGEST_HALF)


def _shrinks(tensor: onnx.TensorProto, axes: tuple[int, ...]) -> bool:
    """Return whether more than two values share a scale."""
    shared = int(np.prod([tensor.dims[axis] for axis in axes]))
    return shared > 2  # 1 byte for each value, and 4 for the scale that `shared` values have


def quantize(
    proto: onnx.ModelProto, skipped: Collection[str], half: bool = False
) -> onnx.ModelProto:
    """Return the network with the weights of `find_weights` in 8 bits, or with `half` in float16.

    `proto` must not be used afterwards.
    """
    graph = proto.graph
    constants = Links(graph).constants
    made: dict[str, str] = {}  # names of new tensors by the name of the float tensor
    nodes: list[onnx.NodeProto] = []
    for node, index, axes in list(find_weights(graph, skipped, half)):
        name = node.input[index]
        if name not in made:
            values = numpy_helper.to_array(constants[name])
            stored = f"{name}{LEVELS}"
            cast = f"{name}__float"
            nodes.append(
                helper.make_node("Cast", [stored], [cast], f"{name}__Cast", to=TensorProto.FLOAT)
            )

            # 8 bits need a scale after the cast
            if half:
                made[name] = cast
                tensors = {stored: values.astype(np.float16)}
            else:
                made[name] = f"{name}__weights"
                scaled = f"{name}__scale"
                levels, scale = round_rows(values, axes)
                tensors = {stored: levels, scaled: scale}
                mul = helper.make_node("Mul", [cast, scaled], [made[name]], f"{name}__Mul")
                nodes.append(mul)
            for tensor_name, array in tensors.items():
                graph.initializer.append(numpy_helper.from_array(array, tensor_name))
        node.input[index] = made[name]

    # The new nodes come first, before the nodes that read them
    others = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *others])
    return rewrite(proto, [remove_unused])


def count_layers(graph: onnx.GraphProto) -> int:
    """Count the layers and embeddings whose weights `quantize` has stored."""
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    levels = set()  # after the Cast of integers
    weights = set()  # after the Mul by the scales, or the Cast of float16
    layers = 0
    for node in graph.node:
        if node.op_type == "Cast":
            stored = types.get(node.input[0])
            if stored == TensorProto.INT8:
                levels.add(node.output[0])
            elif stored == TensorProto.FLOAT16:
                weights.add(node.output[0])
        elif node.op_type == "Mul":
            if node.input[0] in levels:
                weights.add(node.output[0])
        elif node.op_type in (*OPERATORS, _EMBEDDING) and not weights.isdisjoint(node.input):
            layers += 1
    return layers


def count_left(graph: onnx.GraphProto, skipped: Collection[str]) -> Counter[str]:
    """Count by operator the layers with a constant second input that `quantize` does not change."""
    constants = Links(graph).constants
    nodes = list(graph.node)  # keep the objects, as protobuf may make new ones with other ids
    taken = {id(node) for node, _, _ in find_weights(graph, skipped)}
    left: Counter[str] = Counter()
    for node in nodes:
        is_layer = node.op_type in OPERATORS and "".join(node.input[1:2]) in constants
        if is_layer and id(node) not in taken:
            left[node.op_type] += 1
    return left
