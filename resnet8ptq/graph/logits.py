"""Cuts an ONNX graph before its final softmax, which would hide effects of quantization."""

import onnx
from onnx import TensorProto, helper

_PASSES_ON = ("QuantizeLinear", "DequantizeLinear", "Identity")


def end_at_logits(proto: onnx.ModelProto) -> bool:
    """Make the final softmax's input the only output, in place; False without a softmax.

    A graph without a final softmax, or with several outputs, stays unchanged. Nodes after the
    softmax stay, unused; the softmax is removed if it is the last node.
    """
    graph = proto.graph
    producers = {name: node for node in graph.node for name in node.output}
    node = producers.get(graph.output[0].name) if len(graph.output) == 1 else None
    while node is not None and node.op_type in _PASSES_ON:
        node = producers.get(node.input[0])
    if node is None or node.op_type not in ("Softmax", "QLinearSoftmax"):
        return False
    name = node.input[0]
    if node.op_type == "QLinearSoftmax":
        graph.node.append(helper.make_node("DequantizeLinear", node.input[:3], ["logits"]))
        name = "logits"
    shape = graph.output[0].type if node.output[0] == graph.output[0].name else None
    others = [value for value in graph.value_info if value.name != name]
    del graph.value_info[:], graph.output[:]
    graph.value_info.extend(others)
    graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    if shape is not None:  # a softmax keeps type and shape
        graph.output[0].type.CopyFrom(shape)
        graph.node.remove(node)
    return True
