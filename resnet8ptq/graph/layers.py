"""Finds the layers of ONNX graphs, and other nodes and tensors that matter to quantization."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import onnx
from onnx import numpy_helper

from resnet8ptq.graph.links import Links, find_last_readers, input_at, input_names, inputs_of
from resnet8ptq.graph.shapes import infer_shapes

LAYERS = ("Conv", "Gemm", "MatMul")
RECURRENT = ("LSTM",)  # ONNX Runtime quantizes them with method=dynamic and method=mixed
LAST = (*LAYERS, "ConvTranspose")  # layers that may be the last, such as a decoder's
STORED = ("ConvTranspose", "GRU", "RNN")  # ONNX Runtime computes them on floats
FUSED = ("Relu", "Clip")  # activations that can be part of a layer's kernel
MOVING = ("Identity", "Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze")


def weight_layers(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    """Return the nodes of `LAYERS` whose second input is constant, by a short unique name.

    For example, `model_1/conv2d_1/BiasAdd` may become `conv2d_1`. The name lacks the first parts
    that all names share, and the last parts that it does not need to be unique. A product with a
    vector has no output channels, so it is not a layer.
    """
    constants = Links(graph).constants
    layers = []
    for node in graph.node:
        if node.op_type not in LAYERS or len(node.input) < 2:
            continue
        weights = constants.get(node.input[1])
        if weights is not None and len(weights.dims) > 1:
            layers.append(node)
    return dict(zip(short_names(layers), layers, strict=True))


def find_vector_products(graph: onnx.GraphProto) -> list[str]:
    """Return the names of MatMuls with a constant vector, which has no output channels."""
    vectors = {tensor.name for tensor in graph.initializer if len(tensor.dims) == 1}
    names = []
    for node in graph.node:
        if node.op_type == "MatMul" and not vectors.isdisjoint(node.input):
            names.append(node.name)
    return names


def short_names(nodes: Sequence[onnx.NodeProto]) -> list[str]:
    """Return a short unique name of each node; see `weight_layers`.

    >>> names = ["model/conv2d/BiasAdd", "model/conv2d_1/BiasAdd", "model/dense/MatMul"]
    >>> short_names([onnx.NodeProto(name=name) for name in names])
    ['conv2d', 'conv2d_1', 'dense']
    """
    names = [node.name.split("/") for node in nodes]
    shared = _count_shared(names)
    tails = [parts[shared:] for parts in names]
    counts: Counter[tuple[str, ...]] = Counter()  # number of names by beginning
    for tail in tails:
        for length in range(1, len(tail) + 1):
            counts[tuple(tail[:length])] += 1
    return [_shorten(tail, counts) for tail in tails]


def _count_shared(names: Sequence[Sequence[str]]) -> int:
    """Return how many first parts all names share; 0 if one name is the beginning of all."""
    for index, parts in enumerate(zip(*names, strict=False)):
        if len(set(parts)) > 1:
            return index
    return 0


def weight_ranges(graph: onnx.GraphProto) -> dict[str, tuple[float, float]]:
    """Return the smallest and the largest weight of each layer, by its short name.

    Layers with one scale for all channels lose accuracy if a few weights are far from the others.
    """
    constants = Links(graph).constants
    ranges = {}
    for name, node in weight_layers(graph).items():
        weights = numpy_helper.to_array(constants[node.input[1]])
        ranges[name] = (float(weights.min()), float(weights.max()))
    return ranges


def float_inputs(graph: onnx.GraphProto) -> list[str]:
    """Return the names of the float32 inputs; integers have no range to calibrate."""
    return [value.name for value in graph.input if _is_float(value)]


def _is_float(value: onnx.ValueInfoProto) -> bool:
    return value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT


def float_tensors(proto: onnx.ModelProto, around: Collection[str] | None = None) -> list[str]:
    """Return the names of the float32 tensors that the graph's nodes compute, in graph order.

    Args:
        around: names of nodes; only their inputs and outputs are returned. None for all tensors.
    """
    graph = infer_shapes(proto)
    floats = set()
    for value in (*graph.value_info, *graph.output):
        if _is_float(value):
            floats.add(value.name)

    # Collect the tensors that nodes compute, and those next to the wanted nodes
    computed: list[str] = []
    wanted: set[str] = set()
    for node in graph.node:
        computed += node.output
        if around is None or node.name in around:
            wanted.update(node.input, node.output)
    wanted &= floats
    return [name for name in computed if name in wanted]


def find_copies(graph: onnx.GraphProto) -> dict[str, tuple[str, float, float]]:
    """Map each copy of another tensor to (other, low, high).

    A copy has the other's values, clipped to [low, high], perhaps in another shape or order. A
    bound may be infinite.
    """
    constants = Links(graph).constants
    copies = {}
    for node in graph.node:
        ends = _find_interval(node, constants)
        if ends is not None:
            copies[node.output[0]] = (node.input[0], *ends)
    return copies


def _find_interval(
    node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]
) -> tuple[float, float] | None:
    """Return the interval to which a node clips its first input, infinite if it only moves values.

    Returns None for other nodes, and for a Clip whose bound is computed or an attribute.
    """
    if node.op_type in MOVING:
        return -math.inf, math.inf
    if node.op_type == "Relu":
        return 0.0, math.inf
    if node.op_type != "Clip" or node.attribute:  # before opset 11, the ends are attributes
        return None
    ends = [-math.inf, math.inf]
    for side, name in enumerate(node.input[1:3]):
        if name in constants:
            ends[side] = float(numpy_helper.to_array(constants[name]))
        elif name:  # the value is computed
            return None
    return ends[0], ends[1]


def find_offset_clips(graph: onnx.GraphProto) -> list[str]:
    """Return the names of Clip nodes whose interval excludes 0, or is unknown.

    An 8-bit range always includes 0, so rounding cannot replace such a Clip.
    """
    copies = find_copies(graph)
    names = []
    for node in graph.node:
        unknown = ("", math.inf, -math.inf)  # an interval without 0
        _, low, high = copies.get(node.output[0], unknown)
        if node.op_type == "Clip" and not low <= 0 <= high:
            names.append(node.name)
    return names


def integer_nodes(proto: onnx.ModelProto) -> list[str]:
    """Return the names of the nodes whose first input or an output is known not to be float32.

    An example is a Cast of tokens to float. Initializers do not count.
    """
    inferred = infer_shapes(proto)
    integers = set()
    for value in (*inferred.input, *inferred.value_info, *inferred.output):
        is_known = value.type.tensor_type.elem_type != onnx.TensorProto.UNDEFINED
        if is_known and not _is_float(value):
            integers.add(value.name)
    names = []
    for node in proto.graph.node:
        if not integers.isdisjoint((*node.input[:1], *node.output)):
            names.append(node.name)
    return names


def find_stacks(graph: onnx.GraphProto) -> list[str]:
    """Return the names of MatMuls with a stack of constant matrices, or with weights on the left.

    Many integer kernels take only one matrix, on the right. Most backends therefore cannot quantize
    these nodes, and ONNX Runtime has no scale for each channel for them.
    """
    constants = Links(graph).constants
    names = []
    for node in graph.node:
        if node.op_type != "MatMul":
            continue
        left, right = node.input
        is_stack = right in constants and len(constants[right].dims) > 2
        if is_stack or left in constants:
            names.append(node.name)
    return names


def find_split_groups(graph: onnx.GraphProto) -> list[str]:
    """Return the names of grouped ConvTranspose nodes with a bias.

    The weights [input channels, output channels of one group, ...] have no axis that counts all
    output channels.
    """
    names = []
    for node in graph.node:
        if node.op_type != "ConvTranspose" or attribute(node, "group", 1) <= 1:
            continue
        if any(node.input[2:]):
            names.append(node.name)
    return names


def constant_pads(graph: onnx.GraphProto) -> Iterator[tuple[onnx.NodeProto, bool]]:
    """Yield each Pad of mode constant, and whether its value is known to be 0.

    Every 8-bit grid has a level for 0, but perhaps none for another value.
    """
    constants = Links(graph).constants
    for node in graph.node:
        if node.op_type == "Pad" and attribute(node, "mode", b"constant") == b"constant":
            name = input_at(node, 2)  # the value is 0 by default
            value = constants.get(name)
            known = value is not None and not numpy_helper.to_array(value).any()
            yield node, not name or known


def find_cuts(graph: onnx.GraphProto) -> dict[int, str]:
    """Return each tensor that cuts the graph in two, by the index of the last node before the cut.

    The nodes after a cut need only its tensor, constants, and tensors that depend on no node of
    `LAYERS`, such as a mask.
    """
    computed = set(input_names(graph))
    last = find_last_readers(graph)

    # A cut is where only one live tensor depends on a layer
    cuts = {}
    live = computed & last.keys()  # tensors that a later node reads
    early = set(computed)  # tensors that depend on no layer
    for i, node in enumerate(graph.node):
        taken = computed.intersection(inputs_of(node))
        if not taken:  # the node depends on constants only
            continue
        if node.op_type not in LAYERS and early.issuperset(taken):
            early |= {*node.output}
        computed |= {*node.output}
        live |= {*node.output}
        live = {name for name in live if last.get(name, -1) > i}
        needed = live - early
        if not needed:
            needed = live
        if len(needed) == 1:
            [cuts[i]] = needed
    return cuts


def fused_activations(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return each Relu and Clip that is the only reader of its input.

    Behind a layer, frameworks can compute such a node in the layer's kernel, so both are quantized
    together.
    """
    links = Links(graph)
    fused = []
    for node in graph.node:
        if node.op_type in FUSED and links.only_reader(node.input[0]) is node:
            fused.append(node)
    return fused


def find_tail(
    graph: onnx.GraphProto, layers: Collection[str] = LAST
) -> tuple[list[onnx.NodeProto], list[onnx.NodeProto]]:
    """Return the layers on which no other layer depends, and the nodes that depend on these layers.

    Both lists are in graph order.

    Args:
        layers: the operators that count as layers.
    """
    ahead: set[str] = set()  # tensors that a layer depends on
    last: list[onnx.NodeProto] = []
    outputs: set[str] = set()  # outputs of the last layers
    tail: list[onnx.NodeProto] = []
    for node in reversed(graph.node):
        final = ahead.isdisjoint(node.output)
        if node.op_type in layers or not final:
            ahead.update(inputs_of(node))
        if final and node.op_type in layers:
            last.append(node)
            outputs.update(node.output)
        elif final:
            tail.append(node)

    # Keep only nodes of the tail that depend on a last layer
    behind = []
    for node in reversed(tail):
        if outputs.intersection(inputs_of(node)):
            outputs.update(node.output)
            behind.append(node)
    return last[::-1], behind


def attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    """Return an attribute of a node, or `default`.

    Pass the operator's default, because a file may leave the attribute out. Texts are bytes.

    >>> node = onnx.helper.make_node("Conv", ["x", "w"], ["y"], strides=[2, 2])
    >>> attribute(node, "strides", [1, 1]), attribute(node, "auto_pad", b"NOTSET")
    ([2, 2], b'NOTSET')
    """
    for item in node.attribute:
        if item.name == name:
            return onnx.helper.get_attribute_value(item)
    return default


def is_relu(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> bool:
    """Return whether a node is a Relu, or a Clip from 0 without a maximum."""
    if node.op_type == "Relu":
        return True
    if node.op_type != "Clip" or input_at(node, 2):
        return False
    lowest = constants.get(input_at(node, 1))
    return lowest is not None and not numpy_helper.to_array(lowest).any()


def is_grouped(node: onnx.NodeProto) -> bool:
    """Return whether a node is a grouped convolution, such as a depthwise one."""
    return node.op_type == "Conv" and attribute(node, "group", 1) > 1


def channel_axis(node: onnx.NodeProto) -> int:
    """Return the axis of a layer's weights that counts its output channels.

    A MatMul must have one matrix of weights, see `find_stacks`.

    >>> channel_axis(onnx.helper.make_node("Conv", ["x", "w"], ["y"]))  # [out, in, ...]
    0
    >>> channel_axis(onnx.helper.make_node("MatMul", ["x", "w"], ["y"]))  # [in, out]
    1
    """
    if node.op_type == "Gemm" and attribute(node, "transB", 0):
        return 0
    return 0 if node.op_type == "Conv" else 1


def _shorten(tail: list[str], counts: Mapping[tuple[str, ...], int]) -> str:
    """Return the shortest unique beginning of a name, or else the whole name, joined by dots.

    Args:
        counts: the number of names with each beginning.
    """
    length = 1
    while length < len(tail) and counts[tuple(tail[:length])] > 1:
        length += 1
    # Keep characters that MLflow's metrics allow
    return re.sub(r"[^\w.-]", "_", ".".join(tail[:length]))
