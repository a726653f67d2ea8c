"""Empirical bias correction.

Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019,
section 4.2: rounded weights shift the mean of a layer's output, and the bias can undo the shift.
"""

import copy
import logging
from collections.abc import Sequence

import numpy as np
import onnx
from numpy.typing import NDArray

from resnet8ptq.corrections import layers
from resnet8ptq.corrections.layers import CorrectionSettings
from resnet8ptq.corrections.walk import Walk
from resnet8ptq.graph.weights import find_added_bias, read, read_bias, write_bias, write_input

log = logging.getLogger(__name__)


def correct_biases(
    fp32: onnx.ModelProto, proto: onnx.ModelProto, setting: CorrectionSettings
) -> onnx.ModelProto:
    """Return `proto` with biases that give each output channel the same mean as in `fp32`.

    Layers are corrected in order: the means of a layer are measured after rounded and corrected
    layers, with float activations. The bias of a MatMul is in the Add after it. The error of a
    layer without a bias is corrected in the next layer with one.
    """
    proto = copy.deepcopy(proto)
    rounded = copy.deepcopy(proto)
    nodes = layers.find(proto.graph, setting.selection)
    simulated = layers.find(rounded.graph, setting.selection)
    walk = setting.walk(fp32)
    outputs = [node.output[0] for node in nodes.values()]
    targets: dict[str, NDArray[np.float64]] = {}
    for part in walk.parts(outputs):
        layers_of = [node for node in nodes.values() if node.output[0] in part]
        targets |= _means(walk, layers_of, "Bias correction: FP32")
    walk = walk.beside(rounded)
    for number, (name, node) in enumerate(nodes.items(), 1):
        twin = simulated[name]
        layers.round_weights(rounded.graph, twin, setting.weights.scheme(name))
        if not has_bias(proto.graph, node):
            log.info("corrections.bias_correction: %s is a MatMul without a bias", node.name)
            continue
        label = f"Bias correction {number} of {len(nodes)}: {name}"
        walk.to(twin, label)
        (mean,) = _means(walk, [twin], label).values()
        error = mean - targets[node.output[0]]
        for graph, layer in ((proto.graph, node), (rounded.graph, twin)):
            shift_bias(graph, layer, error)
    return proto


def has_bias(graph: onnx.GraphProto, node: onnx.NodeProto) -> bool:
    """Return whether a layer has a bias or can get one; that of a MatMul is in an Add after it."""
    return node.op_type != "MatMul" or find_added_bias(graph, node) is not None


def find_error(walks: Sequence[Walk], node: onnx.NodeProto, label: str) -> NDArray[np.float64]:
    """Return the mean error of each output channel of a layer.

    Args:
        walks: through the FP32 and the rounded network.
    """
    exact, rounded = (_means(walk, [node], label)[node.output[0]] for walk in walks)
    return rounded - exact


def shift_bias(graph: onnx.GraphProto, node: onnx.NodeProto, error: NDArray[np.float64]) -> None:
    """Subtract the mean error of a layer's output from its bias."""
    if node.op_type == "MatMul":
        added = find_added_bias(graph, node)
        assert added is not None
        layer, index = added
        bias = read(graph, layer.input[index]) - error
        write_input(graph, layer, index, bias)
    else:
        write_bias(graph, node, read_bias(graph, node) - error)


def _means(walk: Walk, nodes: list[onnx.NodeProto], label: str) -> dict[str, NDArray[np.float64]]:
    """Return the mean of each output channel over images and positions, by output name."""
    names = [node.output[0] for node in nodes]
    axes = [1 if node.op_type == "Conv" else -1 for node in nodes]
    sums: dict[str, NDArray[np.float64]] = {}
    counts = dict.fromkeys(names, 0)
    for outputs in walk.run(names, label):
        for name, axis, output in zip(names, axes, outputs, strict=True):
            rows = np.moveaxis(output, axis, -1).reshape(-1, output.shape[axis])
            sums[name] = sums.get(name, 0) + rows.sum(axis=0, dtype=np.float64)
            counts[name] += len(rows)
    return {name: sums[name] / counts[name] for name in names}
