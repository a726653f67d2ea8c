"""SmoothQuant: divides channels with outliers, and multiplies the next weights.

Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
Models", ICML 2023, arXiv:2211.10438. All channels of a layer's input share one range. After a
normalization, a few channels may have far larger values, so the others share few levels. The
division costs nothing at inference: a constant before the layer absorbs it.

The paper's migration strength alpha is the share of the difficulty that moves to the weights. Here
each input has its own alpha: half of the calibration samples give the ranges, and the other half
choose alpha by the error of the layers' outputs.
"""

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from numpy.typing import NDArray

from resnet8ptq.corrections import layers
from resnet8ptq.corrections.layers import CorrectionSettings
from resnet8ptq.corrections.walk import Walk
from resnet8ptq.graph.layers import attribute
from resnet8ptq.graph.links import Linked, Links
from resnet8ptq.graph.weights import (
    Array,
    read_initializer,
    read_weights,
    write_input,
    write_weights,
)
from resnet8ptq.precision.grid import ActivationScheme, WeightScheme
from resnet8ptq.precision.plan import Selection

log = logging.getLogger(__name__)

ALPHAS = (0.0, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9)  # 0 leaves the input unchanged
_ROWS = 4096  # rows of an input that choose alpha
# The limits of a divisor
_LEAST = 1e-4
_MOST = 1e4
_HOMOGENEOUS = ("Relu", "LeakyRelu")


@dataclass(frozen=True)
class Edit:
    """A constant input of a node that absorbs a division: [..., channels], or one value for all.

    Attributes:
        index: the position among the node's inputs.
        inverse: whether the constant is multiplied instead, because the node divides by it.
    """

    node: onnx.NodeProto
    index: int
    inverse: bool = False


@dataclass(frozen=True)
class Group:
    """Layers with the same input [..., channels], and the constants that can scale it."""

    tensor: str
    layers: dict[str, onnx.NodeProto]
    edits: Sequence[Edit]


@dataclass(frozen=True)
class _Problem:
    """The choice of alpha for one group.

    Attributes:
        ranges: the smallest and the largest value of each channel, two arrays [channels].
        rows: rows of the input on other samples, [n, channels].
        weights: the weights of each layer, [output channels, channels], with their scheme.
    """

    ranges: tuple[Array, Array]
    rows: Array
    weights: Sequence[tuple[Array, WeightScheme]]
    activations: ActivationScheme

    def divisors(self, alpha: float) -> Array:
        """Return s = max|X|^alpha / max|W|^(1 - alpha) for each channel: equation 4.

        The divisors lie between `_LEAST` and `_MOST`; they are 1 at alpha 0, and for channels of
        zeros.
        """
        low, high = self.ranges
        inputs = np.maximum(-low, high)
        largest = [np.abs(values).max(axis=0) for values, _ in self.weights]
        weights = np.max(largest, axis=0)
        used = (inputs > 0) & (weights > 0)
        divisors = np.ones_like(inputs)
        if alpha > 0:
            divisors[used] = inputs[used] ** alpha / weights[used] ** (1 - alpha)
        return np.clip(divisors, _LEAST, _MOST).astype(np.float32)

    def error(self, divisors: Array) -> float:
        """Return the mean of the layers' squared output errors, as shares of the outputs' power.

        The outputs are computed from rounded inputs and weights.
        """
        low = self.ranges[0] / divisors
        high = self.ranges[1] / divisors
        rounded = _round(
            self.rows / divisors,
            low=float(low.min()),
            high=float(high.max()),
            scheme=self.activations,
        )

        # Compare each layer's output with that of exact inputs and weights
        errors = []
        for weights, scheme in self.weights:
            target = self.rows @ weights.T
            scaled = weights * divisors
            output = rounded @ scheme.grid(scaled, 0).round(scaled).T
            power = np.square(target, dtype=np.float64).sum()
            error = np.square(output - target, dtype=np.float64).sum()
            errors.append(float(error / max(power, np.finfo(float).tiny)))
        return sum(errors) / len(errors)


def smooth(proto: onnx.ModelProto, setting: CorrectionSettings) -> onnx.ModelProto:
    """Return the network with smoothed layer inputs; its function is unchanged."""
    proto = copy.deepcopy(proto)
    groups = find_groups(proto.graph, setting.selection)
    if not groups:
        log.warning(
            "corrections.smooth_quant: changes nothing: no matrix product to quantize follows a "
            "normalization or another scale that only such products take"
        )
        return proto

    # Half of the samples give the ranges; the other half choose alpha
    samples = setting.samples
    count = len(samples)
    first = samples.take(np.arange(0, count, 2))
    second = samples.take(np.arange(min(1, count - 1), count, 2))
    names = [group.tensor for group in groups]
    ranges = _find_ranges(replace(setting, samples=first).walk(proto), names)
    rows = _draw_rows(replace(setting, samples=second).walk(proto), names, len(second))

    # Choose alpha separately for each input
    changes = []
    links = Links(proto.graph)
    for group in groups:
        weights = []
        for name, node in group.layers.items():
            weights.append((read_weights(links, node), setting.weights.scheme(name)))
        problem = _Problem(
            ranges[group.tensor],
            rows=rows[group.tensor],
            weights=weights,
            activations=setting.activations,
        )

        # Divide only if it lowers the error; the first alpha divides nothing
        errors = [problem.error(problem.divisors(alpha)) for alpha in ALPHAS]
        best = int(np.argmin(errors))
        log.debug("corrections.smooth_quant: %s: alpha %g", group.tensor, ALPHAS[best])
        if best:
            _divide(links, group, problem.divisors(ALPHAS[best]))
            changes.append(errors[best] / errors[0] - 1)

    log.info(
        "corrections.smooth_quant: divided %d of %d inputs; squared error of their layers' "
        "outputs, with inputs and weights rounded, %+.1f%% on average",
        len(changes),
        len(groups),
        100 * sum(changes) / max(1, len(changes)),
    )
    return proto


def find_groups(graph: onnx.GraphProto, selection: Selection) -> list[Group]:
    """Return the groups of matrix products whose common input can be divided.

    Only quantized products read the input, and constants before it can absorb the division.
    """
    links = Links(graph)
    groups: dict[str, dict[str, onnx.NodeProto]] = {}
    for name, node in layers.find_plain_layers(graph, selection).items():
        if node.op_type != "Conv":
            groups.setdefault(node.input[0], {})[name] = node

    # Keep the inputs that nothing else reads
    divisible = []
    for tensor, members in groups.items():
        edits = find_edits(links, tensor)
        readers = {node.name for node in links.readers(tensor)}
        layers_read = {node.name for node in members.values()}
        is_inner = tensor not in links.outputs
        if edits and is_inner and readers == layers_read:
            divisible.append(Group(tensor, members, edits))
    return divisible


def find_edits(graph: Linked, tensor: str) -> list[Edit]:
    """Return the constants that absorb a division of a tensor's last axis; empty if none can."""
    graph = Links.of(graph)
    node = graph.producers.get(tensor)
    if node is None:
        return []

    # A constant of the producer absorbs the division
    kind = node.op_type
    constant = [_is_constant(graph, name) for name in node.input]
    if kind == "LayerNormalization":
        is_last = attribute(node, "axis", -1) == -1
        if not is_last or not all(constant[1:]):
            return []
        return [Edit(node, index) for index in range(1, len(node.input))]  # edits of scale and bias
    if kind == "Mul" and any(constant):
        return [Edit(node, constant.index(True))]
    if kind == "Div" and constant[1]:
        return [Edit(node, 1, inverse=True)]
    if kind == "MatMul" and constant[1]:
        # A vector cannot absorb it: the product's last axis is another one
        is_vector = len(graph.constants[node.input[1]].dims) == 1
        return [] if is_vector else [Edit(node, 1)]

    # The division may move to the node's input
    source, own = _find_source(node, constant)
    if not source or graph.only_reader(source) is None:
        return []
    behind = find_edits(graph, source)
    return [*behind, *own] if behind else []


def _find_source(node: onnx.NodeProto, constant: Sequence[bool]) -> tuple[str, list[Edit]]:
    """Return the input to divide instead of the output, and the constants to divide as well.

    The name is empty if the node does not pass a division to its input.
    """
    if node.op_type in _HOMOGENEOUS:
        return node.input[0], []
    if node.op_type in ("Add", "Sub") and any(constant):
        index = constant.index(True)
        return node.input[1 - index], [Edit(node, index)]
    return "", []


def _is_constant(graph: Links, name: str) -> bool:
    tensor = graph.constants.get(name)
    return tensor is not None and tensor.data_type == onnx.TensorProto.FLOAT


def _divide(graph: Links, group: Group, divisors: Array) -> None:
    for edit in group.edits:
        values = read_initializer(graph, edit.node.input[edit.index])
        changed = values * divisors if edit.inverse else values / divisors
        write_input(graph, edit.node, edit.index, values=changed)
    for node in group.layers.values():
        write_weights(graph, node, read_weights(graph, node) * divisors)


def _find_ranges(walk: Walk, names: list[str]) -> dict[str, tuple[Array, Array]]:
    """Return the smallest and the largest value of each channel, by tensor."""
    ranges: dict[str, tuple[Array, Array]] = {}
    for part in walk.parts(names):
        for tensors in walk.run(part, "SmoothQuant: ranges of channels"):
            for name, values in zip(part, tensors, strict=True):
                rows = values.reshape(-1, values.shape[-1])
                low = rows.min(axis=0)
                high = rows.max(axis=0)
                before = ranges.get(name, (low, high))
                ranges[name] = np.minimum(before[0], low), np.maximum(before[1], high)
    return ranges


def _draw_rows(walk: Walk, names: list[str], samples: int) -> dict[str, Array]:
    """Return rows [n, channels] of each tensor: about `_ROWS` from all batches, or all if fewer."""
    drawn: dict[str, list[Array]] = {}
    for part in walk.parts(names):
        for tensors in walk.run(part, "SmoothQuant: rows"):
            for name, values in zip(part, tensors, strict=True):
                rows = values.reshape(-1, values.shape[-1])
                wanted = min(len(rows), -(-_ROWS * len(values) // samples))
                picked = np.linspace(0, len(rows) - 1, wanted).astype(int)
                drawn.setdefault(name, []).append(rows[picked])
    return {name: np.concatenate(parts) for name, parts in drawn.items()}


def _round(
    values: NDArray[np.float32], low: float, high: float, scheme: ActivationScheme
) -> NDArray[np.float32]:
    """Return each value rounded to the nearest level, with one range for all values.

    The range is widened to contain zero, and made symmetric if the scheme is.
    """
    low = min(low, 0.0)
    high = max(high, 0.0)
    if scheme.symmetric:
        high = max(-low, high)
        low = -high
    scale = max((high - low) / scheme.steps, float(np.finfo(np.float32).tiny))
    zero = round(-low / scale)
    levels = np.clip(np.rint(values / np.float32(scale)), -zero, scheme.steps - zero)
    return (levels * np.float32(scale)).astype(np.float32)
