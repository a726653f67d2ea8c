"""The layers that corrections work on, their tensors, and what rounding does to their outputs."""

import copy
from collections.abc import Iterator, Sequence

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import numpy_helper

from resnet8ptq.backends.onnx_session import open_session
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core.console import track
from resnet8ptq.core.errors import QuantizationError
from resnet8ptq.data.dataset import Split
from resnet8ptq.grid import WeightScheme
from resnet8ptq.nodes import attribute, channel_axis, find_float_nodes, weight_layers

Array = NDArray[np.float32]


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


def read(graph: onnx.GraphProto, name: str) -> Array:
    """Return an initializer."""
    (tensor,) = [item for item in graph.initializer if item.name == name]
    return np.array(numpy_helper.to_array(tensor))


def read_weights(graph: onnx.GraphProto, node: onnx.NodeProto) -> Array:
    """Return a layer's weights [output channels, ...]."""
    return np.moveaxis(read(graph, node.input[1]), channel_axis(node), 0)


def write_weights(graph: onnx.GraphProto, node: onnx.NodeProto, weights: Array) -> None:
    """Replace a layer's weights by `weights` [output channels, ...]."""
    _write(graph, node, 1, np.moveaxis(weights, 0, channel_axis(node)))


def read_bias(graph: onnx.GraphProto, node: onnx.NodeProto) -> Array:
    """Return a layer's bias [output channels], zeros where it has none."""
    channels = read_weights(graph, node).shape[0]
    if len(node.input) < 3 or not node.input[2]:
        return np.zeros(channels, np.float32)
    return np.array(np.broadcast_to(read(graph, node.input[2]).reshape(-1), channels))


def write_bias(graph: onnx.GraphProto, node: onnx.NodeProto, bias: Array) -> None:
    """Replace the bias of a Conv or Gemm by `bias` [output channels], or give it one."""
    if len(node.input) < 3:
        node.input.append("")
    _write(graph, node, 2, bias)


def _write(graph: onnx.GraphProto, node: onnx.NodeProto, index: int, values: Array) -> None:
    """Replace an initializer; where other nodes read it too, or there is none, add one."""
    name = node.input[index]
    readers = sum(list(other.input).count(name) for other in graph.node)
    if not name or readers > 1:
        name = f"{node.name}/corrected_{index}"
        node.input[index] = name
    kept = [tensor for tensor in graph.initializer if tensor.name != name]
    del graph.initializer[:]
    tensor = numpy_helper.from_array(np.ascontiguousarray(values, np.float32), name)
    graph.initializer.extend([*kept, tensor])


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
