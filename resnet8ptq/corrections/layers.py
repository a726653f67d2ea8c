"""The layers that corrections work on, their tensors, and what rounding does to their outputs."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime

from resnet8ptq.core.console import track
from resnet8ptq.core.errors import QuantizationError
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.layers import attribute, weight_layers
from resnet8ptq.graph.session import open_session
from resnet8ptq.graph.weights import Array, read, read_weights, write_weights
from resnet8ptq.precision.grid import WeightScheme
from resnet8ptq.precision.selection import Selection, find_float_nodes


@dataclass(frozen=True)
class Setting:
    """What every correction of a run works with.

    Attributes:
        weights: the grid that the run's backend will round them to.
        selection: what will be quantized.
        images: for calibration; they are run `batch_size` at once, on `threads`.
    """

    weights: WeightScheme
    selection: Selection
    images: Split
    batch_size: int
    threads: int


def find(graph: onnx.GraphProto, selection: Selection) -> dict[str, onnx.NodeProto]:
    """Return the layers whose weights will be quantized, by short name, in the graph's order.

    Left out, besides those that stay in float: a Gemm that transposes its input or scales, and a
    MatMul with more than one matrix; no exporter of a trained network writes them.

    Raises:
        QuantizationError: no layer is left.
    """
    skipped = set(find_float_nodes(graph, selection))
    chosen = {
        name: node
        for name, node in weight_layers(graph).items()
        if node.name not in skipped and _is_plain(graph, node)
    }
    if not chosen:
        raise QuantizationError("corrections: no layer with weights is left to quantize")
    return chosen


def _is_plain(graph: onnx.GraphProto, node: onnx.NodeProto) -> bool:
    if node.op_type == "Gemm":
        plain = {"alpha": 1.0, "beta": 1.0, "transA": 0}
        return all(attribute(node, key, value) == value for key, value in plain.items())
    return node.op_type == "Conv" or read(graph, node.input[1]).ndim == 2


def round_to_nearest(weights: Array, scheme: WeightScheme) -> Array:
    """Return the weights [output channels, ...] as every backend will round them."""
    return scheme.grid(weights, 0).round(weights)


def run(
    networks: Sequence[onnx.ModelProto],
    names: list[str],
    setting: Setting,
    label: str,
) -> Iterator[list[list[Array]]]:
    """Yield batch by batch, for each of the networks, its tensors `names`."""
    sessions = [_session(network, names, setting.threads) for network in networks]
    for batch in track(setting.images.batches(setting.batch_size), label):
        yield [session.run(names, {session.get_inputs()[0].name: batch}) for session in sessions]


def _session(
    network: onnx.ModelProto, names: list[str], threads: int
) -> onnxruntime.InferenceSession:
    exposed = copy.deepcopy(network)
    del exposed.graph.output[:]
    exposed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return open_session(exposed.SerializeToString(), threads)


def errors(fp32: onnx.ModelProto, corrected: onnx.ModelProto, setting: Setting) -> dict[str, float]:
    """Return the squared error of each layer's output, relative to its power.

    `corrected` runs with all weights rounded to the nearest level, as it will be quantized, and
    with float activations.
    """
    rounded = copy.deepcopy(corrected)
    nodes = find(rounded.graph, setting.selection)
    for node in nodes.values():
        weights = read_weights(rounded.graph, node)
        write_weights(rounded.graph, node, round_to_nearest(weights, setting.weights))
    names = [node.output[0] for node in nodes.values()]
    error, power = np.zeros(len(names)), np.zeros(len(names))
    label = "Measuring the layers' error"
    for targets, outputs in run([fp32, rounded], names, setting, label):
        for i, (target, output) in enumerate(zip(targets, outputs, strict=True)):
            error[i] += np.square(output - target, dtype=np.float64).sum()
            power[i] += np.square(target, dtype=np.float64).sum()
    ratios = error / np.maximum(power, np.finfo(float).tiny)
    return {name: float(ratio) for name, ratio in zip(nodes, ratios, strict=True)}
