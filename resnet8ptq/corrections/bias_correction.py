"""Empirical bias correction.

Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019,
section 4.2: rounded weights shift the mean of a layer's output, and the bias can undo the shift.
"""

import copy
import logging
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from numpy.typing import NDArray

from resnet8ptq.corrections import layers
from resnet8ptq.corrections.layers import CorrectionSettings
from resnet8ptq.corrections.walk import Walk
from resnet8ptq.graph.links import Links
from resnet8ptq.graph.weights import (
    biased_output,
    find_added_bias,
    read_bias,
    read_initializer,
    write_bias,
    write_input,
)

log = logging.getLogger(__name__)


def correct_biases(
    fp32: onnx.ModelProto, proto: onnx.ModelProto, setting: CorrectionSettings
) -> onnx.ModelProto:
    """Return `proto` with biases that give the quantized layers the same mean outputs as in `fp32`.

    The means are those of each channel, with rounded weights and float activations; the returned
    weights stay in float. Layers are corrected in order, each measured after rounded and corrected
    layers. The bias of a MatMul is the constant of an Add after it. The error of a MatMul without
    such an Add counts as an error of the layers after it.
    """
    proto = copy.deepcopy(proto)
    rounded = copy.deepcopy(proto)  # only to measure
    nodes = layers.find_plain_layers(proto.graph, setting.selection)
    simulated = layers.find_plain_layers(rounded.graph, setting.selection)

    # Measure the means of FP32
    walk = setting.walk(fp32)
    links = Links(proto.graph)
    axes = {biased_output(links, node): _channel_axis(node) for node in nodes.values()}
    outputs = list(axes)
    targets: dict[str, NDArray[np.float64]] = {}
    for part in walk.parts(outputs):
        axes_of_part = {name: axes[name] for name in part}
        targets |= _means(walk, axes_of_part, "Bias correction: FP32")

    # Correct layer by layer; each layer is measured after corrected ones
    walk = walk.through(rounded)
    for number, (name, node) in enumerate(nodes.items(), 1):
        output = outputs[number - 1]
        twin = simulated[name]
        layers.round_weights(rounded.graph, twin, setting.weights.scheme(name))
        if not has_bias(proto.graph, node):
            log.info("corrections.bias_correction: %s is a MatMul without a bias", node.name)
            continue
        label = f"Bias correction {number} of {len(nodes)}: {name}"
        walk.to(twin, label)
        error = _means(walk, {output: axes[output]}, label)[output] - targets[output]
        shift_bias(proto.graph, node, error)
        shift_bias(rounded.graph, twin, error)
    return proto


def has_bias(graph: onnx.GraphProto, node: onnx.NodeProto) -> bool:
    """Return whether a layer has a bias or can get one; a MatMul's bias is in an Add after it."""
    return node.op_type != "MatMul" or find_added_bias(graph, node) is not None


def find_error(
    graph: onnx.GraphProto, walks: Sequence[Walk], node: onnx.NodeProto, label: str
) -> NDArray[np.float64]:
    """Return the mean error of each output channel of a layer, after its bias.

    Args:
        walks: through the FP32 and the rounded network.
    """
    output = biased_output(graph, node)
    axes = {output: _channel_axis(node)}
    exact = _means(walks[0], axes, label)
    rounded = _means(walks[1], axes, label)
    return rounded[output] - exact[output]


def shift_bias(graph: onnx.GraphProto, node: onnx.NodeProto, error: NDArray[np.float64]) -> None:
    """Subtract the mean error of a layer's output from its bias."""
    if node.op_type == "MatMul":
        added = find_added_bias(graph, node)
        assert added is not None
        layer, index = added
        bias = read_initializer(graph, layer.input[index]) - error
        write_input(graph, node=layer, index=index, values=bias)
    else:
        write_bias(graph, node, read_bias(graph, node) - error)


def _means(walk: Walk, axes: Mapping[str, int], label: str) -> dict[str, NDArray[np.float64]]:
    """Return each tensor's means by channel, over samples and positions.

    Args:
        axes: the axis of the channels, by tensor.
    """
    sums: dict[str, NDArray[np.float64]] = {}
    counts = dict.fromkeys(axes, 0)
    for tensors in walk.run([*axes], label):
        for (name, axis), tensor in zip(axes.items(), tensors, strict=True):
            rows = np.moveaxis(tensor, axis, -1).reshape(-1, tensor.shape[axis])
            sums[name] = sums.get(name, 0) + rows.sum(axis=0, dtype=np.float64)
            counts[name] += len(rows)
    return {name: sums[name] / counts[name] for name in axes}


def _channel_axis(node: onnx.NodeProto) -> int:
    return 1 if node.op_type == "Conv" else -1
