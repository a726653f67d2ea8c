"""A graph in QDQ format beside the FP32 graph that it was made from: what is rounded, and to what.

Each tensor that is rounded passes a QuantizeLinear and a DequantizeLinear node; rounded weights are
stored as integers, with a DequantizeLinear node behind them.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from resnet8ptq.graph.layers import FUSED, attribute, channel_axis, consumers, weight_layers
from resnet8ptq.graph.weights import write_weights

JOINING = ("Concat", "Add")
_AT_OUTPUT = "_QuantizeLinear_Input"  # what ONNX Runtime calls an output before it is rounded


@dataclass(frozen=True)
class RoundedWeight:
    """The weights of a layer, its output channels first: [channels, ...].

    Attributes:
        name: short, see `weight_layers`.
        node: the layer's.
        values, rounded: before, and after.
        scales: how many there are: 1, or one for each channel.
        dtype: of the integers.
    """

    name: str
    node: str
    values: NDArray[np.float32]
    rounded: NDArray[np.float32]
    scales: int
    dtype: str


@dataclass(frozen=True)
class RoundedActivation:
    """A tensor that is rounded as the network runs.

    Attributes:
        name: in the FP32 graph.
        dequantized: in the quantized one.
        layer: the node that makes it; what does the activation as well stands for both. Empty for
            an input of the network.
        nodes: names of the nodes that make and take it: in float, they leave it as it is.
        scale: between two levels.
        low, high: the smallest and the largest value that a level stands for.
    """

    name: str
    dequantized: str
    layer: str
    nodes: tuple[str, ...]
    scale: float
    low: float
    high: float

    def round(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the nearest level of each value."""
        return np.clip(np.rint(values / self.scale) * self.scale, self.low, self.high)


def rounded_weights(fp32: onnx.GraphProto, quantized: onnx.GraphProto) -> list[RoundedWeight]:
    """Return the weights of the layers that are quantized, in the order of the graph."""
    known = {tensor.name: tensor for tensor in fp32.initializer}
    stored = {tensor.name: tensor for tensor in quantized.initializer}
    dequantizes = {node.output[0]: node for node in quantized.node if _is_dequantize(node)}
    nodes = {node.name: node for node in quantized.node}
    found = []
    for name, layer in weight_layers(fp32).items():
        given = nodes[layer.name].input[1] if layer.name in nodes else ""
        if given not in dequantizes or dequantizes[given].input[0] not in stored:
            continue
        node = dequantizes[given]
        levels, scale, zero = (numpy_helper.to_array(stored[key]) for key in node.input)
        if scale.size > 1:
            sizes = [1] * levels.ndim
            sizes[attribute(node, "axis", 1)] = scale.size
            scale, zero = scale.reshape(sizes), zero.reshape(sizes)
        rounded = (levels.astype(np.int32) - zero) * scale
        values = numpy_helper.to_array(known[layer.input[1]])
        values, rounded = (
            np.moveaxis(each, channel_axis(layer), 0).astype(np.float32)
            for each in (values, rounded)
        )
        dtype = str(levels.dtype)
        found.append(RoundedWeight(name, layer.name, values, rounded, scale.size, dtype))
    return found


def rounded_activations(
    fp32: onnx.GraphProto, quantized: onnx.GraphProto
) -> list[RoundedActivation]:
    """Return the tensors that are rounded as the network runs, in the order of the graph."""
    stored = {tensor.name: tensor for tensor in quantized.initializer}
    makers = {name: node for node in fp32.node for name in node.output}
    inputs = {value.name for value in fp32.input}
    found = []
    for node in quantized.node:
        name = node.input[0].removesuffix(_AT_OUTPUT) if node.op_type == "QuantizeLinear" else ""
        if name not in makers and name not in inputs:
            continue
        scale, zero = (numpy_helper.to_array(stored[key]).item() for key in node.input[1:3])
        levels = np.iinfo(numpy_helper.to_array(stored[node.input[2]]).dtype)
        maker = makers.get(name)
        if maker is not None and maker.op_type in FUSED:
            maker = makers.get(maker.input[0], maker)
        around = [*([makers[name], maker] if maker else []), *consumers(fp32, name)]
        for dequantize in consumers(quantized, node.output[0])[:1]:
            found.append(
                RoundedActivation(
                    name,
                    dequantize.output[0],
                    maker.name if maker else "",
                    tuple(dict.fromkeys(each.name for each in around)),
                    scale,
                    low=(levels.min - zero) * scale,
                    high=(levels.max - zero) * scale,
                )
            )
    return found


def with_weights_rounded(
    proto: onnx.ModelProto, weights: Sequence[RoundedWeight]
) -> onnx.ModelProto:
    """Return the FP32 network with the weights rounded, and nothing else."""
    rounded = copy.deepcopy(proto)
    layers = weight_layers(rounded.graph)
    for weight in weights:
        write_weights(rounded.graph, layers[weight.name], weight.rounded)
    return rounded


def with_activations_rounded(
    proto: onnx.ModelProto, tensors: Sequence[RoundedActivation]
) -> onnx.ModelProto:
    """Return the FP32 network with activations rounded, and nothing else; not what Softmax makes.

    In float arithmetic: behind QuantizeLinear, ONNX Runtime's optimizer would round weights, too.
    """
    rounded = copy.deepcopy(proto)
    graph, known = rounded.graph, {tensor.name: tensor for tensor in tensors}
    del graph.node[:]
    renamed = {value.name: f"{value.name}/rounded" for value in graph.input if value.name in known}
    for name, other in renamed.items():
        _add_rounding(graph, known[name], name, other)
    for given in proto.graph.node:
        node = graph.node.add()
        node.CopyFrom(given)
        node.input[:] = [renamed.get(name, name) for name in given.input]
        for index, name in enumerate(given.output):
            if name in known and given.op_type != "Softmax":
                node.output[index] = f"{name}/exact"
                _add_rounding(graph, known[name], node.output[index], name)
    return rounded


def _add_rounding(graph: onnx.GraphProto, tensor: RoundedActivation, given: str, made: str) -> None:
    """Add nodes that do what `RoundedActivation.round` does."""
    values = {"scale": tensor.scale, "low": tensor.low, "high": tensor.high}
    scale, low, high = names = [f"{made}/{name}" for name in values]
    for name, value in zip(names, values.values(), strict=True):
        graph.initializer.append(numpy_helper.from_array(np.float32(value), name))
    steps = [
        ("Div", [given, scale]),
        ("Round", [f"{made}/Div"]),
        ("Mul", [f"{made}/Round", scale]),
        ("Clip", [f"{made}/Mul", low, high]),
    ]
    for kind, inputs in steps:
        output = made if kind == "Clip" else f"{made}/{kind}"
        graph.node.append(helper.make_node(kind, inputs, [output], f"{made}/{kind}"))


def joined(fp32: onnx.GraphProto, tensors: Sequence[RoundedActivation]) -> dict[int, list[int]]:
    """Return the places in `tensors` of those that join others, with the places of these."""
    places = {tensor.name: place for place, tensor in enumerate(tensors)}
    nodes = {node.name: node for node in fp32.node}
    found = {}
    for place, tensor in enumerate(tensors):
        node = nodes.get(tensor.layer)
        if node is not None and node.op_type in JOINING:
            found[place] = [places[name] for name in dict.fromkeys(node.input) if name in places]
    return {place: parts for place, parts in found.items() if len(parts) > 1}


def cut(quantized: onnx.ModelProto, tensors: Sequence[RoundedActivation]) -> onnx.ModelProto:
    """Return a graph in which each layer stands by itself.

    It takes every tensor of `tensors` as an input, by its name, and returns what is made of these:
    the same tensors, in this order, each by its own layer.
    """
    proto = copy.deepcopy(quantized)
    graph = proto.graph
    names = {tensor.dequantized: tensor.dequantized + "/alone" for tensor in tensors}
    for node in graph.node:
        node.output[:] = [names.get(name, name) for name in node.output]
    del graph.value_info[:], graph.output[:]
    for name, alone in names.items():
        graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
        graph.output.append(onnx.ValueInfoProto(name=alone))
    return proto


def _is_dequantize(node: onnx.NodeProto) -> bool:
    return node.op_type == "DequantizeLinear"
