"""`float_output`: leave the outputs of the last layers and what follows them in float.

An 8-bit softmax gives tied top scores, and 8-bit logits lose what the last layer's 32-bit sums
hold. Both formats of ONNX Runtime can return those sums as float.
"""

from collections.abc import Collection

import onnx

from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.graph.layers import FUSED, LAYERS, consumers, find_tail

_INTEGER = ("QGemm", "QLinearConv", "QLinearMatMul")


def find_nodes(graph: onnx.GraphProto) -> list[str]:
    """Return the names of the nodes behind the last layers of an FP32 graph.

    Raises:
        UnsupportedError: an activation follows one of them, which its kernel would do as well.
    """
    last, behind = find_tail(graph)
    made = {layer.output[0] for layer in last}
    fused = [node for node in behind if node.op_type in FUSED and node.input[0] in made]
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
    """Take the quantization of the last layers' outputs out of a quantized graph, in place.

    Raises:
        UnsupportedError: the last layer's integer operator returns 8 bits only.
    """
    graph = proto.graph
    for layer in find_tail(graph, (*LAYERS, *_INTEGER))[0]:
        behind = consumers(graph, layer.output[0])
        if layer.op_type in LAYERS:  # QDQ, or left in float altogether
            quantizes = [node for node in behind if node.op_type == "QuantizeLinear"]
            behind = [node for each in quantizes for node in consumers(graph, each.output[0])]
            for each in quantizes:
                graph.node.remove(each)
        elif layer.op_type == "QGemm":
            del layer.input[7:]  # without y_scale and y_zero_point, QGemm returns float
        else:
            raise UnsupportedError(_EIGHT_BITS.format(layer.op_type))
        for dequantize in behind:
            _bypass(graph, dequantize, layer.output[0])


def _bypass(graph: onnx.GraphProto, node: onnx.NodeProto, name: str) -> None:
    """Remove `node`; what took its output takes the tensor `name`."""
    for other in graph.node:
        other.input[:] = [name if given == node.output[0] else given for given in other.input]
    if any(value.name == node.output[0] for value in graph.output):  # which ends in the layer
        for other in graph.node:
            other.output[:] = [node.output[0] if given == name else given for given in other.output]
    graph.node.remove(node)
