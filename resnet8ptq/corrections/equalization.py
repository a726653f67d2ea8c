"""Cross-layer equalization.

Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019,
section 4.1. A ReLU is positively homogeneous: a channel before it can be divided by a factor if the
weights after it are multiplied by the same factor. The best factor gives a channel the same range
in both layers.
"""

import copy
import logging
from contextlib import suppress

import numpy as np
import onnx

from resnet8ptq.core.console import track
from resnet8ptq.core.errors import QuantizationError
from resnet8ptq.corrections import layers
from resnet8ptq.graph.links import Linked, Links
from resnet8ptq.graph.weights import Array, read_bias, read_weights, write_bias, write_weights
from resnet8ptq.precision.plan import Selection

log = logging.getLogger(__name__)

_HOMOGENEOUS = ("Relu", "LeakyRelu")
_TOLERANCE = 1e-4  # distance of a factor from 1 that counts as equal
_ROUNDS = 100
_LEAST_SHARE = 0.01  # least product of a channel's ranges, as a share of the largest


def equalize(proto: onnx.ModelProto, selection: Selection) -> onnx.ModelProto:
    """Return the network with equalized weights; its function is unchanged.

    Pairs may share a layer, so the rounds repeat until all factors are about 1, at most `_ROUNDS`
    times. In grouped convolutions, the range of an input channel covers only the filters that read
    it.
    """
    proto = copy.deepcopy(proto)
    pairs = find_pairs(proto.graph, selection)
    if not pairs:
        log.warning(
            "corrections.equalization: changes nothing: no two layers to quantize follow "
            "each other with at most a ReLU between (with model.fold=false, batch "
            "normalization is between)"
        )

    # Equalize all pairs, round by round
    links = Links(proto.graph)
    for _ in track(range(_ROUNDS), "Equalizing", "rounds at most"):
        is_equal = True  # no pair changes any more
        for first, second in pairs:
            factor = _equalize_pair(links, first, second)
            if not np.allclose(factor, 1, atol=_TOLERANCE, rtol=0):
                is_equal = False
        if is_equal:
            break
    return proto


def find_pairs(
    graph: onnx.GraphProto, selection: Selection
) -> list[tuple[onnx.NodeProto, onnx.NodeProto]]:
    """Return pairs of quantized layers of one kind; the second is the only reader of the first.

    A ReLU or leaky ReLU may lie between them. It is then the only reader of the first, and the
    second is its only reader. The kinds are convolution and matrix product.
    """
    # The layer that reads each tensor may be the second of a pair
    chosen = layers.find_plain_layers(graph, selection).values()
    seconds = {node.input[0]: node for node in chosen}
    links = Links(graph)
    pairs = []
    for first in chosen:
        name = first.output[0]
        between = links.only_reader(name)
        if between is not None and between.op_type in _HOMOGENEOUS:
            name = between.output[0]
        second = seconds.get(name)
        if second is None:
            continue

        # A Gemm after a Conv multiplies along the width, not the channels
        alike = (first.op_type == "Conv") == (second.op_type == "Conv")
        if alike and links.only_reader(name) is second:
            pairs.append((first, second))
    return pairs


def find_imbalance(graph: onnx.GraphProto) -> float:
    """Return the largest ratio of two channels' factors within a pair; 1 without pairs.

    Equalization divides channels that share the scale of an activation by these factors. Channels
    that hardly contribute do not count, because training leaves some with weights of nearly zero.
    """
    ratios = [1.0]
    with suppress(QuantizationError):  # the error means that no layer is left
        links = Links(graph)
        for first, second in find_pairs(graph, Selection()):
            before, after = _find_ranges(*_read_pair(links, first, second))
            share = before * after  # equalization does not change this product
            factors = _find_factors(before, after)[share >= _LEAST_SHARE * share.max()]
            ratios.append(float(factors.max() / factors.min()))
    return max(ratios)


def _read_pair(graph: Linked, first: onnx.NodeProto, second: onnx.NodeProto) -> tuple[Array, Array]:
    """Return the weights of a pair of layers.

    The weights of the second layer are [groups, filters, channels of a group, ...].
    """
    weights1 = read_weights(graph, first)
    weights2 = read_weights(graph, second)
    groups = len(weights1) // weights2.shape[1]
    return weights1, weights2.reshape(groups, -1, *weights2.shape[1:])


def _find_ranges(weights1: Array, grouped: Array) -> tuple[Array, Array]:
    """Return the largest absolute weight of each channel, [channels], in both layers of a pair."""
    others = (1, *range(3, grouped.ndim))  # all but the groups and the channels
    before = np.abs(weights1).reshape(len(weights1), -1).max(axis=1)
    after = np.abs(grouped).max(axis=others).reshape(-1)
    return before, after


def _find_factors(before: Array, after: Array) -> Array:
    """Return the divisors of channels, s = sqrt(r1 * r2) / r2 (equation 11); 1 without a range."""
    used = (before > 0) & (after > 0)  # a channel of zeros has no range to equalize
    factors = np.ones(len(before), np.float32)
    factors[used] = np.sqrt(before[used] / after[used])
    return factors


def _equalize_pair(graph: Linked, first: onnx.NodeProto, second: onnx.NodeProto) -> Array:
    weights1, grouped = _read_pair(graph, first, second)
    factors = _find_factors(*_find_ranges(weights1, grouped))
    write_weights(graph, first, weights1 / factors.reshape(-1, *(1,) * (weights1.ndim - 1)))
    if first.op_type != "MatMul":  # a MatMul has no bias, as an Add would separate the pair
        write_bias(graph, first, read_bias(graph, first) / factors)
    spread = factors.reshape(grouped.shape[0], 1, -1, *(1,) * (grouped.ndim - 3))
    write_weights(graph, second, (grouped * spread).reshape(-1, *grouped.shape[2:]))
    return factors
