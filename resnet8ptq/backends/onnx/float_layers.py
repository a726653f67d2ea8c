"""Protects float layers between quantized ones from ONNX Runtime's optimizer.

On loading, WeightBiasQuantization (since 1.21) rounds the weights of a float Conv, ConvTranspose or
Gemm between DequantizeLinear and QuantizeLinear, per tensor, and runs it on integers:
https://github.com/microsoft/onnxruntime/pull/22969. Only a session option turns this off, which
everyone who deploys the file would need to set. Layers with weights below 8 bits need the
same: they compute in float, their biases would be rounded, and 2-bit weights would reach integer
kernels that do not take them (1.31).
"""

import onnx
from onnx import TensorProto, helper

from resnet8ptq.graph.layers import consumers

_ROUNDED = ("Conv", "ConvTranspose", "Gemm")
_NARROW = (TensorProto.INT4, TensorProto.INT2)


def keep(proto: onnx.ModelProto) -> bool:
    """Put a Sum of one input, which no optimizer removes, before each such layer, in place.

    Returns:
        True if the graph changed.
    """
    graph = proto.graph
    constants = {tensor.name: tensor.data_type for tensor in graph.initializer}
    sources = {n.output[0]: n.input[0] for n in graph.node if n.op_type == "DequantizeLinear"}
    nodes = []
    for node in graph.node:
        if node.op_type in _ROUNDED and node.input[0] in sources:
            narrow = constants.get(sources.get(node.input[1], "")) in _NARROW
            if narrow or (node.input[1] in constants and _is_quantized(graph, node.output[0])):
                name = f"{node.output[0]}_float_input"
                nodes.append(helper.make_node("Sum", [node.input[0]], [name], name))
                node.input[0] = name
        nodes.append(node)
    if len(nodes) == len(graph.node):
        return False
    del graph.node[:]
    graph.node.extend(nodes)
    return True


def _is_quantized(graph: onnx.GraphProto, name: str) -> bool:
    """Tell whether a tensor is quantized, directly or after a chain of single consumers."""
    while len(behind := consumers(graph, name)) == 1:
        if behind[0].op_type == "QuantizeLinear":
            return True
        name = behind[0].output[0]
    return False
