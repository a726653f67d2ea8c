"""Rewrites the graphs of ONNX Runtime's quantizer, where the quantizer lacks an option.

- Weights below 8 bits: ONNX has int4 and 16-bit activations since opset 21, int2 since opset 25.
- `float_output`: the outputs of the last layers, and the nodes after them, stay in float. An 8-bit
  softmax gives tied top scores, and 8-bit logits are coarser than the last layer's 32-bit sums.
  Both formats of ONNX Runtime can return those sums as float.
- Float layers between quantized ones, and sums before normalizations, are protected from ONNX
  Runtime's optimizer.
- Nodes with inner graphs are moved after the producers of all tensors that the inner graphs use.
"""

from collections.abc import Collection, Mapping
from graphlib import TopologicalSorter

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, version_converter

from resnet8ptq.backends.onnx import dynamic
from resnet8ptq.core.errors import UnsupportedError, errors_as
from resnet8ptq.graph.layers import (
    FUSED,
    LAYERS,
    MOVING,
    channel_axis,
    constant_pads,
    find_offset_clips,
    find_tail,
    weight_layers,
)
from resnet8ptq.graph.links import Links
from resnet8ptq.graph.pruning import find_all, inputs_of, prune, remove_nodes
from resnet8ptq.graph.qdq import AT_OUTPUT
from resnet8ptq.graph.renaming import rename, rename_inside
from resnet8ptq.graph.weights import read_bias, read_weights
from resnet8ptq.precision.grid import WeightScheme

# Bits of a level in the file -> tensor type, and the first opset and IR version that have it.
_TYPES = {4: (TensorProto.INT4, 21, 10), 2: (TensorProto.INT2, 25, 13)}
_INTEGER = ("QGemm", "QLinearConv", "QLinearMatMul")
_SAME_SCALE = (*MOVING, "Gather", "MaxPool", "Pad", "Resize", "Split")  # in QOperator format
_ROUNDED = ("Conv", "ConvTranspose", "Gemm")  # on loading, see `protect_float_layers`
_EIGHT_BITS = (
    "float_output with format=qoperator: the last layer becomes {}, which returns 8 bits; expected "
    "format=auto or format=qdq"
)


def raise_opset(proto: onnx.ModelProto, bits: int) -> onnx.ModelProto:
    """Return the network in an opset that supports these weight bits and 16-bit activations.

    Raises:
        UnsupportedError: an operator cannot be converted.
    """
    _, opset, ir_version = _TYPES[2 if bits == 2 else 4]
    (version,) = [entry.version for entry in proto.opset_import if not entry.domain]
    raised = proto
    if version < opset:
        reason = f"its operators do not convert to opset {opset}, which has the dtype's integers"
        with errors_as(UnsupportedError, reason):
            raised = version_converter.convert_version(proto, opset)
    raised.ir_version = max(raised.ir_version, ir_version)
    return raised


def write_narrow_weights(
    written: onnx.ModelProto, network: onnx.GraphProto, schemes: Mapping[str, WeightScheme]
) -> None:
    """Replace the weights of layers in a QDQ graph, in place.

    Args:
        written: the network that ONNX Runtime has quantized to 8 bits.
        network: the network with the float weights.
        schemes: the weight schemes, by the layers' short names.
    """
    graph = written.graph
    nodes = {node.name: node for node in graph.node}
    links, originals = Links(graph), Links(network)
    producers, tensors = links.producers, links.constants
    layers = weight_layers(network)
    for name, scheme in schemes.items():
        layer = layers[name]
        weights = read_weights(originals, layer)
        grid = scheme.grid(weights, 0)
        levels = np.moveaxis(grid.quantize(weights), 0, channel_axis(layer))
        dequantize = producers[nodes[layer.name].input[1]]
        stored, scale = dequantize.input[:2]
        # ONNX Runtime 1.31 fuses 2-bit weights of a Gemm, and computes wrong values.
        kind = _TYPES[2 if scheme.bits == 2 and layer.op_type == "Conv" else 4][0]
        tensors[stored].CopyFrom(helper.make_tensor(stored, kind, levels.shape, levels.ravel()))
        scales = grid.scale.reshape(-1) if scheme.per_channel else grid.scale.reshape(())
        tensors[scale].CopyFrom(numpy_helper.from_array(scales, scale))
        del dequantize.input[2:]  # symmetric: no zero_point
        bias = producers.get(nodes[layer.name].input[2]) if len(layer.input) > 2 else None
        if bias is not None:  # the layer computes in float: a float bias is smaller
            exact = numpy_helper.from_array(read_bias(originals, layer), f"{bias.output[0]}_float")
            graph.initializer.append(exact)
            nodes[layer.name].input[2] = exact.name
    prune(graph)


def add_readers(graph: onnx.GraphProto) -> dict[str, str]:
    """Add an Identity for each reader that ONNX Runtime's quantizer overlooks, in place.

    The quantizer counts nodes only. It removes a tensor that it fuses or stores as integers,
    although an inner graph reads it; and it clips an output of the graph to the range of the Relu
    after it. Return the outputs that got another name, by their own, for `restore_outputs`.
    """
    links, nodes, copied = Links(graph), list[onnx.NodeProto](), set[str]()
    fused = {node.input[0] for node in graph.node if node.op_type in FUSED}
    for node in graph.node:
        inner = {*inputs_of(node)}.difference(node.input) & links.producers.keys()
        for name in sorted(inner):
            copy = f"{name}__read_inside"
            if name not in copied:
                nodes.append(helper.make_node("Identity", [name], [copy], copy))
                copied.add(name)
            for part in find_all(node, onnx.GraphProto):
                rename_inside(part, name, copy)
        nodes.append(node)
    renamed = {}
    for value in graph.output:
        if value.name in fused:
            renamed[value.name] = output = f"{value.name}__output"
            nodes.append(helper.make_node("Identity", [value.name], [output], output))
            value.name = output
    del graph.node[:]
    graph.node.extend(nodes)
    return renamed


def restore_outputs(graph: onnx.GraphProto, renamed: Mapping[str, str]) -> None:
    """Give the outputs of a quantized graph their own names again; see `add_readers`."""
    inside = {name: f"{name}{AT_OUTPUT}" for name in renamed}
    rename(graph, {**inside, **{output: name for name, output in renamed.items()}})


def find_not_fused(graph: onnx.GraphProto, qoperator: bool) -> list[str]:
    """Return the names of nodes that the rounding of a tensor would replace wrongly.

    ONNX Runtime's quantizer removes a Relu or Clip, since the range of its output cuts the values
    off. But a range in 8 bits includes 0, unlike the interval of some Clips. In QOperator format
    the quantizer also removes it if its input has another range: that of its other readers, or of
    the values that were moved. And it cuts the value of a Pad off at the range of the Pad's input.
    """
    names = find_offset_clips(graph)
    if not qoperator:
        return names
    links = Links(graph)
    for node in graph.node:
        if node.op_type not in FUSED or node.name in names:
            continue
        maker = links.producers.get(node.input[0])
        moved = maker is not None and maker.op_type in _SAME_SCALE
        if moved or links.only_reader(node.input[0]) is not node:
            names.append(node.name)
    return names + [node.name for node, is_zero in constant_pads(graph) if not is_zero]


def find_output_nodes(graph: onnx.GraphProto) -> list[str]:
    """Return the names of the nodes after the last layers of an FP32 graph.

    Raises:
        UnsupportedError: a last layer has an activation, which is fused into its kernel.
    """
    last, behind = find_tail(graph)
    outputs = {layer.output[0] for layer in last}
    fused = [node for node in behind if node.op_type in FUSED and node.input[0] in outputs]
    if fused or not last:
        kind = fused[0].op_type if fused else "nothing"
        raise UnsupportedError(f"float_output: got {kind} before the output, expected a layer")
    return [node.name for node in behind]


def check_float_output(graph: onnx.GraphProto, skipped: Collection[str]) -> None:
    """Check an FP32 graph: format=qoperator must be able to return the last layers' sums as float.

    Raises:
        UnsupportedError: the last layer's integer operator returns 8 bits only.
    """
    for layer in find_tail(graph)[0]:
        if layer.op_type != "Gemm" and layer.name not in skipped:
            raise UnsupportedError(_EIGHT_BITS.format(f"QLinear{layer.op_type}"))


def leave_output_in_float(proto: onnx.ModelProto) -> None:
    """Remove the quantization of the last layers' outputs from a quantized graph, in place.

    Raises:
        UnsupportedError: the last layer's integer operator returns 8 bits only.
    """
    graph, links = proto.graph, Links(proto.graph)
    for layer in find_tail(graph, (*LAYERS, *_INTEGER, *dynamic.LAYERS))[0]:
        if layer.op_type in dynamic.LAYERS:  # they return float
            continue
        behind = links.readers(layer.output[0])
        if layer.op_type in LAYERS:  # QDQ, or a float layer
            quantizes = [node for node in behind if node.op_type == "QuantizeLinear"]
            behind = [node for q in quantizes for node in links.readers(q.output[0])]
            remove_nodes(graph, quantizes)
        elif layer.op_type == "QGemm":
            del layer.input[7:]  # without y_scale and y_zero_point, QGemm returns float
        else:
            raise UnsupportedError(_EIGHT_BITS.format(layer.op_type))
        remove_nodes(graph, behind)
        for dequantize in behind:
            _merge(links, layer.output[0], dequantize.output[0])
    sort_nodes(graph)


def _merge(links: Links, layer: str, removed: str) -> None:
    """Let the readers of a removed tensor read that of the layer.

    If the removed tensor is an output of the graph, its name stays, and that of the layer goes.
    """
    names = (layer, removed) if removed in links.outputs else (removed, layer)
    rename_inside(links.graph, *names)


def protect_float_layers(graph: onnx.GraphProto) -> None:
    """Insert a Sum of one input before each float layer, in place.

    On loading, ONNX Runtime's WeightBiasQuantization (since 1.21) rounds the weights of a float
    Conv, ConvTranspose or Gemm between DequantizeLinear and QuantizeLinear, per tensor, and runs it
    on integers: https://github.com/microsoft/onnxruntime/pull/22969. Only a session option turns
    this off, and everyone who deploys the file would need to set it. No optimizer removes the Sum.
    Layers with weights below 8 bits need the same: they compute in float, their biases would be
    rounded, and 2-bit weights would reach integer kernels that do not take them (1.31).
    """
    constants = {tensor.name: tensor.data_type for tensor in graph.initializer}
    sources = {n.output[0]: n.input[0] for n in graph.node if n.op_type == "DequantizeLinear"}
    nodes, links = [], Links(graph)
    for node in graph.node:
        if node.op_type in _ROUNDED and node.input[0] in sources:
            kind = constants.get(sources.get(node.input[1], ""))
            narrow = kind in (TensorProto.INT4, TensorProto.INT2)
            if narrow or (node.input[1] in constants and _is_quantized(links, node.output[0])):
                name = f"{node.output[0]}_float_input"
                nodes.append(helper.make_node("Sum", [node.input[0]], [name], name))
                node.input[0] = name
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def keep_sums_apart(graph: onnx.GraphProto) -> None:
    """Replace each Add before a layer normalization by a Sum, in place.

    On loading, ONNX Runtime fuses such an Add with the normalization into a SkipLayerNormalization,
    which is slower on a CPU than both (docs/design.md). No optimizer fuses a Sum.
    """
    normalized = {
        node.input[0]
        for node in graph.node
        if node.op_type in ("LayerNormalization", "ReduceMean")  # whole, or in single operators
    }
    for node in graph.node:
        if node.op_type == "Add" and node.output[0] in normalized:
            node.op_type = "Sum"


def sort_nodes(graph: onnx.GraphProto) -> None:
    """Sort the nodes topologically if any has an inner graph.

    ONNX Runtime's quantizer ignores the tensors that inner graphs use.
    """
    nodes = list(graph.node)
    if not any(any(find_all(node, onnx.GraphProto)) for node in nodes):
        return
    makers = {name: index for index, node in enumerate(nodes) for name in node.output}
    taken = {
        index: {makers[name] for name in inputs_of(node) if name in makers}
        for index, node in enumerate(nodes)
    }
    del graph.node[:]
    graph.node.extend(nodes[index] for index in TopologicalSorter(taken).static_order())


def _is_quantized(links: Links, name: str) -> bool:
    """Return whether a tensor is quantized, directly or after a chain of single consumers."""
    while (reader := links.only_reader(name)) is not None:
        if reader.op_type == "QuantizeLinear":
            return True
        name = reader.output[0]
    return False
