"""An ONNX graph cut before its final softmax."""

import onnx
from onnx import TensorProto, helper

_PASSES_ON = ("QuantizeLinear", "DequantizeLinear", "Identity")


def last_node(graph: onnx.GraphProto, skipped: tuple[str, ...]) -> onnx.NodeProto | None:
    """Return the node that makes the output, going back through operators in `skipped`."""
    producers = {name: node for node in graph.node for name in node.output}
    node = producers.get(graph.output[0].name)
    while node is not None and node.op_type in skipped:
        node = producers.get(node.input[0])
    return node


def end_at_logits(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    """Make the final softmax's input the only output; None where the graph ends in no softmax."""
    node = last_node(proto.graph, _PASSES_ON)
    if node is None or node.op_type not in ("Softmax", "QLinearSoftmax"):
        return None
    name = node.input[0]
    if node.op_type == "QLinearSoftmax":
        proto.graph.node.append(helper.make_node("DequantizeLinear", node.input[:3], ["logits"]))
        name = "logits"
    del proto.graph.output[:]
    proto.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    return proto
