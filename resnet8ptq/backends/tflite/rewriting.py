"""Writes weights, biases and activation ranges of an ONNX graph into a .tflite file.

TensorFlow's converter reads the user's file, but corrections change the ONNX graph. A layer of the
converted file is matched to its node in the graph by its weights. The module also turns average
pools into means.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from ai_edge_litert.schema_py_generated import ActivationFunctionType, TensorType
from numpy.typing import NDArray

from resnet8ptq.backends.tflite import contents
from resnet8ptq.backends.tflite.contents import TfliteLayer
from resnet8ptq.calibration.statistics import Range, Ranges
from resnet8ptq.core.errors import QuantizationError, UnsupportedError
from resnet8ptq.graph.layers import fused_activations, weight_layers
from resnet8ptq.graph.links import Links
from resnet8ptq.graph.weights import (
    Array,
    biased_output,
    find_added_bias,
    read_bias,
    read_initializer,
    read_weights,
)
from resnet8ptq.precision.grid import Grid, WeightScheme
from resnet8ptq.precision.plan import Plan

# The operators' first versions with 4-bit weights, by TensorFlow's numbering.
_VERSIONS = {"CONV_2D": 7, "DEPTHWISE_CONV_2D": 7, "FULLY_CONNECTED": 10}
_BIAS_LIMIT = 2**30  # largest bias, in levels
_SAME_NETWORK = 1.0  # largest difference of matching weights, in levels; rounding makes 0.5
_SAME_BIAS = 0.01  # fraction of the largest bias

# Operators by their effect on the range of their first input.
_KEEP_RANGE = {
    "AVERAGE_POOL_2D",
    "MAX_POOL_2D",
    "PAD",
    "TRANSPOSE",
    "RESHAPE",
    "SQUEEZE",
    "EXPAND_DIMS",
}
# The operators whose output has a fixed range
_FIXED_RANGE = {"SOFTMAX", "LOGISTIC", "TANH", "L2_NORMALIZATION"}
_POOLS = ("AveragePool", "GlobalAveragePool")  # ONNX's names
_ARITHMETIC = {"ADD": "Add", "SUB": "Sub", "MUL": "Mul"}  # ONNX's names


@dataclass(frozen=True)
class Rounded:
    """A layer's integers for the file, with their scales [1 or channels].

    Attributes:
        weights: the integers in the file's layout.
        bias: the integers [channels]; None if the layer has no bias.
    """

    weights: NDArray[np.int64]
    scale: NDArray[np.float32]
    bias: NDArray[np.int64] | None
    bias_scale: NDArray[np.float32]


def write_corrected(
    content: bytes, fp32: onnx.GraphProto, corrected: onnx.GraphProto, plan: Plan, ranges: Ranges
) -> bytes:
    """Return the file with the weights and biases of `corrected`, rounded by `plan`, and `ranges`.

    Weights below 8 bits are stored in 4 bits. The bias of a MatMul is the constant of an Add after
    it.

    Args:
        content: a full-integer file from TensorFlow's converter.
        fp32: the network that was converted.
        corrected: the same graph with corrected weights and biases.
        ranges: activation ranges of `corrected`, by ONNX tensor name.

    Raises:
        ConfigError: the plan names an unknown layer.
        UnsupportedError: the file does not match the graph, see `match_layers` and
            `scale_activations`; or a corrected bias belongs to a layer without a bias.
        QuantizationError: the written file does not hold the chosen integers and scales.
    """
    model = contents.read_model(content)
    nodes = weight_layers(corrected)
    narrow = plan.narrow(nodes)
    names = match_layers(model, fp32)

    # Activations come first, because a bias has the scale of its layer's input
    scale_activations(model, names, graph=corrected, ranges=ranges)
    chosen = {}
    for layer, name in zip(contents.layers(model), names, strict=True):
        if name in narrow:
            # An operator's version tells a runtime which dtypes it needs
            layer.weights.type = TensorType.INT4
            code = model.operatorCodes[layer.operator.opcodeIndex]
            code.version = max(code.version, _VERSIONS[layer.code])
        rounded = _round(model, layer, graph=corrected, node=nodes[name], scheme=plan.scheme(name))
        contents.write_levels(
            model, tensor=layer.weights, levels=rounded.weights, scale=rounded.scale
        )
        layer.weights.quantization.quantizedDimension = layer.axis
        if rounded.bias is not None:
            contents.write_levels(
                model, tensor=layer.bias, levels=rounded.bias, scale=rounded.bias_scale
            )
        chosen[name] = rounded
    written = contents.write_model(model)
    check(written, chosen)
    return written


def match_layers(model: Any, fp32: onnx.GraphProto) -> list[str]:
    """Return, for each layer of the file, the short name of its node in the graph.

    Args:
        fp32: the network that the file was converted from.

    Raises:
        UnsupportedError: no node has the weights and the bias of a layer of the file, or two layers
            share their weights or bias.
    """
    nodes = weight_layers(fp32)
    left = list(weight_layers(fp32))  # each node matches one layer
    names: list[str] = []
    seen: set[int] = set()
    for layer in contents.layers(model):
        errors = {}
        for name in left:
            errors[name] = _difference(model, layer, read_weights(fp32, nodes[name]))
        nearest = min(errors, key=errors.__getitem__, default="")

        # A wrong pair would write one layer's weights into another
        if not nearest or errors[nearest] > _SAME_NETWORK:
            raise _unmatched(
                layer,
                "no layer of the ONNX graph has its weights, as after a Rescaling that TensorFlow "
                "folds into them; if dtype=int8, try backend.flow=onnx2tf",
            )
        if id(layer.weights) in seen or id(layer.bias) in seen:
            raise _unmatched(layer, "it shares weights with another layer")
        if not _same_bias(model, layer, graph=fp32, node=nodes[nearest]):
            raise _unmatched(layer, f"its bias is not that of {nearest} in the ONNX graph")
        seen.add(id(layer.weights))
        if layer.bias is not None:
            seen.add(id(layer.bias))
        left.remove(nearest)
        names.append(nearest)
    return names


def scale_activations(model: Any, names: list[str], graph: onnx.GraphProto, ranges: Ranges) -> None:
    """Set the scales and zero points of the int8 activations, in place.

    The outputs of operators in `_KEEP_RANGE` take the scale of their input. The outputs of those in
    `_FIXED_RANGE`, such as a softmax, keep their scale. `_pools_to_means` first turns some pools
    into means.

    Args:
        names: see `match_layers`.
        ranges: activation ranges by ONNX tensor name.

    Raises:
        UnsupportedError: the ONNX tensor of an activation that needs a range is unknown, or has no
            range.
    """
    tensors = model.subgraphs[0].tensors
    activations = _name_activations(model, names, graph)
    _pools_to_means(model, activations, graph, ranges)
    for index in model.subgraphs[0].inputs:
        if tensors[index].type == TensorType.INT8:
            _scale(tensors[index], ranges.get(activations.get(index, "")))

    # Follow the order of execution, because moves take the new scale of their input
    for code, operator in contents.operators(model):
        for index in operator.outputs:
            tensor = tensors[index]
            if tensor.type != TensorType.INT8 or code in _FIXED_RANGE:
                continue
            if code in _KEEP_RANGE:
                tensor.quantization = tensors[operator.inputs[0]].quantization
            else:
                _scale(tensor, ranges.get(activations.get(index, "")))


def check(content: bytes, chosen: Mapping[str, Rounded]) -> None:
    """Raise `QuantizationError` unless a file's layers hold the chosen integers and scales."""
    model = contents.read_model(content)
    for layer, (name, rounded) in zip(contents.layers(model), chosen.items(), strict=True):
        pairs = [(layer.weights, rounded.weights, rounded.scale)]
        if rounded.bias is not None:
            pairs.append((layer.bias, rounded.bias, rounded.bias_scale))
        for tensor, levels, scale in pairs:
            same = np.array_equal(contents.read_levels(model, tensor), levels)
            if not same or not np.array_equal(tensor.quantization.scale, scale):
                raise QuantizationError(f"{name}: the file does not hold the chosen levels")


def _unmatched(layer: TfliteLayer, reason: str) -> UnsupportedError:
    name = layer.name.partition(";")[0]  # the first of the fused parts
    return UnsupportedError(f"backend=tflite: {layer.code} {name}: {reason}")


def _difference(model: Any, layer: TfliteLayer, weights: Array) -> float:
    """Return the RMS difference of weights [output channels, ...] from a layer's, in levels.

    The difference is infinite if the numbers of weights or of output channels differ, or if the
    layer's weights are computed.
    """
    shape = layer.weights.shape
    fits = weights.size == np.prod(shape) and len(weights) == shape[layer.axis]
    if not fits or not contents.is_constant(model, layer.weights):
        return float("inf")
    error = _to_layout(layer, weights) - contents.read_values(model, layer.weights)
    scales = np.maximum(contents.scales(layer.weights), np.finfo(np.float32).tiny)
    return float(np.sqrt(np.square(error / scales).mean()))


def _to_layout(layer: TfliteLayer, weights: NDArray[Any]) -> NDArray[Any]:
    """Return weights [output channels, input channels, ...] in the operator's layout.

    A depthwise layer has the output channels last, all others the input channels.
    """
    axis = 0 if layer.code == "DEPTHWISE_CONV_2D" else 1
    moved = np.moveaxis(weights, axis, -1)
    return moved.reshape(layer.weights.shape)  # adds the height of 1 of one-dimensional layers


def _same_bias(
    model: Any, layer: TfliteLayer, graph: onnx.GraphProto, node: onnx.NodeProto
) -> bool:
    bias = _find_bias(model, layer, graph, node)
    if layer.bias is None:
        return not bias.any()
    stored = contents.read_values(model, layer.bias)
    error = np.abs(stored - bias) - contents.scales(layer.bias)
    return bool(np.all(error <= _SAME_BIAS * np.abs(bias).max()))


def _find_bias(
    model: Any, layer: TfliteLayer, graph: onnx.GraphProto, node: onnx.NodeProto
) -> NDArray[np.float64]:
    """Return the bias [channels] that the graph gives a layer of the file.

    The bias of a MatMul is the constant of an Add after it. Without such an Add, it is the bias of
    the file, or zero.
    """
    if node.op_type != "MatMul":
        return read_bias(graph, node).astype(np.float64)
    added = find_added_bias(graph, node)
    if added is not None:
        add, index = added
        return read_initializer(graph, add.input[index]).astype(np.float64)
    if layer.bias is not None:
        return contents.read_values(model, layer.bias)
    return np.zeros(len(read_weights(graph, node)))


def _round(
    model: Any,
    layer: TfliteLayer,
    graph: onnx.GraphProto,
    node: onnx.NodeProto,
    scheme: WeightScheme,
) -> Rounded:
    weights = read_weights(graph, node)
    bias = _find_bias(model, layer, graph, node)
    if layer.bias is None and bias.any():
        raise _unmatched(layer, "it has no bias to correct")

    # A bias has the scale of the weights times that of the input
    input_scale = float(layer.input.quantization.scale[0])
    grid = _with_room(scheme.grid(weights, 0), weights, bias, input_scale=input_scale)
    scale = grid.scale.reshape(-1)
    bias_scale = (input_scale * scale.astype(np.float64)).astype(np.float32)
    levels = None
    if layer.bias is not None:
        levels = np.round(bias / bias_scale).astype(np.int64)
    arranged = _to_layout(layer, grid.quantize(weights) - grid.zero_point)
    return Rounded(arranged, scale, bias=levels, bias_scale=bias_scale)


def _with_room(grid: Grid, weights: Array, bias: NDArray[np.float64], input_scale: float) -> Grid:
    """Return the grid, with scales raised where the bias would exceed `_BIAS_LIMIT` levels.

    With a scale for each channel, a channel of zeros takes the largest scale of the others.
    """
    shape = (-1,) + (1,) * (weights.ndim - 1)
    needed = np.abs(bias) / (input_scale * _BIAS_LIMIT)
    scale = grid.scale.copy()
    if scale.size > 1:
        empty = ~weights.reshape(len(weights), -1).any(axis=1)  # any scale fits these channels
        scale[empty] = scale[~empty].max(initial=0) or 1
        least = needed.reshape(shape).astype(np.float32)
    else:
        least = np.array(needed.max(), np.float32)
    return replace(grid, scale=np.maximum(scale, least))


def _name_activations(model: Any, names: list[str], graph: onnx.GraphProto) -> dict[int, str]:
    """Return the ONNX name of each matched activation, by its index in the file.

    Matched activations are the graph's input, and the inputs and outputs of layers. So are sums,
    differences and products of matched activations, and copies in another scale.
    """
    nodes = weight_layers(graph)
    activations = dict.fromkeys(model.subgraphs[0].inputs, graph.input[0].name)
    fused = {node.input[0]: node.output[0] for node in fused_activations(graph)}
    matched = {}  # outputs of the layers' nodes, by operator
    for layer, name in zip(contents.layers(model), names, strict=True):
        # The Add of a bias after a MatMul is a part of the file's layer
        node = nodes[name]
        output = node.output[0] if layer.bias is None else biased_output(graph, node)
        matched[id(layer.operator)] = output
        activations[layer.operator.inputs[0]] = node.input[0]

    # Name the outputs in order, because sums are found by the names of their inputs
    for code, operator in contents.operators(model):
        output = matched.get(id(operator), "")
        if code == "QUANTIZE" and operator.inputs[0] in activations:  # a float input, or rescaling
            activations.setdefault(operator.outputs[0], activations[operator.inputs[0]])
        if code in _ARITHMETIC:
            names_in = [activations.get(index, "") for index in operator.inputs]
            joining = _find_node(graph, _ARITHMETIC[code], names_in)
            output = "" if joining is None else joining.output[0]
        if not output:
            continue

        # With a fused activation, the output is that of the activation
        if operator.builtinOptions.fusedActivationFunction != ActivationFunctionType.NONE:
            output = fused.get(output, "")
        if output:
            activations.setdefault(operator.outputs[0], output)
    return activations


def _find_node(graph: onnx.GraphProto, kind: str, inputs: list[str]) -> onnx.NodeProto | None:
    """Return the first node of a kind with these inputs, in any order; None without such a node."""
    wanted = sorted(inputs)
    for node in graph.node:
        if node.op_type == kind and sorted(node.input) == wanted:
            return node
    return None


def _pools_to_means(
    model: Any, activations: dict[int, str], graph: onnx.GraphProto, ranges: Ranges
) -> None:
    """Turn average pools over whole maps into means, in place, if `ranges` has their outputs.

    TFLite gives a pool's output the range of the pool's input, which is often several times wider.
    The output of a mean has its own range. A pool stays a pool if the ONNX tensor of its input is
    unknown, or if several ONNX pools read that tensor.

    Args:
        activations: see `_name_activations`; the outputs of the means are added.
    """
    links = Links(graph)
    for operator in _whole_pools(model):
        readers = links.readers(activations.get(operator.inputs[0], ""))

        # Only one pool that reads the tensor can be the file's operator
        names = []
        for node in readers:
            if node.op_type in _POOLS:
                names.append(node.output[0])
        if len(names) == 1 and names[0] in ranges:
            contents.to_mean(model, operator)
            activations[operator.outputs[0]] = names[0]


def pools_to_means(model: Any) -> None:
    """Turn each average pool over a whole map of a float file into a mean, in place."""
    for operator in _whole_pools(model):
        contents.to_mean(model, operator)


def _whole_pools(model: Any) -> list[Any]:
    """Return the average pools over whole maps, without a fused activation."""
    tensors = model.subgraphs[0].tensors
    pools = []
    for code, operator in contents.operators(model):
        if code == "AVERAGE_POOL_2D":
            source = tensors[operator.inputs[0]]
            result = tensors[operator.outputs[0]]
            if _covers(operator, source, result):
                pools.append(operator)
    return pools


def _covers(operator: Any, source: Any, result: Any) -> bool:
    """Return whether a pool only averages each channel of [N, H, W, C] over the whole map."""
    options = operator.builtinOptions
    size = [options.filterHeight, options.filterWidth]
    single = [*result.shape[1:3]] == [1, 1]
    plain = options.fusedActivationFunction == ActivationFunctionType.NONE
    return plain and single and size == [*source.shape[1:3]]


def _scale(tensor: Any, limits: Range | None) -> None:
    if limits is None:
        raise UnsupportedError(
            f"backend=tflite: {contents.name_of(tensor)}: the ONNX graph has no such activation, "
            "and so no range"
        )
    low = min(limits[0], 0.0)
    high = max(limits[1], 0.0)
    scale = np.float32((high - low) / 255) or np.float32(1)
    tensor.quantization.scale = np.array([scale], np.float32)
    tensor.quantization.zeroPoint = np.array([round(-128 - low / float(scale))], np.int64)
