"""Properties of a network that the search for settings uses."""

import math
from collections import Counter

import onnx

from resnet8ptq.corrections.equalization import find_imbalance
from resnet8ptq.graph.attention import find_attention
from resnet8ptq.graph.layers import is_grouped

ATTENTION = "attention"
DEPTHWISE = "depthwise"
POOLS = "average pool"
SILU = "SiLU"
PRODUCTS = "weights in matrix products"
RECURRENT = "recurrent"
BESIDE = "matrix products or LSTMs beside convolutions"
UNEQUAL = "channels of unequal scale"

_IMBALANCE = 16.0  # ratio of channels that share a scale, at which small channels keep 4 of 8 bits
_BESIDE = 0.05  # least share of the weights in convolutions, and in other layers
_RECURRENT = {"GRU", "LSTM", "RNN"}
_POOLS = {"GlobalAveragePool", "AveragePool", "ReduceMean"}


def find_properties(graph: onnx.GraphProto) -> list[str]:
    """Return the names of the properties that a converted network has."""
    operators = {node.op_type for node in graph.node}
    attention = bool(find_attention(graph))
    convolutions, products, recurrent = _find_weights(graph)

    # With many weights in both kinds of layers, the search tries method=mixed
    both = min(convolutions, products + recurrent)
    is_dynamic = recurrent > 0 or products > convolutions
    present = {
        ATTENTION: attention,
        PRODUCTS: products > convolutions,
        BESIDE: is_dynamic and both > _BESIDE * (convolutions + products + recurrent),
        RECURRENT: not operators.isdisjoint(_RECURRENT),
        DEPTHWISE: any(map(is_grouped, graph.node)),
        POOLS: not attention and not operators.isdisjoint(_POOLS),
        SILU: "HardSwish" in operators or _has_silu(graph),
        UNEQUAL: find_imbalance(graph) >= _IMBALANCE,
    }
    return [name for name, holds in present.items() if holds]


def _find_weights(graph: onnx.GraphProto) -> tuple[int, int, int]:
    """Return the number of constant values in convolutions, in matrix products, and in LSTMs.

    Only the first three inputs of a node count, so not an LSTM's bias. Constants that several nodes
    share count once.
    """
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in graph.initializer}
    weights: Counter[str] = Counter()
    for node in graph.node:
        for name in node.input[:3]:
            weights[node.op_type] += sizes.pop(name, 0)
    convolutions = weights["Conv"] + weights["ConvTranspose"]
    return convolutions, weights["MatMul"] + weights["Gemm"], weights["LSTM"]


def _has_silu(graph: onnx.GraphProto) -> bool:
    """Return whether a tensor is multiplied by its sigmoid (SiLU, Elfwing et al., 2018).

    A hard sigmoid counts too.
    """
    gates = {}  # the gated tensor of each sigmoid
    for node in graph.node:
        if node.op_type in ("Sigmoid", "HardSigmoid"):
            gates[node.output[0]] = node.input[0]
    for node in graph.node:
        if node.op_type == "Mul":
            left, right = node.input
            if gates.get(left) == right or gates.get(right) == left:
                return True
    return False
