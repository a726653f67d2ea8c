"""Changes QDQ graphs where OpenVINO would compute something else, or in float."""

import numpy as np
import onnx
from onnx import helper, numpy_helper

from resnet8ptq.graph.layers import attribute

_REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin")


def rewrite(graph: onnx.GraphProto) -> bool:
    """Change a graph in place, with the same results elsewhere; return whether it changed."""
    return any([_avoid_unit_scales(graph), _keep_reduced_axes(graph)])


def _avoid_unit_scales(graph: onnx.GraphProto) -> bool:
    """Raise activation scales of exactly 1 to the next float, in place; return whether any is.

    OpenVINO removes a multiplication by 1, then no longer recognizes the dequantization, and
    computes the next layer in float. Pixels 0..255 in dtype=u8s8 have that scale.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer}
    scales = {
        node.input[1]
        for node in graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] not in constants
    }
    ones = [
        constants[name]
        for name in scales & constants.keys()
        if np.array_equal(numpy_helper.to_array(constants[name]), np.float32(1))
    ]
    for tensor in ones:
        above = np.nextafter(np.float32(1), np.float32(2))
        tensor.CopyFrom(numpy_helper.from_array(above, tensor.name))
    return bool(ones)


def _keep_reduced_axes(graph: onnx.GraphProto) -> bool:
    """Squeeze behind reductions of values that are not rounded; return whether there are any.

    OpenVINO moves the scales of a matrix product behind the reduction. If that drops an axis, the
    outputs are wrong by up to all 8 bits (OpenVINO 2026.4.1): the mean of a text's tokens.
    """
    rounded = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    dropping = [
        node
        for node in graph.node
        if node.op_type in _REDUCTIONS
        and not attribute(node, "keepdims", 1)
        and node.input[0] not in rounded
    ]
    for node in dropping:
        [output], inputs = node.output, list(node.input[1:])
        axes = attribute(node, "axes", None)  # an input since opset 18, of ReduceSum since 13
        if axes is not None:
            inputs = [f"{output}__axes"]
            graph.initializer.append(numpy_helper.from_array(np.array(axes), inputs[0]))
        kept = node.output[0] = f"{output}__kept"
        [keepdims] = [item for item in node.attribute if item.name == "keepdims"]
        keepdims.i = 1
        squeeze = helper.make_node("Squeeze", [kept, *inputs], [output], kept)
        graph.node.insert(list(graph.node).index(node) + 1, squeeze)
    return bool(dropping)
