"""Finds the rounded tensors of a QDQ graph, and rounds weights or activations in its FP32 graph.

A rounded activation passes through QuantizeLinear and DequantizeLinear; rounded weights are stored
as integers, with DequantizeLinear after them.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from resnet8ptq.graph.layers import FUSED, attribute, channel_axis, weight_layers
from resnet8ptq.graph.links import Links, input_names
from resnet8ptq.graph.weights import read_weights, write_weights

AT_OUTPUT = "_QuantizeLinear_Input"  # ONNX Runtime's suffix of an output before it is rounded


@dataclass(frozen=True)
class RoundedWeight:
    """The weights of a layer, output channels first: [channels, ...].

    Attributes:
        name: the short name, see `weight_layers`.
        node: name of the layer's node.
        values, rounded: the weights before and after rounding.
        scales: number of scales, which is 1 or the number of channels.
        dtype: the stored dtype, such as `int8`.
    """

    name: str
    node: str
    values: NDArray[np.float32]
    rounded: NDArray[np.float32]
    scales: int
    dtype: str


@dataclass(frozen=True)
class RoundedActivation:
    """A tensor that is rounded at inference.

    Attributes:
        name: the name in the FP32 graph.
        dequantized: the name in the quantized graph, after rounding.
        layer: name of the producer, or of the node before it if the producer is a Relu or Clip that
            follows a node; empty for an input of the network.
        nodes: names of the producer, of `layer` and of the readers; if all stay in float, the
            tensor is not rounded.
        scale: distance between two neighbouring levels.
        low, high: values of the lowest and the highest level.
    """

    name: str
    dequantized: str
    layer: str
    nodes: tuple[str, ...]
    scale: float
    low: float
    high: float

    def round(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return each value, rounded to the nearest level."""
        return np.clip(np.rint(values / self.scale) * self.scale, self.low, self.high)


def rounded_weights(fp32: onnx.GraphProto, quantized: onnx.GraphProto) -> list[RoundedWeight]:
    """Return the weights of the layers that store them as integers, in the order of `fp32`.

    Layers are matched by the names of their nodes, which quantization keeps.
    """
    stored = Links(quantized).constants
    nodes = {}
    dequantizes = {}  # nodes by output
    for node in quantized.node:
        nodes[node.name] = node
        if node.op_type == "DequantizeLinear":
            dequantizes[node.output[0]] = node

    # Dequantize the stored levels of each layer
    links = Links(fp32)
    weights = []
    for name, layer in weight_layers(fp32).items():
        if layer.name not in nodes:
            continue
        dequantize = dequantizes.get(nodes[layer.name].input[1])
        if dequantize is None or dequantize.input[0] not in stored:
            continue
        levels, scale, *zeros = [numpy_helper.to_array(stored[key]) for key in dequantize.input]
        zero = zeros[0] if zeros else np.zeros_like(scale)  # 4-bit weights need no zero point

        # One scale for each channel broadcasts along its axis
        if scale.size > 1:
            sizes = [1] * levels.ndim
            sizes[attribute(dequantize, "axis", 1)] = scale.size
            scale = scale.reshape(sizes)
            zero = zero.reshape(sizes)
        rounded = (levels.astype(np.int32) - zero) * scale
        rounded = np.moveaxis(rounded, channel_axis(layer), 0).astype(np.float32)
        weight = RoundedWeight(
            name,
            node=layer.name,
            values=read_weights(links, layer),
            rounded=rounded,
            scales=scale.size,
            dtype=str(levels.dtype),
        )
        weights.append(weight)
    return weights


def rounded_activations(
    fp32: onnx.GraphProto, quantized: onnx.GraphProto
) -> list[RoundedActivation]:
    """Return the tensors of `fp32` that are rounded at inference, in the order of `quantized`.

    A tensor is left out unless it has one stored scale and one stored zero point.
    """
    links = Links(fp32)
    quantized_links = Links(quantized)
    producers = links.producers
    stored = quantized_links.constants
    inputs = set(input_names(fp32))
    single = {name for name, tensor in stored.items() if np.prod(tensor.dims) == 1}
    activations = []
    for node in quantized.node:
        if node.op_type != "QuantizeLinear":
            continue
        name = node.input[0].removesuffix(AT_OUTPUT)
        if name not in producers and name not in inputs:
            continue
        keys = node.input[1:3]
        if len(keys) < 2 or not single.issuperset(keys):
            # In files of other programs, scales may be computed or by channel, or lack a zero point
            continue
        scale = numpy_helper.to_array(stored[keys[0]]).item()
        zero_point = numpy_helper.to_array(stored[keys[1]])
        levels = np.iinfo(zero_point.dtype)

        # Find the producer and the readers
        layer = producers.get(name)
        if layer is not None and layer.op_type in FUSED:
            layer = producers.get(layer.input[0], layer)
        layer_name = ""
        around = links.readers(name)
        if layer is not None:
            layer_name = layer.name
            around = [producers[name], layer, *around]
        neighbours = dict.fromkeys(neighbour.name for neighbour in around)

        # The first reader of the levels is a DequantizeLinear
        dequantizes = quantized_links.readers(node.output[0])
        if not dequantizes:
            continue
        activation = RoundedActivation(
            name=name,
            dequantized=dequantizes[0].output[0],
            layer=layer_name,
            nodes=tuple(neighbours),
            scale=scale,
            low=(levels.min - zero_point.item()) * scale,
            high=(levels.max - zero_point.item()) * scale,
        )
        activations.append(activation)
    return activations


def with_weights_rounded(
    proto: onnx.ModelProto, weights: Sequence[RoundedWeight]
) -> onnx.ModelProto:
    """Return a copy of the FP32 network in which only these weights are rounded.

    A comparison with `with_activations_rounded` shows whether weights or activations cost the
    accuracy.
    """
    rounded = copy.deepcopy(proto)
    layers = weight_layers(rounded.graph)
    links = Links(rounded.graph)
    for weight in weights:
        write_weights(links, layers[weight.name], weight.rounded)
    return rounded


def with_activations_rounded(
    proto: onnx.ModelProto, tensors: Sequence[RoundedActivation]
) -> onnx.ModelProto:
    """Return a copy of the FP32 network in which only these activations are rounded.

    The output of a Softmax stays exact even if it is among `tensors`. The rounding is float
    arithmetic, because ONNX Runtime would round the weights of a Conv or Gemm between
    QuantizeLinear nodes too.
    """
    rounded = copy.deepcopy(proto)
    graph = rounded.graph
    by_name = {tensor.name: tensor for tensor in tensors}
    del graph.node[:]
    renamed = {}  # rounded inputs get new names, because the inputs keep theirs
    for name in input_names(graph):
        if name in by_name:
            renamed[name] = f"{name}/rounded"
            _add_rounding(graph, tensor=by_name[name], source=name, target=renamed[name])

    # Round the output of each node before the next node reads it
    for original in proto.graph.node:
        node = graph.node.add()
        node.CopyFrom(original)
        node.input[:] = [renamed.get(name, name) for name in original.input]
        for index, name in enumerate(original.output):
            if name in by_name and original.op_type != "Softmax":
                node.output[index] = f"{name}/exact"
                _add_rounding(graph, tensor=by_name[name], source=node.output[index], target=name)
    return rounded


def _add_rounding(
    graph: onnx.GraphProto, tensor: RoundedActivation, source: str, target: str
) -> None:
    """Add the nodes of `RoundedActivation.round`, from `source` to `target`."""
    scale = f"{target}/scale"
    low = f"{target}/low"
    high = f"{target}/high"
    for name, value in ((scale, tensor.scale), (low, tensor.low), (high, tensor.high)):
        graph.initializer.append(numpy_helper.from_array(np.float32(value), name))
    steps = [
        ("Div", [source, scale]),
        ("Round", [f"{target}/Div"]),
        ("Mul", [f"{target}/Round", scale]),
        ("Clip", [f"{target}/Mul", low, high]),
    ]
    for kind, inputs in steps:
        output = target if kind == "Clip" else f"{target}/{kind}"
        graph.node.append(helper.make_node(kind, inputs, [output], f"{target}/{kind}"))
