"""Quantizes a float .tflite file with ai-edge-quantizer, by the ranges and float layers of a run.

The library's own calibration is not used: it averages over the samples in a way that depends on
their order.
"""

import io
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from ai_edge_litert.schema_py_generated import TensorType

from resnet8ptq.backends.tflite import contents
from resnet8ptq.calibration.statistics import Range
from resnet8ptq.core import isolation
from resnet8ptq.core.console import silenced
from resnet8ptq.core.errors import QuantizationError, UnsupportedError, errors_as
from resnet8ptq.graph.layers import LAYERS
from resnet8ptq.graph.links import Links
from resnet8ptq.precision.grid import fit_bias

# Operators that move or drop values. Without an ONNX node, they are quantized if their input is.
MOVES = {
    "MAX_POOL_2D",
    "PAD",
    "MIRROR_PAD",
    "TRANSPOSE",
    "RESHAPE",
    "SQUEEZE",
    "EXPAND_DIMS",
    "SLICE",
    "STRIDED_SLICE",
    "SPLIT",
    "SPACE_TO_DEPTH",
    "GATHER",
}
# A constant of these operators needs the scale of an activation. ai-edge-quantizer (0.10) sets it
# only if constant and activation have the same number of axes.
_SHARING = {"MAXIMUM", "MINIMUM", "PADV2"}
_FLOAT = {"DIV"}  # the integer kernel aborts if a divisor rounds to 0

log = logging.getLogger(__name__)

Recipe = list[dict[str, Any]]


@dataclass(frozen=True)
class Scheme:
    """The quantization of a file: scales of the weights, and levels of the activations.

    Attributes:
        per_channel: whether weights have a scale for each output channel; otherwise one for each
            tensor.
        symmetric: whether the zero points of activations are 0.
        integer_io: whether inputs and outputs are integers. With None, the inputs are integers if
            quantized operators read all of them, and the outputs if such operators make all of
            them.
        wide: whether activations have 16 bits instead of 8; `symmetric` must then be True.
    """

    per_channel: bool
    symmetric: bool = False
    integer_io: bool | None = None
    wide: bool = False


def find_quantized(
    model: Any, names: Mapping[int, list[str]], graph: onnx.GraphProto, skipped: Collection[str]
) -> list[Any]:
    """Return the file's operators to quantize: those of the graph's quantized nodes.

    An operator in `MOVES` without a node is added if it reads an input of the file, or an output of
    a returned operator. Operators of `_FLOAT` are left out, and those of `_SHARING` with a
    scalar, see `_has_scalar`.

    Args:
        names: the ONNX names of the file's tensors, see `correspondence.find_onnx_names`.
        skipped: names of the graph's nodes that stay in float.
    """
    producers = Links(graph).producers
    integer = {*model.subgraphs[0].inputs}  # indices of quantized tensors
    chosen = []
    for code, operator in contents.operators(model):
        output = int(operator.outputs[0])
        alike = names.get(output, [""])

        # Of equal tensors, the last is the output of a fused activation, the first the operator's
        if code in contents.LAYERS:
            node = _layer_before(alike[-1], producers)
        else:
            node = producers.get(alike[0])

        # A node decides; without one, a move has the dtype of its input
        quantized = node is not None and node.name not in skipped
        if node is None and code in MOVES:
            quantized = not integer.isdisjoint(operator.inputs)
        left = code in _FLOAT or (code in _SHARING and _has_scalar(model, operator))
        if quantized and not left:
            chosen.append(operator)
            integer.update(operator.outputs)
    return chosen


def _has_scalar(model: Any, operator: Any) -> bool:
    """Return whether an operator reads a float constant with fewer axes than its output."""
    tensors = model.subgraphs[0].tensors
    axes = len(tensors[int(operator.outputs[0])].shape)
    for index in operator.inputs:
        tensor = tensors[int(index)]
        is_float = tensor.type == TensorType.FLOAT32
        if is_float and contents.is_constant(model, tensor) and len(tensor.shape) < axes:
            return True
    return False


def _layer_before(name: str, producers: Mapping[str, onnx.NodeProto]) -> onnx.NodeProto | None:
    """Return the layer that a tensor comes from, through nodes such as a bias addition.

    Returns None if no node computes the tensor. Also returns None if a node on the way has several
    computed inputs, or none.
    """
    node = producers.get(name)
    while node is not None and node.op_type not in LAYERS:
        before = []
        for source in node.input:
            if source in producers:
                before.append(producers[source])
        node = before[0] if len(before) == 1 else None
    return node


def tensors_around(model: Any, operators: Iterable[Any]) -> set[int]:
    """Return the indices of the operators' tensors, and of the tensors moved into these.

    Operators in `MOVES` move tensors.
    """
    around: set[int] = set()
    for operator in operators:
        around.update(map(int, (*operator.inputs, *operator.outputs)))
    for code, operator in reversed([*contents.operators(model)]):
        if code in MOVES and not around.isdisjoint(operator.outputs):
            around.add(_source_of(code, operator))  # `_spread` passes its range on
    return around


def _spread(model: Any, ranges: Mapping[int, Range]) -> dict[int, Range]:
    """Return the ranges; an output of `MOVES` without one gets the range of the moved tensor."""
    known = dict(ranges)
    for code, operator in contents.operators(model):
        if code not in MOVES:
            continue
        source = _source_of(code, operator)
        if source in known:
            for index in operator.outputs:
                known.setdefault(int(index), known[source])
    return known


def _source_of(code: str, operator: Any) -> int:
    """Return the index of the tensor whose values an operator of `MOVES` moves."""
    position = 1 if code == "SPLIT" else 0  # the first input of SPLIT is the axis
    return int(operator.inputs[position])


def quantize(
    model: Any, operators: Sequence[Any], ranges: Mapping[int, Range], scheme: Scheme
) -> bytes:
    """Quantize operators of a float file; return its new content. `model` changes too.

    Args:
        operators: the operators to quantize. An operator stays in float if one of its
            activations has no range.
        ranges: the ranges of the file's activations, by index.

    Raises:
        QuantizationError: for each operator, a range is missing; or ai-edge-quantizer crashes.
        UnsupportedError: ai-edge-quantizer cannot quantize the network.
    """
    # Choose the operators whose ranges are known
    ranges = _spread(model, ranges)
    chosen = [operator for operator in operators if _is_known(model, operator, ranges)]
    if not chosen:
        raise QuantizationError("backend=tflite: no operator of the converted file is quantized")
    if len(chosen) < len(operators):
        log.warning(
            "%d of %d operators of the converted file stay in float: the ONNX graph has no tensors "
            "with their values, and so no ranges",
            len(operators) - len(chosen),
            len(operators),
        )
    if not scheme.wide:  # 16-bit activations come with 64-bit biases
        _fit_biases(model, ranges, scheme.per_channel)

    # Write the rules: of the rules that match an operator, the last holds
    config = _config(scheme)
    scopes = [_scope(model, operator.outputs) for operator in chosen]
    recipe = [_rule(scopes, operation="*", config=config)]
    ends = _integer_ends(model, chosen, scheme.integer_io)
    for kind, (indices, integer) in zip(("INPUT", "OUTPUT"), ends, strict=True):
        own = config if integer else None
        recipe.append(_rule([_scope(model, indices)], kind, own))
    crashed = QuantizationError("backend=tflite: ai-edge-quantizer crashed")
    content = contents.write_model(model)
    return isolation.call(_run, content, recipe, _statistics(model, ranges), crashed=crashed)


def _fit_biases(model: Any, ranges: Mapping[int, Range], per_channel: bool) -> None:
    """Raise weights near 0, in place, so that biases fit in 32 bits; see `grid.fit_bias`."""
    tensors = model.subgraphs[0].tensors
    known = {id(tensors[index]): limits for index, limits in ranges.items()}
    for layer in contents.layers(model):
        # Skip layers without a bias, and layers that stay in float because of their input
        if layer.bias is None or id(layer.input) not in known:
            continue
        if not (_is_float_constant(model, layer.weights) and _is_float_constant(model, layer.bias)):
            continue
        low, high = known[id(layer.input)]
        scale = (max(high, 0) - min(low, 0)) / 255
        if not scale:
            continue

        # `fit_bias` takes the output channels first
        weights = contents.read_floats(model, layer.weights)
        bias = contents.read_floats(model, layer.bias)
        by_channel = np.moveaxis(weights, layer.axis, 0)
        fitted = fit_bias(by_channel, bias, scale, per_channel=per_channel)
        fitted = np.moveaxis(fitted, 0, layer.axis)
        if not np.array_equal(fitted, weights):
            contents.write_floats(model, layer.weights, fitted)


def _is_float_constant(model: Any, tensor: Any) -> bool:
    return tensor.type == TensorType.FLOAT32 and contents.is_constant(model, tensor)


def _run(content: bytes, recipe: Recipe, statistics: dict[str, Any]) -> bytes:
    """Return the file that ai-edge-quantizer makes, without its progress bars and log."""
    from ai_edge_quantizer import quantizer

    failed = "backend=tflite: ai-edge-quantizer cannot quantize the network"
    failing = errors_as(UnsupportedError, failed, "try backend=onnx")
    with silenced(), redirect_stderr(io.StringIO()), failing:
        work = quantizer.Quantizer(content, recipe)
        result = work.quantize(statistics, enable_progress_report=False)
        return bytes(result.quantized_model)


def _config(scheme: Scheme) -> dict[str, Any]:
    """Return ai-edge-quantizer's configuration for operators that compute on integers."""
    activation_bits = 16 if scheme.wide else 8
    granularity = "CHANNELWISE" if scheme.per_channel else "TENSORWISE"
    return {
        "compute_precision": "INTEGER",
        "activation_tensor_config": {
            "num_bits": activation_bits,
            "symmetric": scheme.symmetric,
            "granularity": "TENSORWISE",
            "dtype": "INT",
        },
        "weight_tensor_config": {
            "num_bits": 8,
            "symmetric": True,
            "granularity": granularity,
            "dtype": "INT",
        },
    }


def _rule(scopes: Iterable[str], operation: str, config: dict[str, Any] | None) -> dict[str, Any]:
    """Return a recipe's rule for operators, by their scopes.

    Args:
        scopes: for each operator, the names of its outputs, see `_scope`.
        operation: the library's name of the operator type; `*` stands for all.
        config: see `_config`; None leaves the operators in float.
    """
    any_scope = "|".join(map(re.escape, scopes))
    algorithm = "min_max_uniform_quantize" if config else "no_quantize"
    return {
        "regex": f"^(?:{any_scope})$",
        "operation": operation,
        "algorithm_key": algorithm,
        "op_config": config or {},
    }


def _is_known(model: Any, operator: Any, ranges: Mapping[int, Range]) -> bool:
    """Return whether each float activation that an operator reads or writes has a range."""
    tensors = model.subgraphs[0].tensors
    for index in map(int, (*operator.inputs, *operator.outputs)):
        if index < 0 or index in ranges:  # an index below 0 stands for an omitted input
            continue
        tensor = tensors[index]
        if tensor.type == TensorType.FLOAT32 and not contents.is_constant(model, tensor):
            return False
    return True


def _integer_ends(
    model: Any, operators: Sequence[Any], asked: bool | None
) -> list[tuple[list[int], bool]]:
    """Return the graph's inputs and its outputs, each with whether they become integers.

    Args:
        asked: see `Scheme.integer_io`.
    """
    graph = model.subgraphs[0]
    inputs = [*map(int, graph.inputs)]
    outputs = [*map(int, graph.outputs)]
    if asked is not None:
        return [(inputs, asked), (outputs, asked)]

    # Without a setting, the quantized operators decide
    made: set[int] = set()
    read: set[int] = set()
    for operator in operators:
        made.update(map(int, operator.outputs))
        read.update(map(int, operator.inputs))
    return [(inputs, read.issuperset(inputs)), (outputs, made.issuperset(outputs))]


def _scope(model: Any, indices: Iterable[int]) -> str:
    """Return the names of tensors in the form that ai-edge-quantizer matches with a rule."""
    tensors = model.subgraphs[0].tensors
    return "".join(f"{contents.name_of(tensors[index])};" for index in indices)


def _statistics(model: Any, ranges: Mapping[int, Range]) -> dict[str, dict[str, Any]]:
    """Return ranges in the form of ai-edge-quantizer's calibration result."""
    tensors = model.subgraphs[0].tensors
    statistics = {}
    for index, (low, high) in ranges.items():
        shape = (1,) * len(tensors[index].shape)
        statistics[contents.name_of(tensors[index])] = {
            "min": np.full(shape, low, np.float32),
            "max": np.full(shape, high, np.float32),
        }
    return statistics
