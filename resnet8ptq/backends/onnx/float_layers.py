"""Layers that are to stay in float between quantized ones, kept so when the file is loaded.

ONNX Runtime's optimizer WeightBiasQuantization (1.21 on) rounds the weights of a float Conv,
ConvTranspose or Gemm between DequantizeLinear and QuantizeLinear, per tensor, and runs it on
integers: https://github.com/microsoft/onnxruntime/pull/22969. Only an option of the session
switches it off, which whoever deploys the file would have to know. Layers with weights below 8 bits
compute in float, too: their biases would be rounded, and 2-bit weights be given to integer kernels
that do not take them (1.31).
"""

import onnx
from onnx import TensorProto, helper

from resnet8ptq.graph.layers import consumers

_ROUNDED = ("Conv", "ConvTranspose", "Gemm")
_NARROW = (TensorProto.INT4, TensorProto.INT2)


def keep(proto: onnx.ModelProto) -> bool:
    """Put a Sum of one input, which no optimizer removes, before each such layer, in place.

    Returns:
        Whether there are any.
    """
    graph = proto.graph
    constants = {tensor.name: tensor.data_type for tensor in graph.initializer}
    narrow = {
        node.output[0]
        for node in graph.node
        if node.op_type == "DequantizeLinear" and constants.get(node.input[0]) in _NARROW
    }
    dequantized = {n.output[0] for n in graph.node if n.op_type == "DequantizeLinear"}
    nodes = []
    for node in graph.node:
        if (
            node.op_type in _ROUNDED
            and node.input[0] in dequantized
            and (
                node.input[1] in narrow
                or (node.input[1] in constants and _is_quantized(graph, node.output[0]))
            )
        ):
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
    """Tell whether a tensor is quantized, at once or behind nodes that nothing else takes from."""
    while len(behind := consumers(graph, name)) == 1:
        if behind[0].op_type == "QuantizeLinear":
            return True
        name = behind[0].output[0]
    return False
