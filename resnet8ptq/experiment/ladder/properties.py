"""Properties of a network that decide what is tried."""

import math

import numpy as np
import onnx
from onnx import numpy_helper

from resnet8ptq.graph.attention import find_attention
from resnet8ptq.graph.layers import attribute

ATTENTION, DEPTHWISE, POOLS, SILU = "attention", "depthwise", "average pool", "SiLU"
UNLIKE_CHANNELS = "unlike channels"
UNLIKE = 64  # weights of two channels that differ by this factor

_POOLS = {"GlobalAveragePool", "AveragePool", "ReduceMean"}


def find_properties(graph: onnx.GraphProto) -> list[str]:
    """Return the properties of a converted network that the ladder has steps for."""
    operators = {node.op_type for node in graph.node}
    attention = bool(find_attention(graph))
    present = {
        ATTENTION: attention,
        DEPTHWISE: any(map(_is_depthwise, graph.node)),
        UNLIKE_CHANNELS: _widest_spread(graph) >= UNLIKE,
        POOLS: not attention and not operators.isdisjoint(_POOLS),
        SILU: "HardSwish" in operators or _has_silu(graph),
    }
    return [name for name, holds in present.items() if holds]


def _is_depthwise(node: onnx.NodeProto) -> bool:
    return node.op_type == "Conv" and attribute(node, "group", 1) > 1


def _has_silu(graph: onnx.GraphProto) -> bool:
    """Whether a tensor is multiplied by its own sigmoid (Elfwing et al., 2018)."""
    gates = {n.output[0]: n.input[0] for n in graph.node if n.op_type in ("Sigmoid", "HardSigmoid")}
    products = [node.input for node in graph.node if node.op_type == "Mul"]
    return any(gates.get(a) == b or gates.get(b) == a for a, b in products)


def _widest_spread(graph: onnx.GraphProto) -> float:
    """Return the largest factor between the weights of two channels of a depthwise convolution."""
    names = {node.input[1] for node in filter(_is_depthwise, graph.node)}
    widest = 1.0
    for tensor in graph.initializer:
        if tensor.name in names:
            weights = np.abs(numpy_helper.to_array(tensor))
            largest = weights.reshape(len(weights), -1).max(axis=1)
            largest = largest[largest > 0]
            if len(largest):
                widest = max(widest, float(largest.max() / largest.min()))
    return widest if math.isfinite(widest) else UNLIKE
