"""The layers of `method=mixed`: convolutions are static, LSTMs and most matrix products dynamic.

Convolutions get static ranges, because their dynamic kernel is slower than FP32. Products with one
constant matrix get ranges that are computed at inference; other products are static or in float.
ONNX Runtime accepts no static ranges for an LSTM.
"""

from collections.abc import Collection

import onnx

from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.graph.layers import LAYERS, RECURRENT, find_stacks, fused_activations
from resnet8ptq.graph.links import inputs_of

_PRODUCTS = ("MatMul", "Gemm")


def check_both_kinds(graph: onnx.GraphProto, skipped: Collection[str]) -> None:
    """Raise `UnsupportedError` unless there are convolutions and dynamic layers to quantize.

    Args:
        skipped: names of nodes that stay in float.
    """
    products = find_dynamic(graph, skipped)
    convolutions = 0
    for node in graph.node:
        convolutions += node.op_type == "Conv" and node.name not in skipped
    if not (products and convolutions):
        raise UnsupportedError(
            f"method=mixed: got {len(products)} matrix products and LSTMs to quantize, and "
            f"{convolutions} convolutions, expected both; try method=static | dynamic"
        )


def find_dynamic(graph: onnx.GraphProto, skipped: Collection[str]) -> list[str]:
    """Return the names of products with one constant matrix, and of LSTMs with constant weights.

    Args:
        skipped: names of nodes that stay in float.
    """
    constants = {tensor.name for tensor in graph.initializer}
    left = {*skipped, *find_stacks(graph)}
    names = []
    for node in graph.node:
        is_constant = not constants.isdisjoint(node.input[1:2])
        if is_constant and node.op_type in (*_PRODUCTS, *RECURRENT) and node.name not in left:
            names.append(node.name)
    return names


def find_not_static(graph: onnx.GraphProto, left: Collection[str]) -> list[str]:
    """Return the names of the nodes without a static range.

    These are the nodes in `left`, and nodes other than `LAYERS` on which no static layer depends:
    rounding their values costs time and gains nothing. A Relu or Clip that runs in a convolution's
    kernel keeps a static range.

    Args:
        left: names of the dynamic nodes and of those in float.
    """
    fused = {node.name for node in fused_activations(graph)}
    convolved = {node.output[0] for node in graph.node if node.op_type == "Conv"}
    names = []
    needed: set[str] = set()  # tensors that a static layer needs
    for node in reversed(graph.node):
        is_layer = node.op_type in LAYERS or not needed.isdisjoint(node.output)
        in_kernel = node.name in fused and node.input[0] in convolved
        if node.name not in left and (is_layer or in_kernel):
            needed.update(inputs_of(node))
        else:
            names.append(node.name)
    return names
