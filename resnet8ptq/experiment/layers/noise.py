"""The noise that rounded tensors add to a network's output, estimated from one quantized file.

FP32 runs with a group of tensors rounded as in the file. The noisiest group is halved again and
again. This takes at most dozens of measurements on a few samples, for any number of layers.
"""

import heapq
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import onnx
from numpy.typing import NDArray

from resnet8ptq.core.console import track
from resnet8ptq.core.records import feed
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph import qdq
from resnet8ptq.graph.links import Links, input_names
from resnet8ptq.graph.qdq import RoundedActivation, RoundedWeight
from resnet8ptq.graph.session import end_at_logits, open_session

Array = NDArray[np.float64]
SAMPLES = 4
RUNS = 64  # most measurements of halves; each halving takes two
LEAST = 0.01  # share of the whole noise below which a group is not halved
# The output of these operators has the levels of their input: only both in float gain something.
_SAME_LEVELS = {
    "MaxPool",
    "Transpose",
    "Reshape",
    "Flatten",
    "Squeeze",
    "Unsqueeze",
    "Slice",
    "Gather",
}


@dataclass(frozen=True)
class NoiseSource:
    """Tensors that are rounded together.

    Attributes:
        nodes: the nodes that must all stay in float for the tensors to stay in float.
        noise: noise added to the outputs, relative to their power; 0 if not measured.
    """

    nodes: tuple[str, ...]
    weights: tuple[RoundedWeight, ...] = ()
    activations: tuple[RoundedActivation, ...] = ()
    noise: float = 0.0


def rank(
    fp32: onnx.ModelProto,
    quantized: onnx.ModelProto,
    in_float: Collection[str],
    samples: Split,
    threads: int,
) -> list[NoiseSource]:
    """Return the groups of `halve` as joined sources, the highest noise per source first.

    Args:
        fp32: the network before quantization.
        quantized: the quantized network in QDQ format.
        in_float: nodes that are in float already.
    """
    fp32 = onnx.ModelProto.FromString(fp32.SerializeToString())
    end_at_logits(fp32)
    measure = _measurer(fp32, samples.spaced(SAMPLES), threads)
    groups = halve(find_sources(fp32.graph, quantized.graph, in_float), measure)
    return [_join(group, noise) for noise, group in groups]


def find_sources(
    fp32: onnx.GraphProto, quantized: onnx.GraphProto, in_float: Collection[str]
) -> list[NoiseSource]:
    """Return the rounded tensors as sources, in the order of the graph.

    A tensor that an operator of `_SAME_LEVELS` computes from a rounded one shares its source. A
    source is left out if all its nodes are in `in_float`. The other sources keep only nodes outside
    `in_float`.
    """
    order = {node.name: index for index, node in enumerate(fp32.node)}
    producers = Links(fp32).producers

    # Join tensors that have the same levels
    sources: dict[str, NoiseSource] = {}
    keys: dict[str, str] = {}  # the key in `sources` of each tensor
    for tensor in qdq.rounded_activations(fp32, quantized):
        node = producers.get(tensor.name)
        key = tensor.name
        if node is not None and node.op_type in _SAME_LEVELS:
            key = keys.get(node.input[0], key)
        keys[tensor.name] = key
        source = NoiseSource(tensor.nodes, (), (tensor,))
        if key in sources:
            source = _join([sources[key], source])
        sources[key] = source
    weights = []
    for weight in qdq.rounded_weights(fp32, quantized):
        weights.append(NoiseSource((weight.node,), (weight,)))

    # Leave out nodes already in float
    kept = []
    for source in [*weights, *sources.values()]:
        nodes = tuple(node for node in source.nodes if node not in in_float)
        if nodes:
            kept.append(NoiseSource(nodes, source.weights, source.activations))
    return sorted(kept, key=lambda source: min(order[node] for node in source.nodes))


def halve(
    sources: Sequence[NoiseSource],
    measure: Callable[[Sequence[NoiseSource]], float],
    runs: int = RUNS,
) -> list[tuple[float, Sequence[NoiseSource]]]:
    """Return groups of sources with their noise, the highest noise per source first.

    The noisiest group is halved repeatedly. This ends when its noise is below `LEAST` of the whole,
    after `runs` measurements of halves, or when each group is a single source.
    """
    if not sources:
        return []
    ties = count()
    whole = measure(sources)
    heap = [(-whole, next(ties), list(sources))]
    done: list[tuple[float, Sequence[NoiseSource]]] = []

    # The heap's first group is the noisiest; single sources leave it
    for _ in track(range(runs // 2), "Measuring the noise of the layers", "halvings"):
        while heap and len(heap[0][2]) == 1:
            noise, _, group = heapq.heappop(heap)
            done.append((-noise, group))
        if not heap or -heap[0][0] < LEAST * whole:
            break
        _, _, group = heapq.heappop(heap)
        for half in (group[: len(group) // 2], group[len(group) // 2 :]):
            heapq.heappush(heap, (-measure(half), next(ties), half))
    done += [(-noise, group) for noise, _, group in heap]
    return sorted(done, key=lambda pair: -pair[0] / len(pair[1]))


def _join(sources: Sequence[NoiseSource], noise: float = 0.0) -> NoiseSource:
    nodes: dict[str, None] = {}  # an ordered set
    weights: list[RoundedWeight] = []
    activations: list[RoundedActivation] = []
    for source in sources:
        nodes |= dict.fromkeys(source.nodes)
        weights += source.weights
        activations += source.activations
    return NoiseSource(tuple(nodes), tuple(weights), tuple(activations), noise=noise)


def _measurer(
    fp32: onnx.ModelProto, samples: Split, threads: int
) -> Callable[[Sequence[NoiseSource]], float]:
    """Return a function from sources to their noise: the sum of relative squared errors.

    An output's squared error is relative to the output's power in FP32, summed over the samples.
    """
    names = input_names(fp32.graph)
    batches = list(samples.batches(1))

    def run(proto: onnx.ModelProto) -> list[list[Array]]:
        session = open_session(proto.SerializeToString(), threads, arena=False)
        runs = []
        for batch in batches:
            outputs = session.run(None, feed(batch, names))
            doubles = [np.asarray(output, np.float64) for output in outputs]
            runs.append(doubles)
        return runs

    # Run FP32 only once, as the reference of all measurements
    wanted = run(fp32)
    power = []  # power by output
    for values in zip(*wanted, strict=True):
        total = 0.0
        for value in values:
            total += float(np.square(value).sum())
        power.append(total or 1.0)

    # Round only the tensors of the sources, and compare
    def measure(sources: Sequence[NoiseSource]) -> float:
        joined = _join(sources)
        proto = fp32
        if joined.weights:
            proto = qdq.with_weights_rounded(proto, joined.weights)
        if joined.activations:
            proto = qdq.with_activations_rounded(proto, joined.activations)
        errors = []
        for got, exact in zip(run(proto), wanted, strict=True):
            for one, other, scale in zip(got, exact, power, strict=True):
                errors.append(square_distance(one, other) / scale)
        return sum(errors)

    return measure


def square_distance(one: Array, other: Array) -> float:
    """Return the sum of squared differences; values in only one of the outputs count in full.

    Outputs can differ in shape, because a network may return another number of boxes.
    """
    if one.ndim != other.ndim:
        return float(np.square(one).sum() + np.square(other).sum())
    joined = np.zeros(tuple(map(max, one.shape, other.shape)))
    joined[tuple(map(slice, one.shape))] += one
    joined[tuple(map(slice, other.shape))] -= other
    return float(np.square(joined).sum())
