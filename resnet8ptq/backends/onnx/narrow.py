"""Weights below 8 bits in a QDQ graph: ONNX has int4 since opset 21, and int2 since 25."""

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, version_converter

from resnet8ptq.core.errors import UnsupportedError, errors_as
from resnet8ptq.graph.layers import channel_axis, weight_layers
from resnet8ptq.graph.weights import read_bias, read_weights
from resnet8ptq.precision.grid import WeightScheme

# Bits of a level in the file -> tensor type, and the first opset and IR version that have it.
_TYPES = {4: (TensorProto.INT4, 21, 10), 2: (TensorProto.INT2, 25, 13)}


def raise_opset(proto: onnx.ModelProto, schemes: Mapping[str, WeightScheme]) -> onnx.ModelProto:
    """Return the network in an opset that has the types of the schemes.

    Raises:
        UnsupportedError: an operator cannot be converted.
    """
    _, opset, ir_version = _TYPES[2 if any(s.bits == 2 for s in schemes.values()) else 4]
    (version,) = [entry.version for entry in proto.opset_import if not entry.domain]
    raised = proto
    if version < opset:
        reason = f"weights below 8 bits: its operators do not convert to opset {opset}"
        with errors_as(UnsupportedError, reason):
            raised = version_converter.convert_version(proto, opset)
    raised.ir_version = max(raised.ir_version, ir_version)
    return raised


def write_levels(
    written: onnx.ModelProto, network: onnx.GraphProto, schemes: Mapping[str, WeightScheme]
) -> None:
    """Replace the weights of layers in a QDQ graph, in place.

    Args:
        written: the network as quantized by ONNX Runtime in 8 bits.
        network: has the float weights.
        schemes: by the layers' short names.
    """
    graph = written.graph
    nodes = {node.name: node for node in graph.node}
    producers = {node.output[0]: node for node in graph.node}
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    layers = weight_layers(network)
    for name, scheme in schemes.items():
        layer = layers[name]
        weights = read_weights(network, layer)
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
            exact = numpy_helper.from_array(read_bias(network, layer), f"{bias.output[0]}_float")
            graph.initializer.append(exact)
            nodes[layer.name].input[2] = exact.name
            graph.node.remove(bias)
    used = {name for node in graph.node for name in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
