"""Weights, biases and activation ranges of our own, in a file that TensorFlow's converter made.

The converter takes the network from its own file, corrections change the ONNX graph. What the two
have in common are the weights, by which a layer of the file finds its node in the graph.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from ai_edge_litert.schema_py_generated import ActivationFunctionType, Padding, TensorType
from numpy.typing import NDArray

from resnet8ptq.backends.tflite import contents
from resnet8ptq.backends.tflite.contents import Layer
from resnet8ptq.calibration.statistics import Range, Ranges
from resnet8ptq.core.errors import QuantizationError, UnsupportedError
from resnet8ptq.graph.layers import FUSED, consumers, weight_layers
from resnet8ptq.graph.weights import Array, read_bias, read_weights
from resnet8ptq.precision.grid import Grid, WeightScheme
from resnet8ptq.precision.plan import Plan

# Of the operators, as TensorFlow counts them, that take 4-bit weights.
_VERSIONS = {"CONV_2D": 7, "DEPTHWISE_CONV_2D": 7, "FULLY_CONNECTED": 10}
_BIAS_LIMIT = 2**30  # levels
_SAME_NETWORK = 1.0  # levels that weights of one layer differ by at most, of which 0.5 is rounding
_SAME_BIAS = 0.01  # of the largest bias

# Operators by what they do to the range of their first input.
_KEEP_RANGE = {
    *("AVERAGE_POOL_2D", "MAX_POOL_2D", "PAD", "TRANSPOSE"),
    *("RESHAPE", "SQUEEZE", "EXPAND_DIMS"),
}
_FIXED_RANGE = {"SOFTMAX", "LOGISTIC", "TANH", "L2_NORMALIZATION"}  # of the output
_POOLS = ("AveragePool", "GlobalAveragePool")  # in ONNX
_ARITHMETIC = {"ADD": "Add", "SUB": "Sub", "MUL": "Mul"}  # in ONNX


@dataclass(frozen=True)
class Rounded:
    """A layer's integers as the file holds them, with their scales [1 or channels].

    Attributes:
        weights: in the file's layout.
        bias: None where the layer has none.
    """

    weights: NDArray[np.int64]
    scale: NDArray[np.float32]
    bias: NDArray[np.int64] | None
    bias_scale: NDArray[np.float32]


def rewrite(
    content: bytes,
    fp32: onnx.GraphProto,
    corrected: onnx.GraphProto,
    plan: Plan,
    ranges: Ranges,
) -> bytes:
    """Return the file with the weights and biases of `corrected`, rounded by `plan`.

    Weights of less than 8 bits are stored in 4.

    Args:
        content: of a file with integers throughout, that TensorFlow's converter made.
        fp32: the network that it was made from.
        corrected: the same graph with other weights and biases.
        ranges: of the activations of `corrected`, by ONNX tensor name.

    Raises:
        ConfigError: the plan names a layer that is not there.
        UnsupportedError: file and graph cannot be matched, see `match` and `scale_activations`.
        QuantizationError: the file does not hold what it should.
    """
    model, nodes = contents.read(content), weight_layers(corrected)
    narrow = plan.narrow(nodes)
    names = match(model, fp32)
    scale_activations(model, names, corrected, ranges)
    chosen = {}
    for layer, name in zip(contents.layers(model), names, strict=True):
        if name in narrow:
            _to_4_bits(model, layer)
        rounded = _round(model, layer, corrected, nodes[name], plan.scheme(name))
        contents.write_levels(model, layer.weights, rounded.weights, rounded.scale)
        layer.weights.quantization.quantizedDimension = layer.axis
        if rounded.bias is not None:
            contents.write_levels(model, layer.bias, rounded.bias, rounded.bias_scale)
        chosen[name] = rounded
    written = contents.write(model)
    check(written, chosen)
    return written


def match(model: Any, fp32: onnx.GraphProto) -> list[str]:
    """Return the short name in the graph of each layer of the file.

    Raises:
        UnsupportedError: for a layer that no node of the graph has the weights of.
    """
    nodes, left = weight_layers(fp32), list(weight_layers(fp32))
    names: list[str] = []
    seen: set[int] = set()
    for layer in contents.layers(model):
        errors = {name: _difference(model, layer, read_weights(fp32, nodes[name])) for name in left}
        nearest = min(errors, key=errors.__getitem__, default="")
        if not nearest or errors[nearest] > _SAME_NETWORK:
            raise _unmatched(layer, "no layer of the ONNX graph has its weights")
        if {id(layer.weights), id(layer.bias)} & seen:
            raise _unmatched(layer, "it shares weights with another layer")
        if not _same_bias(model, layer, fp32, nodes[nearest]):
            raise _unmatched(layer, f"its bias is not that of {nearest} in the ONNX graph")
        seen |= {id(layer.weights)} | ({id(layer.bias)} if layer.bias is not None else set())
        left.remove(nearest)
        names.append(nearest)
    return names


def scale_activations(model: Any, names: list[str], graph: onnx.GraphProto, ranges: Ranges) -> None:
    """Set the scale and zero point of each int8 activation from `ranges`, by ONNX tensor name.

    Args:
        names: as `match` returns them.

    Raises:
        UnsupportedError: for an activation that is not known in the graph.
    """
    tensors = model.subgraphs[0].tensors
    known = _name_activations(model, names, graph)
    _free_pools(model, known, graph, ranges)
    made: list[tuple[int, str, Any]] = [(index, "", ()) for index in model.subgraphs[0].inputs]
    for code, operator in contents.operators(model):
        made += [(index, code, operator.inputs) for index in operator.outputs]
    for index, code, inputs in made:
        tensor = tensors[index]
        if tensor.type != TensorType.INT8 or code in _FIXED_RANGE:
            continue
        if code in _KEEP_RANGE:
            tensor.quantization = tensors[inputs[0]].quantization
        else:
            _scale(tensor, ranges.get(known.get(index, "")))


def check(content: bytes, chosen: Mapping[str, Rounded]) -> None:
    """Read a file's layers, which `chosen` has in their order.

    Raises:
        QuantizationError: naming the first layer that holds other integers or scales.
    """
    model = contents.read(content)
    for layer, (name, rounded) in zip(contents.layers(model), chosen.items(), strict=True):
        pairs = [(layer.weights, rounded.weights, rounded.scale)]
        if rounded.bias is not None:
            pairs.append((layer.bias, rounded.bias, rounded.bias_scale))
        for tensor, levels, scale in pairs:
            same = np.array_equal(contents.read_levels(model, tensor), levels)
            if not same or not np.array_equal(tensor.quantization.scale, scale):
                raise QuantizationError(f"{name}: the file holds other levels than were chosen")


def _unmatched(layer: Layer, reason: str) -> UnsupportedError:
    name = layer.name.partition(";")[0]  # of all that were fused
    return UnsupportedError(f"backend=tflite: {layer.code} {name}: {reason}")


def _difference(model: Any, layer: Layer, weights: Array) -> float:
    """Return by how many levels [output channels, ...] differ from the file's; root mean square."""
    shape = layer.weights.shape
    fits = weights.size == np.prod(shape) and len(weights) == shape[layer.axis]
    if not fits or not contents.is_constant(model, layer.weights):
        return float("inf")
    error = _to_layout(layer, weights) - contents.read_values(model, layer.weights)
    scales = np.maximum(contents.scales(layer.weights), np.finfo(np.float32).tiny)
    return float(np.sqrt(np.square(error / scales).mean()))


def _to_layout(layer: Layer, weights: NDArray[Any]) -> NDArray[Any]:
    """Turn [output channels, input channels, ...] into what the operator takes."""
    depthwise = layer.code == "DEPTHWISE_CONV_2D"
    moved = np.moveaxis(weights, 0, -1) if depthwise else np.moveaxis(weights, 1, -1)
    return moved.reshape(layer.weights.shape)  # with a height of 1 in one dimension


def _same_bias(model: Any, layer: Layer, graph: onnx.GraphProto, node: onnx.NodeProto) -> bool:
    if node.op_type == "MatMul":
        return True  # it stays as it is in the file
    bias = read_bias(graph, node)
    if layer.bias is None:
        return not bias.any()
    found = contents.read_values(model, layer.bias)
    error = np.abs(found - bias) - contents.scales(layer.bias)
    return bool(np.all(error <= _SAME_BIAS * np.abs(bias).max()))


def _to_4_bits(model: Any, layer: Layer) -> None:
    layer.weights.type = TensorType.INT4
    code = model.operatorCodes[layer.operator.opcodeIndex]
    code.version = max(code.version, _VERSIONS[layer.code])


def _round(
    model: Any, layer: Layer, graph: onnx.GraphProto, node: onnx.NodeProto, scheme: WeightScheme
) -> Rounded:
    """Round a layer of the corrected network."""
    weights = read_weights(graph, node)
    bias = np.zeros(len(weights))
    if node.op_type != "MatMul":
        bias = read_bias(graph, node).astype(np.float64)
    elif layer.bias is not None:
        bias = contents.read_values(model, layer.bias)
    if layer.bias is None and bias.any():
        raise _unmatched(layer, "it has no bias to correct")
    input_scale = float(layer.input.quantization.scale[0])
    grid = _with_room(scheme.grid(weights, 0), weights, bias, input_scale)
    scale = grid.scale.reshape(-1)
    bias_scale = (input_scale * scale.astype(np.float64)).astype(np.float32)
    levels = np.round(bias / bias_scale).astype(np.int64)
    placed = _to_layout(layer, grid.quantize(weights) - grid.zero_point)
    return Rounded(placed, scale, None if layer.bias is None else levels, bias_scale)


def _with_room(grid: Grid, weights: Array, bias: NDArray[np.float64], input_scale: float) -> Grid:
    """Return a grid whose scales let the bias be 32 bits, in steps that are not too large."""
    shape = (-1,) + (1,) * (weights.ndim - 1)
    needed = np.abs(bias) / (input_scale * _BIAS_LIMIT)
    scale = grid.scale.copy()
    if scale.size > 1:
        empty = ~weights.reshape(len(weights), -1).any(axis=1)  # whose scale could be anything
        scale[empty] = scale[~empty].max(initial=0) or 1
        return replace(grid, scale=np.maximum(scale, needed.reshape(shape).astype(np.float32)))
    return replace(grid, scale=np.maximum(scale, np.float32(needed.max())))


def _name_activations(model: Any, names: list[str], graph: onnx.GraphProto) -> dict[int, str]:
    """Return the ONNX name of each activation that can be told, by its place in the file.

    What a layer takes or makes has the name that it has in the graph; so has a sum or product of
    such tensors.
    """
    nodes = weight_layers(graph)
    known = dict.fromkeys(model.subgraphs[0].inputs, graph.input[0].name)
    operators = list(contents.operators(model))
    layers = [operator for code, operator in operators if code in contents.LAYERS]
    matched = {id(layer): nodes[name] for layer, name in zip(layers, names, strict=True)}
    for operator in layers:
        known[operator.inputs[0]] = matched[id(operator)].input[0]
    for code, operator in operators:
        node = matched.get(id(operator))
        if code == "QUANTIZE" and operator.inputs[0] in known:  # of a float input, or to rescale
            known.setdefault(operator.outputs[0], known[operator.inputs[0]])
        if code in _ARITHMETIC:
            inputs = sorted(known.get(index, "") for index in operator.inputs)
            alike = [n for n in graph.node if n.op_type == _ARITHMETIC[code]]
            node = next((n for n in alike if sorted(n.input) == inputs), None)
        if node is not None:
            made = _behind(graph, node.output[0], operator.builtinOptions.fusedActivationFunction)
            if made is not None:
                known.setdefault(operator.outputs[0], made)
    return known


def _free_pools(model: Any, known: dict[int, str], graph: onnx.GraphProto, ranges: Ranges) -> None:
    """Turn average pools over whole maps into means, whose outputs have a range of their own.

    TFLite gives an average pool the range of its input, which is several times that of its output.

    Args:
        known: names of activations, as `_name_activations` returns them; those of the means come to
            it.
    """
    tensors = model.subgraphs[0].tensors
    for code, operator in contents.operators(model):
        if code != "AVERAGE_POOL_2D" or not _covers(operator, tensors[operator.inputs[0]]):
            continue
        readers = consumers(graph, known.get(operator.inputs[0], ""))
        names = [node.output[0] for node in readers if node.op_type in _POOLS]
        if len(names) == 1 and names[0] in ranges:
            contents.to_mean(model, operator)
            known[operator.outputs[0]] = names[0]


def _covers(operator: Any, tensor: Any) -> bool:
    """Tell whether a pool makes one value of each channel, as it is, of [N, H, W, C]."""
    options = operator.builtinOptions
    size = [options.filterHeight, options.filterWidth]
    plain = options.fusedActivationFunction == ActivationFunctionType.NONE
    return plain and options.padding == Padding.VALID and size == [*tensor.shape[1:3]]


def _behind(graph: onnx.GraphProto, name: str, activation: int) -> str | None:
    """Return what an operator makes with its fused activation; None where the graph has none."""
    if activation == ActivationFunctionType.NONE:
        return name
    readers = consumers(graph, name)
    fused = len(readers) == 1 and readers[0].op_type in FUSED
    return readers[0].output[0] if fused else None


def _scale(tensor: Any, found: Range | None) -> None:
    """Set a tensor's scale and zero point."""
    if found is None:
        raise UnsupportedError(
            f"backend=tflite: {contents.name_of(tensor)}: the ONNX graph has no such activation, "
            "and so no range"
        )
    low, high = min(found[0], 0.0), max(found[1], 0.0)
    scale = np.float32((high - low) / 255) or np.float32(1)
    tensor.quantization.scale = np.array([scale], np.float32)
    tensor.quantization.zeroPoint = np.array([round(-128 - low / float(scale))], np.int64)
