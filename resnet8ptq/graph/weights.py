"""Reads and replaces the weights and biases of a graph's layers."""

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from resnet8ptq.graph.layers import channel_axis
from resnet8ptq.graph.links import Linked, Links, input_at

Array = NDArray[np.float32]


def read_initializer(graph: Linked, name: str) -> Array:
    """Return the values of an initializer as a copy, which the caller may change."""
    return np.array(numpy_helper.to_array(Links.of(graph).constants[name]))


def read_weights(graph: Linked, node: onnx.NodeProto) -> Array:
    """Return a layer's weights [output channels, ...].

    Operators store the output channels along different axes. Corrections and scales need this axis
    first; `write_weights` moves it back.

    >>> weights = numpy_helper.from_array(np.zeros((16, 10), np.float32), "w")
    >>> dense = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    >>> read_weights(onnx.GraphProto(node=[dense], initializer=[weights]), dense).shape
    (10, 16)
    """
    return np.moveaxis(read_initializer(graph, node.input[1]), channel_axis(node), 0)


def write_weights(graph: Linked, node: onnx.NodeProto, weights: NDArray[Any]) -> None:
    """Replace a layer's weights by `weights` [output channels, ...]."""
    write_input(graph, node, index=1, values=np.moveaxis(weights, 0, channel_axis(node)))


def read_bias(graph: Linked, node: onnx.NodeProto) -> Array:
    """Return a layer's third input as a bias [output channels]; zeros without a third input."""
    graph = Links.of(graph)
    channels = graph.constants[node.input[1]].dims[channel_axis(node)]
    name = input_at(node, 2)
    if not name:
        return np.zeros(channels, np.float32)
    return np.array(np.broadcast_to(read_initializer(graph, name).reshape(-1), channels))


def write_bias(graph: Linked, node: onnx.NodeProto, bias: NDArray[Any]) -> None:
    """Replace the bias of a layer by `bias` [output channels], or add one; a MatMul takes none."""
    if len(node.input) < 3:
        node.input.append("")
    write_input(graph, node, index=2, values=bias)


def find_added_bias(graph: Linked, matmul: onnx.NodeProto) -> tuple[onnx.NodeProto, int] | None:
    """Return the Add of a constant [output channels] to a MatMul, and the constant's input index.

    Returns None without such an Add, or if the product has another reader or is an output.
    """
    graph = Links.of(graph)
    channels = graph.constants[matmul.input[1]].dims[channel_axis(matmul)]
    reader = graph.only_reader(matmul.output[0])
    if reader is None or reader.op_type != "Add":
        return None
    for index, name in enumerate(reader.input):
        constant = graph.constants.get(name)
        if constant is not None and list(constant.dims) == [channels]:
            return reader, index
    return None


def biased_output(graph: Linked, node: onnx.NodeProto) -> str:
    """Return the output of a layer, or of the Add of the bias after a MatMul.

    Corrections compare this tensor with FP32, because they change the bias.
    """
    if node.op_type == "MatMul":
        added = find_added_bias(graph, node)
        if added is not None:
            add, _ = added
            return add.output[0]
    return node.output[0]


def write_input(graph: Linked, node: onnx.NodeProto, index: int, values: NDArray[Any]) -> None:
    """Replace the values of a constant input by `values`, as float32.

    The node gets a new constant if the old one is shared (`Links.is_shared`), or if the input has
    no name yet.
    """
    links = Links.of(graph)
    name = node.input[index]
    if not name or links.is_shared(name):
        name = f"{node.name}/corrected_{index}"

    # Write in place, because protobuf keeps removed elements of a list in memory
    tensor = links.constants.get(name) or links.graph.initializer.add()
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values, np.float32), name))
    if node.input[index] != name:
        links.replace_input(node, index, tensor)
