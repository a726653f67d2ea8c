"""Passes around ONNX Runtime's quantizer, where the quantizer lacks an option or has a fault.

- Weights below 8 bits: ONNX has int4 and 16-bit activations since opset 21, int2 since opset 25.
- `float_output`: the outputs of the last layers, and the nodes after them, stay in float. An 8-bit
  softmax gives tied top scores, and 8-bit logits are coarser than the last layer's 32-bit sums. In
  QOperator format, QGemm is the only integer operator that can return its sums as float.
- The quantizer overlooks readers in inner graphs and clips some outputs of the graph. An Identity
  keeps these tensors.
- The quantizer would remove some Relu and Clip nodes wrongly, and clip the constant of some Pads.
  These nodes stay in float.
- Float layers between quantized ones, and sums before normalizations, are protected from ONNX
  Runtime's optimizer.
- Embedding tables in 8 bits: the quantizer would dequantize a whole table for every batch.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper, version_converter

from resnet8ptq.backends.onnx import dynamic
from resnet8ptq.core.errors import UnsupportedError, errors_as
from resnet8ptq.graph.embeddings import round_rows
from resnet8ptq.graph.layers import (
    FUSED,
    LAST,
    MOVING,
    channel_axis,
    constant_pads,
    find_offset_clips,
    find_tail,
    weight_layers,
)
from resnet8ptq.graph.links import Links
from resnet8ptq.graph.passes import (
    Pass,
    Writer,
    all_inputs,
    input_of,
    producer_of,
    replace,
    replace_node,
    store,
    values_of,
)
from resnet8ptq.graph.qdq import AT_OUTPUT
from resnet8ptq.graph.weights import read_bias, read_weights
from resnet8ptq.precision.grid import WeightScheme

# Bits of a level in the file -> tensor type, and the first opset and IR version that have it.
_TYPES = {4: (TensorProto.INT4, 21, 10), 2: (TensorProto.INT2, 25, 13)}
_INTEGER = ("QGemm", "QLinearConv", "QLinearMatMul")
# Operators whose output has the scale of the input in QOperator format
_SAME_SCALE = (*MOVING, "Gather", "MaxPool", "Pad", "Resize", "Split")
# Operators whose float weights ONNX Runtime may round when it loads a file
_ROUNDED = ("Conv", "ConvTranspose", "Gemm")
_NARROW = {ir.DataType.INT4, ir.DataType.INT2}
_EIGHT_BITS = (
    "float_output with format=qoperator: the last layer becomes {}, which returns 8 bits; expected "
    "format=auto or format=qdq"
)


def raise_opset_for_bits(proto: onnx.ModelProto, bits: int) -> onnx.ModelProto:
    """Return the network in an opset that supports these weight bits and 16-bit activations.

    Args:
        bits: the fewest bits of a layer's weights; 8 for 16-bit activations alone.

    Raises:
        UnsupportedError: an operator cannot be converted.
    """
    stored = 4  # 3-bit weights are stored in 4 bits; 16-bit activations need the same opset
    if bits == 2:
        stored = 2
    _, opset, ir_version = _TYPES[stored]
    (version,) = [entry.version for entry in proto.opset_import if not entry.domain]
    raised = proto
    if version < opset:
        reason = f"its operators do not convert to opset {opset}, which has the dtype's integers"
        with errors_as(UnsupportedError, reason):
            raised = version_converter.convert_version(proto, opset)
    raised.ir_version = max(raised.ir_version, ir_version)
    return raised


def write_narrow_weights(network: onnx.GraphProto, schemes: Mapping[str, WeightScheme]) -> Pass:
    """Return a pass that stores the weights of some layers of a QDQ graph in 4 or 2 bits.

    Rounded biases of these layers become floats, because the layers compute in float.

    Args:
        network: the network with the float weights.
        schemes: the schemes of the layers to change, by short name.
    """

    def write(model: ir.Model) -> None:
        layers = weight_layers(network)
        originals = Links(network)
        nodes = {node.name: node for node in model.graph}
        for name, scheme in schemes.items():
            layer = layers[name]
            node = nodes[layer.name]
            weights = read_weights(originals, layer)
            grid = scheme.grid(weights, 0)
            levels = np.moveaxis(grid.quantize(weights), 0, channel_axis(layer))
            # ONNX Runtime 1.31 fuses a Gemm with 2-bit weights and computes wrong values: store 4
            # bits.
            bits = 4
            if scheme.bits == 2 and layer.op_type == "Conv":
                bits = 2
            kind, _, _ = _TYPES[bits]
            shape: tuple[int, ...] = ()
            if scheme.per_channel:
                shape = (-1,)
            scales = grid.scale.reshape(shape)

            # Replace the 8-bit weights, and the rounded bias
            dequantize = producer_of(node, 1)
            assert dequantize is not None
            stored = helper.make_tensor("", kind, levels.shape, levels.ravel())
            store(input_of(dequantize, 0), stored)
            store(input_of(dequantize, 1), numpy_helper.from_array(scales))
            dequantize.resize_inputs(2)  # symmetric weights need no zero_point
            bias = producer_of(node, 2)
            if bias is not None:  # the layer computes in float, and a float bias is smaller
                exact = f"{bias.outputs[0].name}_float"
                values = read_bias(originals, layer)
                node.replace_input_with(2, Writer(node).constant(exact, values))

    return write


def add_readers(model: ir.Model) -> None:
    """Copy tensors that ONNX Runtime's quantizer may remove or clip; Identity nodes copy them.

    The quantizer sees no readers in inner graphs, and may remove a tensor that they need. It may
    also clip an output of the graph to the range of a Relu or Clip that reads it. The copy of an
    output has another name until `restore_outputs` runs.
    """
    graph = model.graph

    # Tensors that inner graphs read
    for node in list(graph):
        for value in node.outputs:
            inside = [use for use in value.uses() if use.node.graph is not graph]
            if inside:
                copy = _copy_after(node, value, f"{value.name}__read_inside")
                for use in inside:
                    use.node.replace_input_with(use.idx, copy)

    # Outputs of the graph, before a Relu that would clip them
    for index, value in enumerate(graph.outputs):
        producer = value.producer()
        if producer is not None and any(use.node.op_type in FUSED for use in value.uses()):
            copy = _copy_after(producer, value, f"{value.name}__output")
            copy.type = value.type
            copy.shape = value.shape
            graph.outputs[index] = copy


def _copy_after(node: ir.Node, value: ir.Value, name: str) -> ir.Value:
    """Return the output of a new Identity, inserted after the node that computes a tensor."""
    copy = ir.node("Identity", [value], outputs=[ir.Value(name=name)], name=name)
    node.append(copy)
    return copy.outputs[0]


def restore_outputs(names: Sequence[str]) -> Pass:
    """Return a pass that gives the outputs their names back, which `add_readers` changed.

    Args:
        names: the names of the network's outputs, in their order.
    """

    def restore(model: ir.Model) -> None:
        renamed = {}
        for name, value in zip(names, model.graph.outputs, strict=True):
            if value.name != name:
                renamed[name] = value
        if not renamed:
            return

        # Free the names, which the tensors before the copies have
        for node in model.graph:
            for value in node.outputs:
                if value.name in renamed:
                    value.name += AT_OUTPUT
        for name, value in renamed.items():
            value.name = name

    return restore


def find_not_fused(graph: onnx.GraphProto, qoperator: bool) -> list[str]:
    """Return the names of the nodes that ONNX Runtime's quantizer may replace wrongly.

    The quantizer may remove a Relu or Clip because the range of its output clips the values.
    However, a range in 8 bits includes 0, unlike the interval of some Clips. Clips whose interval
    is unknown are returned too. In QOperator format the quantizer may also remove a Relu or Clip
    whose input keeps another range: an input that other nodes read or the graph returns, or that
    has the scale of an earlier tensor (`_SAME_SCALE`). That format also clips the constant of a Pad
    to the range of the Pad's input.

    Args:
        qoperator: whether the file has QOperator format.
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

    # A Pad with zeros is exact, because each range includes 0
    for node, is_zero in constant_pads(graph):
        if not is_zero:
            names.append(node.name)
    return names


def find_output_nodes(graph: onnx.GraphProto) -> list[str]:
    """Return the names of the nodes after the last layers of an FP32 graph.

    Raises:
        UnsupportedError: a Relu or Clip follows a last layer, so that the layer's kernel would
            compute it; or the graph has no layer.
    """
    wrong = "float_output: got {} before the output, expected a layer"
    last, behind = find_tail(graph)
    outputs = {layer.output[0] for layer in last}
    for node in behind:
        if node.op_type in FUSED and node.input[0] in outputs:
            raise UnsupportedError(wrong.format(node.op_type))
    if not last:
        raise UnsupportedError(wrong.format("nothing"))
    return [node.name for node in behind]


def check_float_output(graph: onnx.GraphProto, skipped: Collection[str]) -> None:
    """Check that format=qoperator can return the sums of an FP32 graph's last layers as float.

    Args:
        skipped: names of the nodes without a static range.

    Raises:
        UnsupportedError: the integer operator of a last layer returns 8 bits only.
    """
    last, _ = find_tail(graph)
    for layer in last:
        # ConvTranspose has no integer operator
        is_float = layer.op_type == "ConvTranspose" or layer.name in skipped
        if layer.op_type != "Gemm" and not is_float:
            raise UnsupportedError(_EIGHT_BITS.format(f"QLinear{layer.op_type}"))


def leave_output_in_float(model: ir.Model) -> None:
    """Remove the quantization of the last layers' outputs from a quantized graph.

    Raises:
        UnsupportedError: the integer operator of a last layer returns 8 bits only.
    """
    for layer in _find_last(model.graph):
        if layer.op_type in dynamic.LAYERS:  # dynamic layers have float outputs already
            continue
        output = layer.outputs[0]
        rounded = []  # the output, after quantization
        if layer.op_type in LAST:  # QDQ, or a float layer
            for node in output.consumers():
                if node.op_type == "QuantizeLinear":
                    rounded.append(node.outputs[0])
        elif layer.op_type == "QGemm":
            layer.resize_inputs(7)  # without y_scale and y_zero_point, QGemm returns float
            rounded.append(output)
        else:
            raise UnsupportedError(_EIGHT_BITS.format(layer.op_type))

        # Readers of the dequantized output take the float output
        for value in rounded:
            for dequantize in value.consumers():
                replace(dequantize.outputs[0], output)


def _find_last(graph: ir.Graph) -> list[ir.Node]:
    """Return the layers of a quantized graph that no other layer follows."""
    ahead: set[ir.Value] = set()  # tensors that a layer depends on
    last = []
    for node in reversed(graph):
        is_layer = node.op_type in (*LAST, *_INTEGER, *dynamic.LAYERS)
        is_final = ahead.isdisjoint(node.outputs)
        if is_layer or not is_final:
            ahead.update(all_inputs(node))
        if is_layer and is_final:
            last.append(node)
    return last


def protect_float_layers(model: ir.Model) -> None:
    """Insert a Sum of one input before each float layer that ONNX Runtime may round.

    On loading, ONNX Runtime's WeightBiasQuantization (since 1.21) changes a float Conv,
    ConvTranspose or Gemm between DequantizeLinear and QuantizeLinear. It rounds the weights with
    one scale for all channels, and the layer runs on integers:
    https://github.com/microsoft/onnxruntime/pull/22969. A session option turns this off, but every
    user of the file would need to set it. None of ONNX Runtime's optimizers (1.31) removes the Sum.
    A Conv or Gemm with weights below 8 bits computes in float and needs the Sum too: otherwise its
    bias may be rounded, and 2-bit weights may reach integer kernels that do not support them
    (1.31).
    """
    for node in model.graph:
        dequantize = producer_of(node, 0)
        if node.op_type not in _ROUNDED or dequantize is None:
            continue
        if dequantize.op_type != "DequantizeLinear":
            continue

        # Float weights are constants; narrow weights come from DequantizeLinear
        weights = input_of(node, 1)
        source = producer_of(node, 1)
        narrow = source is not None and _has_narrow_input(source)
        if narrow or (weights.is_initializer() and _is_quantized(node.outputs[0])):
            name = f"{node.outputs[0].name}_float_input"
            node.replace_input_with(0, Writer(node)("Sum", [node.inputs[0]], name))


def _has_narrow_input(node: ir.Node) -> bool:
    return any(value is not None and value.dtype in _NARROW for value in node.inputs)


def keep_sums_apart(model: ir.Model) -> None:
    """Replace each Add before a LayerNormalization or a ReduceMean by a Sum.

    On loading, ONNX Runtime fuses an Add with a layer normalization into a SkipLayerNormalization,
    which is slower on a CPU than both. No optimizer fuses a Sum.
    """
    for node in model.graph:
        # A normalization in single operators begins with ReduceMean
        if node.op_type in ("LayerNormalization", "ReduceMean"):
            add = producer_of(node, 0)
            if add is not None and add.op_type == "Add":
                add.op_type = "Sum"


def _is_quantized(value: ir.Value) -> bool:
    """Return whether QuantizeLinear follows, directly or after a chain of single consumers."""
    while not value.is_graph_output() and len(value.consumers()) == 1:
        [reader] = value.consumers()
        if reader.op_type == "QuantizeLinear":
            return True
        value = reader.outputs[0]
    return False


def quantize_tables(names: Collection[str]) -> Pass:
    """Return a pass that stores the tables of the Gather nodes `names` in 8 bits; see `round_rows`.

    The float tables stay in the graph; `remove_unused` removes those without other readers.
    """

    def quantize(model: ir.Model) -> None:
        stored: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
        for node in list(model.graph):
            if node.name not in names:
                continue
            write = Writer(node)
            [table, indices] = node.inputs
            [output] = node.outputs
            assert table is not None
            if table not in stored:  # several nodes may read one table
                levels, scale = round_rows(values_of(table))
                stored[table] = (
                    write.constant(f"{table.name}__levels", levels),
                    write.constant(f"{table.name}__scale", scale),
                )

            # Look up the levels and the scale of each row, then multiply
            levels_of_rows, scale_of_rows = stored[table]
            rows = write("Gather", [levels_of_rows, indices], f"{output.name}__levels")
            numbers = write("Cast", [rows], f"{output.name}__float", to=TensorProto.FLOAT)
            scales = write("Gather", [scale_of_rows, indices], f"{output.name}__scale")
            rows = write("Mul", [numbers, scales], str(output.name), str(node.name))
            replace_node(node, rows)

    return quantize
