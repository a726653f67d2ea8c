"""Rewrites QDQ graphs where OpenVINO's result would be wrong or computed in float.

Each fault was measured with OpenVINO 2026.4.1 against ONNX Runtime, on the same file and samples.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from numpy.typing import ArrayLike
from onnx import helper, numpy_helper

from resnet8ptq.graph.layers import attribute
from resnet8ptq.graph.links import Links
from resnet8ptq.graph.pruning import prune
from resnet8ptq.graph.shapes import find_sizes

_POOL = "GlobalAveragePool"
_REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin")

Constants = Mapping[str, onnx.TensorProto]
Step = tuple[str, ArrayLike]  # an operator and its constant operand


def rewrite(proto: onnx.ModelProto) -> None:
    """Rewrite the patterns that OpenVINO computes wrongly, in place, with the same meaning."""
    _avoid_unit_scales(proto.graph)
    _sum_signals(proto)
    for step in (_pad_before_pools, _keep_reduced_axes, _pad_with_zeros):
        step(proto.graph)


def _avoid_unit_scales(graph: onnx.GraphProto) -> None:
    """Raise activation scales of exactly 1 to the next float.

    OpenVINO removes a multiplication by 1, so it does not recognize the dequantization and computes
    the next layer in float. Pixels 0..255 in dtype=u8s8 have that scale.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer}
    scales = {
        node.input[1]
        for node in graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] not in constants
    }
    above = np.nextafter(np.float32(1), np.float32(2))
    for name in scales & constants.keys():
        if np.array_equal(numpy_helper.to_array(constants[name]), np.float32(1)):
            constants[name].CopyFrom(numpy_helper.from_array(above, name))


def _keep_reduced_axes(graph: onnx.GraphProto) -> None:
    """Keep the axes of float reductions and squeeze them afterwards.

    OpenVINO moves the scales of a matrix product to after the reduction. If the reduction drops an
    axis, such as in the mean over a text's tokens, outputs are wrong by up to all 8 bits.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer}
    rounded = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    dropping = [
        node
        for node in graph.node
        if node.op_type in _REDUCTIONS
        and not attribute(node, "keepdims", 1)
        and node.input[0] not in rounded
        and _find_axes(node, constants)
    ]
    for node in dropping:
        [keepdims] = [item for item in node.attribute if item.name == "keepdims"]
        keepdims.i = 1
        _enclose(graph, node, [], [("Squeeze", _find_axes(node, constants))])


def _sum_signals(proto: onnx.ModelProto) -> None:
    """Replace each mean of a tensor with three axes by a sum.

    Global pools of signals [N, channels, steps] and means of tokens are wrong by up to 145 of 256
    steps: after a convolution, and in 8 bits if the batch is larger than the second axis. Sums are
    right if they drop the axis before the division. Pools of pictures, with four axes, are right.
    """
    graph = proto.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    means = [node for node in graph.node if node.op_type in (_POOL, "ReduceMean")]
    shapes = find_sizes(proto) if means else {}
    for node in means:
        shape = shapes.get(node.input[0], [])
        axes = [2] if node.op_type == _POOL else _find_axes(node, constants)
        if len(shape) != 3 or not axes or not all(shape[axis] for axis in axes):
            continue
        count = math.prod(shape[axis] for axis in axes)
        kept = node.op_type == _POOL or attribute(node, "keepdims", 1)
        del node.attribute[:], node.input[1:]
        node.op_type = "ReduceSum"
        node.input.append(_add_constant(graph, f"{node.output[0]}__axes", axes))
        after: list[Step] = [("Squeeze", axes), ("Mul", np.float32(1 / count))]
        _enclose(graph, node, [], after + [("Unsqueeze", axes)] * bool(kept))


def _pad_before_pools(graph: onnx.GraphProto) -> None:
    """Write the pads that means count, torch's default, as Pads.

    Where zero is not level 0, OpenVINO pads rounded values with another value (-8 dB). It fuses
    such a Pad with the pool again, unless an axis is put in around it.
    """
    pools = [
        node
        for node in graph.node
        if node.op_type == "AveragePool"
        and attribute(node, "count_include_pad", 0)
        and any(attribute(node, "pads", ()))
    ]
    for node in pools:
        sides = np.reshape(attribute(node, "pads", ()), (2, -1))
        node.attribute.remove(next(item for item in node.attribute if item.name == "pads"))
        widths = np.insert(sides, 0, np.zeros((3, 1)), axis=1).reshape(-1)
        _enclose(graph, node, [("Unsqueeze", [1]), ("Pad", widths), ("Squeeze", [1])], [])


def _find_axes(node: onnx.NodeProto, constants: Constants) -> list[int]:
    """Return the axes of a reduction; none if they are not constant, or if all axes are reduced."""
    if len(node.input) > 1:  # since opset 18, of ReduceSum since 13
        axes = constants.get(node.input[1])
        return [] if axes is None else list(numpy_helper.to_array(axes))
    return list(attribute(node, "axes", ()))


def _pad_with_zeros(graph: onnx.GraphProto) -> None:
    """Rewrite Pads of rounded values, such as before causal convolutions.

    If zero is not level 0, OpenVINO pads with a wrong value, up to 129 steps off, in two cases: on
    the second axis, as in [N, steps, channels]; and if the tensors before and after the Pad share
    the constant of their scale.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer}
    rounded = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    padding = [
        node
        for node in graph.node
        if node.op_type == "Pad"
        and attribute(node, "mode", b"constant") == b"constant"
        and node.input[0] in rounded
        and node.input[1] in constants
        and len(node.input) < 4  # without a list of axes
    ]
    if padding:
        _copy_scales(graph, constants)
    for node in padding:
        widths = numpy_helper.to_array(constants[node.input[1]]).reshape(2, -1)
        if widths.shape[1] > 1 and widths[:, 1].any():
            wider = np.insert(widths, 1, 0, axis=1).reshape(-1)
            node.input[1] = _add_constant(graph, f"{node.output[0]}__pads", wider)
            _enclose(graph, node, [("Unsqueeze", [1])], [("Squeeze", [1])])


def _copy_scales(graph: onnx.GraphProto, constants: Constants) -> None:
    """Give each rounded tensor its own constants for scale and zero point."""
    links = Links(graph)
    for quantize in [node for node in graph.node if node.op_type == "QuantizeLinear"]:
        back = links.readers(quantize.output[0])
        for index, name in enumerate(quantize.input[1:], 1):
            copied = onnx.TensorProto()
            copied.CopyFrom(constants[name])
            copied.name = f"{quantize.output[0]}__{index}"
            graph.initializer.append(copied)
            for node in (quantize, *back):
                node.input[index] = copied.name
    prune(graph)  # the shared ones


def _enclose(
    graph: onnx.GraphProto, node: onnx.NodeProto, before: Sequence[Step], after: Sequence[Step]
) -> None:
    """Insert operators with a constant operand before and after a node."""
    [output], index = node.output, list(graph.node).index(node)
    for kind, values in before:
        added = _make(graph, kind, node.input[0], values, f"{output}__{kind}")
        node.input[0] = added.output[0]
        graph.node.insert(index, added)
        index += 1
    source = node.output[0] = f"{output}__inner" if after else output
    for number, (kind, values) in enumerate(after, 1):
        made = output if number == len(after) else f"{output}__{number}"
        graph.node.insert(index + number, _make(graph, kind, source, values, made))
        source = made


def _make(
    graph: onnx.GraphProto, kind: str, source: str, values: ArrayLike, made: str
) -> onnx.NodeProto:
    name = f"{made}__{kind}__operand"
    return helper.make_node(kind, [source, _add_constant(graph, name, values)], [made], made)


def _add_constant(graph: onnx.GraphProto, name: str, values: ArrayLike) -> str:
    graph.initializer.append(numpy_helper.from_array(np.asarray(values), name))
    return name
