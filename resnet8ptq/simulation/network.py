"""Inserts fake quantization into a network's torch module, and reads the trained weights back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import nn
from torch.nn.utils import parametrize

from resnet8ptq.calibration.statistics import Range
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.graph.layers import channel_axis, fused_activations, weight_layers
from resnet8ptq.graph.links import Links
from resnet8ptq.graph.session import end_at_logits
from resnet8ptq.graph.torch_module import to_torch_module
from resnet8ptq.precision.grid import ActivationScheme
from resnet8ptq.precision.plan import Plan
from resnet8ptq.simulation.fake_quantization import (
    FakeQuantize,
    FakeQuantizeNarrowWeight,
    FakeQuantizeWeight,
)

# The frameworks give the output of these operators the scale and the zero point of the input.
_SHARING = {
    "MaxPool",
    "Transpose",
    "Reshape",
    "Flatten",
    "Squeeze",
    "Unsqueeze",
    "Identity",
    "Slice",
    "Split",
}


class _Quantized(nn.Module):  # type: ignore[misc]
    """An operator with a quantizer for each output; `Identity` leaves an output in float."""

    def __init__(self, operator: Any, quantizers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.operator = operator
        self.quantizers = nn.ModuleList(quantizers)

    def forward(self, *inputs: torch.Tensor) -> Any:
        outputs = self.operator(*inputs)
        if isinstance(outputs, torch.Tensor):
            return self.quantizers[0](outputs)
        pairs = zip(self.quantizers, outputs, strict=True)
        return tuple(quantizer(output) for quantizer, output in pairs)


@dataclass(frozen=True)
class Student:
    """The network with fake quantization, for training.

    Attributes:
        module: maps the network's input [n, ...] to logits [n, classes].
        quantizers: fake quantization of activations by ONNX tensor name; some tensors share one.
    """

    module: Any
    quantizers: dict[str, FakeQuantize]

    def ranges(self) -> dict[str, Range]:
        """Return the range of each tensor in `quantizers`."""
        return {name: quantizer.range() for name, quantizer in self.quantizers.items()}


def load_logits(onnx_path: Path) -> Any:
    """Load the network as a torch module that maps inputs [n, ...] to logits [n, classes].

    Raises:
        UnsupportedError: the network does not end in a softmax or has several outputs, or
            onnx2torch cannot convert it.
    """
    proto = onnx.load(onnx_path)
    last = proto.graph.node[-1]
    if not end_at_logits(proto):
        raise UnsupportedError(
            f"method=qat: got a network that ends in {last.name}, expected one that ends in Softmax"
        )
    return to_torch_module(proto)


def build_student(
    onnx_path: Path,
    skipped: list[str],
    ranges: Mapping[str, Range],
    weights: Plan,
    activations: ActivationScheme,
    float_output: bool,
) -> Student:
    """Load the network and insert fake quantization of weights and activations.

    Args:
        skipped: names of the nodes that stay in float.
        ranges: initial ranges of every tensor around quantized nodes.
        weights: the scheme of each layer's weights.
        activations: the scheme of all activations.
        float_output: see `quantize_activations`.

    Raises:
        UnsupportedError: see `load_logits`; or layers share weights, or a layer has no weights to
            train.
    """
    graph = onnx.load(onnx_path).graph
    body = load_logits(onnx_path)
    for name, node in _layers(graph).items():
        layer = find_layer(body, node)
        if node.name not in skipped:
            scheme = weights.scheme(name)
            rounding: nn.Module = FakeQuantizeWeight(scheme)
            if scheme.clips:
                rounding = FakeQuantizeNarrowWeight(scheme, layer.weight)
            parametrize.register_parametrization(layer, "weight", rounding)

    # The quantizer of the network's input comes first
    quantizers = quantize_activations(body, graph, skipped, ranges, activations, float_output)
    entrance = quantizers.get(graph.input[0].name, nn.Identity())
    return Student(nn.Sequential(entrance, body).eval(), quantizers)


def quantize_activations(
    body: Any,
    graph: onnx.GraphProto,
    skipped: list[str],
    ranges: Mapping[str, Range],
    scheme: ActivationScheme,
    float_output: bool,
) -> dict[str, FakeQuantize]:
    """Insert fake quantization of activations into `body`; return the modules by ONNX tensor name.

    The module for the network's first input is returned, but not inserted. A final softmax stays in
    float. Of several outputs of a node, only the first is rounded, except for a Split.

    Args:
        body: the torch module of `graph`, whose submodules have the names of the nodes.
        skipped: names of the nodes that stay in float.
        ranges: initial ranges by ONNX tensor name. A tensor without one is not rounded, unless it
            shares the scale of a rounded input.
        scheme: the scheme of all activations.
        float_output: whether the last layer and all later nodes return float.
    """
    source = graph.input[0].name
    quantizers = {}
    if source in ranges:
        quantizers[source] = FakeQuantize(ranges[source], scheme)

    # The frameworks do not quantize the input of a Relu or Clip that is fused
    fused = {}
    for node in fused_activations(graph):
        if node.name not in skipped:
            fused[node.input[0]] = node.output[0]

    # Round the outputs of the nodes, up to the last layer or the softmax
    nodes = list(graph.node)
    if nodes[-1].op_type == "Softmax":
        nodes.pop()
    if float_output:
        last = max(nodes.index(layer) for layer in weight_layers(graph).values())
        nodes = nodes[:last]
    sharing = _SHARING | {*scheme.level_pools}
    for node in nodes:
        source = node.input[0]
        outputs = node.output if node.op_type == "Split" else node.output[:1]
        shares = node.op_type in sharing and source in quantizers and node.name not in skipped
        for output in outputs:
            if shares:
                quantizers[output] = quantizers[source]
            elif output in ranges and output not in fused:
                quantizers[output] = FakeQuantize(ranges[output], scheme)
        if quantizers.keys().isdisjoint(outputs):
            continue
        rounding = [quantizers.get(output, nn.Identity()) for output in node.output]
        setattr(body, node.name, _Quantized(getattr(body, node.name), rounding))

    # The input of a fused activation has the range of its output
    for name, output in fused.items():
        if output in quantizers:
            quantizers[name] = quantizers[output]
    return quantizers


def write_back(onnx_path: Path, student: Student) -> onnx.ModelProto:
    """Return the network with the student's weights and biases, under the same names.

    Weights below 8 bits are rounded, because their grid is learned; others are not rounded.
    """
    proto = onnx.load(onnx_path)
    tensors = Links(proto.graph).constants
    for node in _layers(proto.graph).values():
        layer = find_layer(student.module[1], node)
        weights = layer.weight
        if parametrize.is_parametrized(layer):
            (quantizer,) = layer.parametrizations.weight
            if isinstance(quantizer, FakeQuantizeWeight):
                weights = layer.parametrizations.weight.original

        # Torch has the output channels first
        weights = weights.movedim(0, channel_axis(node))
        for name, values in zip(node.input[1:], (weights, layer.bias), strict=False):
            array = np.ascontiguousarray(values.detach().cpu().numpy())
            tensors[name].CopyFrom(numpy_helper.from_array(array, name))
    return proto


def _layers(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    """Return `weight_layers`; raise `UnsupportedError` if two of the layers share their weights."""
    layers = weight_layers(graph)
    if len({node.input[1] for node in layers.values()}) < len(layers):
        raise UnsupportedError(
            "method=qat: got layers that share weights, expected weights for each layer"
        )
    return layers


def find_layer(body: Any, node: onnx.NodeProto) -> Any:
    """Return the `Linear` or `Conv2d` of a layer, which onnx2torch may wrap with padding.

    Raises:
        UnsupportedError: the layer has no such module.
    """
    for module in getattr(body, node.name).modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            return module
    raise UnsupportedError(f"onnx2torch gives {node.name} no weights to train")
