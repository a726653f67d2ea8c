"""The layers that corrections work on, their tensors, and what rounding does to their outputs."""

import copy
from collections.abc import Iterator, Sequence

import numpy as np
import onnx
import onnxruntime

from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core.console import track
from resnet8ptq.core.errors import QuantizationError
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.layers import attribute, weight_layers
from resnet8ptq.graph.session import open_session
from resnet8ptq.graph.weights import Array, read, read_weights, write_weights
from resnet8ptq.precision.grid import WeightScheme
from resnet8ptq.precision.selection import find_float_nodes


def find(graph: onnx.GraphProto, config: RunConfig) -> dict[str, onnx.NodeProto]:
    """Return the layers whose weights will be quantized, by short name, in the graph's order.

    Left out, besides those that stay in float: a Gemm that transposes its input or scales, and a
    MatMul with more than one matrix; no exporter of a trained network writes them.

    Raises:
        QuantizationError: no layer is left.
    """
    skipped = set(find_float_nodes(graph, config))
    found = {
        name: node
        for name, node in weight_layers(graph).items()
        if node.name not in skipped and _is_plain(graph, node)
    }
    if not found:
        raise QuantizationError("corrections: no layer with weights is left to quantize")
    return found


def _is_plain(graph: onnx.GraphProto, node: onnx.NodeProto) -> bool:
    if node.op_type == "Gemm":
        plain = {"alpha": 1.0, "beta": 1.0, "transA": 0}
        return all(attribute(node, key, value) == value for key, value in plain.items())
    return node.op_type == "Conv" or read(graph, node.input[1]).ndim == 2


def weight_scheme(config: RunConfig) -> WeightScheme:
    """Return how the run's backend quantizes weights.

    `reduce_range` takes a bit from the weights in ONNX Runtime; in PyTorch, from the activations.
    """
    reduced = config.backend.name == "onnx" and bool(config.reduce_range)
    return WeightScheme.of(config, reduced)


def round_to_nearest(weights: Array, scheme: WeightScheme) -> Array:
    """Return the weights [output channels, ...] as every backend will round them."""
    return scheme.grid(weights, 0).round(weights)


def run(
    networks: Sequence[onnx.ModelProto],
    names: list[str],
    config: RunConfig,
    images: Split,
    label: str,
) -> Iterator[list[list[Array]]]:
    """Yield batch by batch, for each of the networks, its tensors `names`."""
    sessions = [_session(network, names, config) for network in networks]
    for batch in track(images.batches(config.calib.batch_size), label):
        yield [session.run(names, {session.get_inputs()[0].name: batch}) for session in sessions]


def _session(
    network: onnx.ModelProto, names: list[str], config: RunConfig
) -> onnxruntime.InferenceSession:
    exposed = copy.deepcopy(network)
    del exposed.graph.output[:]
    exposed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return open_session(exposed.SerializeToString(), config)


def errors(
    fp32: onnx.ModelProto, corrected: onnx.ModelProto, config: RunConfig, images: Split
) -> dict[str, float]:
    """Return the squared error of each layer's output, relative to its power.

    `corrected` runs with all weights rounded to the nearest level, as it will be quantized, and
    with float activations.
    """
    rounded = copy.deepcopy(corrected)
    scheme = weight_scheme(config)
    found = find(rounded.graph, config)
    for node in found.values():
        weights = read_weights(rounded.graph, node)
        write_weights(rounded.graph, node, round_to_nearest(weights, scheme))
    names = [node.output[0] for node in found.values()]
    error, power = np.zeros(len(names)), np.zeros(len(names))
    label = "Measuring the layers' error"
    for targets, outputs in run([fp32, rounded], names, config, images, label):
        for i, (target, output) in enumerate(zip(targets, outputs, strict=True)):
            error[i] += np.square(output - target, dtype=np.float64).sum()
            power[i] += np.square(target, dtype=np.float64).sum()
    ratios = error / np.maximum(power, np.finfo(float).tiny)
    return {name: float(ratio) for name, ratio in zip(found, ratios, strict=True)}
