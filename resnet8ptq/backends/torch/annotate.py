"""Tells PT2E which tensors of an exported graph to quantize, and by which grids.

`OnnxNodeQuantizer.observed` names the tensors to calibrate. With their ranges, `annotate` then sets
the scales.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Node

from resnet8ptq.calibration.statistics import Range
from resnet8ptq.core.console import silenced
from resnet8ptq.precision.grid import Grid, WeightScheme, fit_bias

with silenced():  # torchao warns of missing GPU kernels and of its own use of torch
    from torchao.quantization.pt2e.observer import FixedQParamsObserver
    from torchao.quantization.pt2e.quantizer import (
        QuantizationAnnotation,
        QuantizationSpec,
        Quantizer,
    )
    from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

_aten = torch.ops.aten
LAYERS = (
    _aten.conv1d.default,
    _aten.conv2d.default,
    _aten.conv3d.default,
    _aten.conv2d.padding,
    _aten.linear.default,
    _aten.matmul.default,
)
_ARITHMETIC = (_aten.add.Tensor, _aten.mul.Tensor)
ACTIVATIONS = (_aten.relu.default, _aten.clamp.default, _aten.hardtanh.default)
# These operators return values of their input or means of them: both share one scale.
_PASSING = (
    _aten.permute.default,
    _aten.transpose.int,
    _aten.pad.default,
    _aten.constant_pad_nd.default,
    _aten.reshape.default,
    _aten.view.default,
    _aten.flatten.using_ints,
    _aten.squeeze.dim,
    _aten.avg_pool2d.default,
    _aten.adaptive_avg_pool2d.default,
    _aten.max_pool2d.default,
    _aten.mean.dim,
    _aten.unsqueeze.default,
    _aten.dropout.default,
)
_CAT = _aten.cat.default  # the inputs get the output's scale, as XNNPACK requires
SOFTMAX = (_aten.softmax.int, _aten._softmax.default)


@dataclass
class OnnxNodeQuantizer(Quantizer):  # type: ignore[misc]
    """Annotates the nodes of an exported graph that PT2E quantizes.

    Attributes:
        float_nodes: names of the graph's nodes that stay in float.
        float_output: whether softmaxes stay in float, and nodes that compute an output of the graph
            or the input of a softmax return floats.
        ranges: ranges of the observed tensors, by their producing node; needed by `annotate`.
    """

    float_nodes: Collection[str]
    float_output: bool
    activations: WeightScheme
    weights: WeightScheme
    ranges: Mapping[str, Range] = field(default_factory=dict)

    def observed(self, module: GraphModule) -> list[str]:
        """Return the names of the nodes whose outputs must be calibrated, each once."""
        roots: dict[Node, None] = {}
        for node in module.graph.nodes:
            if not self._is_chosen(node):
                continue
            tensors = []
            if node.target != _CAT:
                for tensor in self._inputs(node):
                    if tensor.op != "get_attr":  # constants need no calibration
                        tensors.append(tensor)
            if self._has_own_output(node):
                tensors.append(node)

            # A node whose output shares a scale takes that of its root; a softmax has a fixed one
            roots |= dict.fromkeys(map(self._root, tensors))
        names = []
        for node in roots:
            if node.target not in SOFTMAX:
                names.append(node.name)
        return names

    def annotate(self, module: GraphModule) -> GraphModule:
        """Annotate the quantization of each chosen node, and round its weights to their grid."""
        for node in module.graph.nodes:
            if not self._is_chosen(node):
                continue
            inputs = {}
            for tensor in self._inputs(node):
                inputs[tensor] = self._input_spec(module, tensor, node)
            output = None
            if self._has_own_output(node):
                output = self._activation_spec(node)
            node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(inputs, output, _annotated=True)
        return module

    def validate(self, module: GraphModule) -> None:
        """Accept every annotation, because all can be simulated."""

    def _is_chosen(self, node: Node) -> bool:
        if node.name in self.float_nodes:
            return False
        if node.target == _CAT:  # a float output has no scale that the inputs could share
            return self._has_own_output(node)
        if node.target in SOFTMAX:
            return not self.float_output
        return node.target in (*LAYERS, *_ARITHMETIC, *ACTIVATIONS, *_PASSING)

    def _is_fused(self, node: Node) -> bool:
        """Return whether `node` is fused with a chosen activation after it, such as a Relu.

        The activation must be the only reader of `node`, a chosen layer, sum or product.
        """
        users = list(node.users)
        if node.target not in (*LAYERS, *_ARITHMETIC) or len(users) != 1:
            return False
        [user] = users
        if user.target not in ACTIVATIONS:
            return False
        return self._is_chosen(node) and self._is_chosen(user)

    def _inputs(self, node: Node) -> list[Node]:
        """Return the inputs of `node` that may be rounded: of a layer, its data and weights.

        An activation that is fused with the node before it has none.
        """
        if node.target == _CAT:
            return list(dict.fromkeys(node.args[0]))
        count = 2 if node.target in (*LAYERS, *_ARITHMETIC) else 1
        inputs = [argument for argument in node.args[:count] if isinstance(argument, Node)]
        if node.target in ACTIVATIONS and self._is_fused(inputs[0]):
            return []
        return inputs

    def _has_own_output(self, node: Node) -> bool:
        if self.float_output:
            for user in node.users:
                if user.op == "output" or user.target in SOFTMAX:
                    return False
        return not self._is_fused(node)

    def _root(self, node: Node) -> Node:
        """Return the node whose output has the scale that `node` shares."""
        while node.target in _PASSING and self._is_chosen(node):
            node = node.args[0]
        return node

    def _input_spec(self, module: GraphModule, tensor: Node, layer: Node) -> Any:
        if layer.target == _CAT:
            return self._activation_spec(layer)
        if tensor.op != "get_attr":
            return self._activation_spec(tensor)
        if layer.target not in LAYERS:
            return None  # a constant of an addition stays in float

        # Weights are written onto their grid, on which the bias must fit in 32 bits
        weights = attrgetter(str(tensor.target))(module).detach()
        axis = weights.ndim - 1 if layer.target == _aten.matmul.default else 0
        self._fit_bias(module, layer, weights)
        grid = self.weights.grid(weights.numpy(), axis)
        # Round here, because torch multiplies by 1/scale, which could round ties the other way.
        weights.copy_(torch.from_numpy(grid.round(weights.numpy())))
        return _spec(grid, scheme=self.weights, axis=axis, per_channel=self.weights.per_channel)

    def _fit_bias(self, module: GraphModule, layer: Node, weights: torch.Tensor) -> None:
        """Raise weights, in place, so that the bias fits in 32 bits; see `grid.fit_bias`."""
        if len(layer.args) < 3:
            return
        bias = layer.args[2]
        if not isinstance(bias, Node) or bias.op != "get_attr":
            return
        values = attrgetter(str(bias.target))(module).detach().numpy()
        scale = float(self._activation_grid(layer.args[0]).scale.item())
        fitted = fit_bias(
            weights.numpy(), bias=values, scale=scale, per_channel=self.weights.per_channel
        )
        weights.copy_(torch.from_numpy(fitted))

    def _activation_spec(self, node: Node) -> Any:
        return _spec(self._activation_grid(node), self.activations)

    def _activation_grid(self, node: Node) -> Grid:
        root = self._root(node)
        if root.target in SOFTMAX:  # torch's kernels return probabilities in steps of 1/256
            lowest, highest = (-128, 127) if self.activations.dtype == "int8" else (0, 255)
            return Grid(
                np.array([1 / 256], np.float32),
                zero_point=np.array([lowest]),
                lowest=lowest,
                highest=highest,
            )
        low_high = np.array(self.ranges[root.name], dtype=np.float32)
        return self.activations.grid(low_high, axis=0)


class GridObserver(FixedQParamsObserver):  # type: ignore[misc]
    """An observer with a fixed scale and zero_point, each of shape [1] or [channels]."""

    def __init__(self, grid: Grid, axis: int, **kwargs: Any) -> None:
        super().__init__(scale=1.0, zero_point=0, **kwargs)
        self.scale = torch.from_numpy(grid.scale.reshape(-1))
        self.zero_point = torch.from_numpy(grid.zero_point.reshape(-1))
        self.ch_axis = axis


def _spec(grid: Grid, scheme: WeightScheme, axis: int = 0, per_channel: bool = False) -> Any:
    qscheme = torch.per_tensor_affine
    if per_channel:
        qscheme = torch.per_channel_affine
    return QuantizationSpec(
        dtype=getattr(torch, scheme.dtype),
        observer_or_fake_quant_ctr=GridObserver.with_args(grid=grid, axis=axis),
        quant_min=grid.lowest,
        quant_max=grid.highest,
        qscheme=qscheme,
    )
