"""Reads and replaces the weights and biases of a graph's layers."""

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from resnet8ptq.graph.layers import channel_axis, consumers

Array = NDArray[np.float32]


def read(graph: onnx.GraphProto, name: str) -> Array:
    """Return an initializer."""
    (tensor,) = [item for item in graph.initializer if item.name == name]
    return np.array(numpy_helper.to_array(tensor))


def read_weights(graph: onnx.GraphProto, node: onnx.NodeProto) -> Array:
    """Return a layer's weights [output channels, ...]."""
    return np.moveaxis(read(graph, node.input[1]), channel_axis(node), 0)


def write_weights(graph: onnx.GraphProto, node: onnx.NodeProto, weights: NDArray[Any]) -> None:
    """Replace a layer's weights by `weights` [output channels, ...]."""
    write_input(graph, node, 1, np.moveaxis(weights, 0, channel_axis(node)))


def read_bias(graph: onnx.GraphProto, node: onnx.NodeProto) -> Array:
    """Return a layer's bias [output channels]; zeros without a bias."""
    channels = read_weights(graph, node).shape[0]
    if len(node.input) < 3 or not node.input[2]:
        return np.zeros(channels, np.float32)
    return np.array(np.broadcast_to(read(graph, node.input[2]).reshape(-1), channels))


def write_bias(graph: onnx.GraphProto, node: onnx.NodeProto, bias: NDArray[Any]) -> None:
    """Replace the bias of a Conv or Gemm by `bias` [output channels], or add it."""
    if len(node.input) < 3:
        node.input.append("")
    write_input(graph, node, 2, bias)


def find_added_bias(
    graph: onnx.GraphProto, matmul: onnx.NodeProto
) -> tuple[onnx.NodeProto, int] | None:
    """Return the Add of a constant [output channels] to a MatMul, and the index of the constant.

    None if there is none, or if the product has another consumer.
    """
    readers, channels = consumers(graph, matmul.output[0]), read_weights(graph, matmul).shape[0]
    constants = {tensor.name: tensor for tensor in graph.initializer}
    if [node.op_type for node in readers] == ["Add"]:
        for index, name in enumerate(readers[0].input):
            if name in constants and list(constants[name].dims) == [channels]:
                return readers[0], index
    return None


def biased_output(graph: onnx.GraphProto, node: onnx.NodeProto) -> str:
    """Return the output of a layer with its bias: of the Add after a MatMul, if it has one."""
    added = find_added_bias(graph, node) if node.op_type == "MatMul" else None
    return (added[0] if added else node).output[0]


def write_input(
    graph: onnx.GraphProto, node: onnx.NodeProto, index: int, values: NDArray[Any]
) -> None:
    """Replace an initializer; if other nodes read it too, or it is missing, add one."""
    name = node.input[index]
    readers = sum(list(other.input).count(name) for other in graph.node)
    if not name or readers > 1:
        name = f"{node.name}/corrected_{index}"
        node.input[index] = name
    existing = [tensor for tensor in graph.initializer if tensor.name == name]
    # In place: protobuf keeps removed elements of a list in memory.
    tensor = existing[0] if existing else graph.initializer.add()
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values, np.float32), name))
