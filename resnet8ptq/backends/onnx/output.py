"""`float_output`: leaves the outputs of the last layers, and the nodes after them, in float.

An 8-bit softmax gives tied top scores, and 8-bit logits lose precision that the last layer's 32-bit
sums have. Both formats of ONNX Runtime can return those sums as float.
"""

from collections.abc import Collection

import onnx

from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.graph.layers import FUSED, LAYERS, consumers, find_tail

_INTEGER = ("QGemm", "QLinearConv", "QLinearMatMul")


def find_nodes(graph: onnx.GraphProto) -> list[str]:
    """Return the names of the nodes after the last layers of an FP32 graph.

    Raises:
        UnsupportedError: an activation follows one of them, which is fused into its kernel.
    """
    last, behind = find_tail(graph)
    outputs = {layer.output[0] for layer in last}
    fused = [node for node in behind if node.op_type in FUSED and node.input[0] in outputs]
    if fused or not last:
        kind = fused[0].op_type if fused else "nothing"
        raise UnsupportedError(f"float_output: takes a layer before the output, found {kind}")
    return [node.name for node in behind]


def check_format(graph: onnx.GraphProto, skipped: Collection[str]) -> None:
    """Check, on an FP32 graph, that format=qoperator can return its last layers' sums as float.

    Args:
        skipped: names of the nodes that stay in float.

    Raises:
        UnsupportedError: the last layer's integer operator returns 8 bits only.
    """
    for layer in find_tail(graph)[0]:
        if layer.op_type != "Gemm" and layer.name not in skipped:
            raise UnsupportedError(_EIGHT_BITS.format(f"QLinear{layer.op_type}"))


_EIGHT_BITS = (
    "float_output with format=qoperator: the last layer becomes {}, which returns 8 bits; takes "
    "format=auto or format=qdq"
)


def leave_in_float(proto: onnx.ModelProto) -> None:
    """Remove the quantization of the last layers' outputs from a quantized graph, in place.

    Raises:
        UnsupportedError: the last layer's integer operator returns 8 bits only.
    """
    graph = proto.graph
    for layer in find_tail(graph, (*LAYERS, *_INTEGER))[0]:
        behind = consumers(graph, layer.output[0])
        if layer.op_type in LAYERS:  # QDQ, or a float layer
            quantizes = [node for node in behind if node.op_type == "QuantizeLinear"]
            behind = [node for q in quantizes for node in consumers(graph, q.output[0])]
            for quantize in quantizes:
                graph.node.remove(quantize)
        elif layer.op_type == "QGemm":
            del layer.input[7:]  # without y_scale and y_zero_point, QGemm returns float
        else:
            raise UnsupportedError(_EIGHT_BITS.format(layer.op_type))
        for dequantize in behind:
            _bypass(graph, dequantize, layer.output[0])


def _bypass(graph: onnx.GraphProto, node: onnx.NodeProto, name: str) -> None:
    """Remove `node`; its consumers take the tensor `name` instead."""
    removed = node.output[0]
    for other in graph.node:
        other.input[:] = [name if tensor == removed else tensor for tensor in other.input]
    if any(value.name == removed for value in graph.output):  # the layer makes the output
        for other in graph.node:
            other.output[:] = [removed if tensor == name else tensor for tensor in other.output]
    graph.node.remove(node)
