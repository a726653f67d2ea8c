"""Infers shapes, optimizes the graph and folds batch normalization, for `model.fold`."""

import importlib
import io
import logging
import math
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from resnet8ptq.core.text import one_line
from resnet8ptq.graph.layers import attribute, channel_axis
from resnet8ptq.graph.links import Links
from resnet8ptq.graph.passes import remove_unused, rewrite
from resnet8ptq.graph.weights import (
    read_bias,
    read_initializer,
    read_weights,
    write_bias,
    write_weights,
)
from resnet8ptq.models import normalization

_TAKE_NORMS = ("Conv", "ConvTranspose", "Gemm", "MatMul")  # batch normalization is folded into them


@dataclass(frozen=True)
class Folding:
    """The size of the graph before and after preprocessing.

    Attributes:
        operators_before, operators_after: number of nodes by operator.
        bytes_before, bytes_after: size of the file.
        failure: the reason why there is no preprocessed graph; None if there is one.
    """

    operators_before: dict[str, int] = field(default_factory=dict)
    operators_after: dict[str, int] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0
    failure: str | None = None

    def describe(self) -> dict[str, str]:
        """Return the changes as MLflow params."""
        before = Counter(self.operators_before)
        after = Counter(self.operators_after)
        changes = []
        for name in sorted(before | after):
            if before[name] != after[name]:
                changes.append(f"{name} {before[name]} -> {after[name]}")
        return {
            "preprocess_nodes": f"{before.total()} -> {after.total()}",
            "preprocess_bytes": f"{self.bytes_before} -> {self.bytes_after}",
            "preprocess_operators": ", ".join(changes) or "unchanged",
        }


def fold_batch_norms(unfolded: Path, folded: Path) -> Folding:
    """Write the graph `unfolded` to `folded`, with batch normalization folded into layers.

    ONNX Runtime's own preprocessing folds it into convolutions and MatMuls, `fold_into_layers` into
    other layers. Keras 3 exports batch normalization as Mul and Add, which are folded as well. A
    failure is recorded, not raised, because the unfolded graph can still be quantized.
    """
    from onnxruntime.quantization.shape_inference import quant_pre_process

    _import_tools()
    unfolded = unfolded.absolute()
    folded = folded.absolute()
    try:
        # If shape inference fails, ONNX Runtime leaves a graph in the working folder.
        # With an If, symbolic inference takes a free batch size for another number than 1, and
        # overwrites a branch.
        has_if = "If" in _operators(unfolded)
        # Symbolic inference prints what it cannot follow.
        quiet = redirect_stdout(io.StringIO())
        with _strict(), quiet, tempfile.TemporaryDirectory() as folder, chdir(folder):
            try:
                quant_pre_process(unfolded, folded, skip_symbolic_shape=has_if)
            except Exception:  # ONNX's own inference may still work
                quant_pre_process(unfolded, folded, skip_symbolic_shape=True)

        # Fold into the layers that ONNX Runtime leaves, then restore the normal form
        proto = onnx.load(folded)
        normalization.simplify_gemms(proto.graph)
        all_named = all(node.name for node in proto.graph.node)
        if not all_named:  # nodes of inlined functions lack names
            normalization.name_nodes(proto.graph)
        fold_into_layers(proto.graph)
        normalization.copy_shared_weights(proto.graph)
        proto = rewrite(proto, [remove_unused, normalization.avoid_quantizer_names])
        onnx.save(proto, folded)
    except Exception as error:  # symbolic shape inference raises Exception itself
        folded.unlink(missing_ok=True)
        return Folding(failure=one_line(error))
    return Folding(
        operators_before=_operators(unfolded),
        operators_after=_operators(folded),
        bytes_before=unfolded.stat().st_size,
        bytes_after=folded.stat().st_size,
    )


def _import_tools() -> None:
    """Import ONNX Runtime's tools without torch, which only an unused function needs."""
    exporting = types.ModuleType("onnxruntime.tools.pytorch_export_helpers")
    exporting.__dict__["infer_input_info"] = None
    sys.modules.setdefault(exporting.__name__, exporting)
    importlib.import_module("onnxruntime.tools")


def fold_into_layers(graph: onnx.GraphProto) -> None:
    """Fold nodes that change each channel by constants into the layer before them, in place.

    Such nodes are Mul, Add and BatchNormalization after a layer of `_is_product` or
    `_is_transposed`. ONNX Runtime folds all three into a Conv only. The layer's output must have no
    other reader. An Add or BatchNormalization after a MatMul stays, because a MatMul has no bias.
    """
    links = Links(graph)
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in graph.value_info}
    layers: dict[str, onnx.NodeProto] = {}  # nodes by output
    kept = []
    for node in graph.node:
        if _is_product(node, links.constants) or _is_transposed(node, links.constants):
            layers[node.output[0]] = node

        # Drop a node that the layer can compute, and give the layer its output
        changed = _find_changed(node, layers, links.constants)
        if changed is not None and not links.is_shared(changed):
            layer = layers[changed]
            affine = _read_affine(links, layer, node, ranks.get(changed, 0))
            if affine is not None:
                _fold_into(links, layer, affine)
                layer.output[0] = node.output[0]
                layers[layer.output[0]] = layer
                continue
        kept.append(node)
    del graph.node[:]
    graph.node.extend(kept)


def count_unfolded_norms(graph: onnx.GraphProto) -> int:
    """Return the number of BatchNormalization nodes that follow no layer, and so usually stay.

    Networks that normalize activations have such nodes after a Relu or a Concat, for example. A
    layer whose output has other readers does not count. ONNX Runtime can fold a few of the counted
    nodes, such as one after a MatMul and a Reshape.
    """
    links = Links(graph)
    count = 0
    for node in graph.node:
        if node.op_type == "BatchNormalization" and not _follows_layer(links, node.input[0]):
            count += 1
    return count


def _follows_layer(links: Links, name: str) -> bool:
    """Return whether a tensor has one reader and comes from a layer.

    The nodes between them may be Identity, Dropout, and Mul or Add of a constant. Their outputs
    also have one reader each.
    """
    node = links.producers.get(name)
    if node is None or links.is_shared(name):
        return False
    if node.op_type in _TAKE_NORMS:
        return True
    if node.op_type in ("Identity", "Dropout"):
        return _follows_layer(links, node.input[0])
    if node.op_type not in ("Add", "Mul"):
        return False

    # An Add or Mul must change one computed tensor by a constant
    computed = []
    for operand in node.input:
        producer = links.producers.get(operand)
        is_constant = operand in links.constants or (
            producer is not None and producer.op_type == "Constant"
        )
        if not is_constant:
            computed.append(operand)
    return len(computed) == 1 and _follows_layer(links, computed[0])


@dataclass(frozen=True)
class _Affine:
    """A change of a layer's output: `values * scale + offset`, one of each for every channel."""

    scale: NDArray[np.float64]
    offset: NDArray[np.float64]


def _find_changed(
    node: onnx.NodeProto, layers: Collection[str], constants: Collection[str]
) -> str | None:
    """Return the output of a layer that a node changes by constants; None for other nodes.

    Args:
        layers: the outputs of layers.
        constants: the names of the graph's constants.
    """
    others = [name for name in node.input if name not in layers]
    are_constant = all(name in constants for name in others)
    if len(others) != len(node.input) - 1 or not are_constant:
        return None
    if node.op_type in ("Mul", "Add"):
        [changed] = [name for name in node.input if name in layers]
        return changed
    is_inference = not attribute(node, "training_mode", 0) and len(node.output) == 1
    if node.op_type == "BatchNormalization" and node.input[0] in layers and is_inference:
        return node.input[0]
    return None


def _is_product(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> bool:
    """Return whether a node is an unscaled product with a constant matrix and no computed bias."""
    if node.op_type not in ("Gemm", "MatMul") or node.input[1] not in constants:
        return False
    is_plain = attribute(node, "alpha", 1.0) == attribute(node, "beta", 1.0) == 1
    is_matrix = len(constants[node.input[1]].dims) == 2
    has_constant_bias = all(name in constants for name in node.input[2:])
    return is_plain and is_matrix and has_constant_bias


def _is_transposed(node: onnx.NodeProto, constants: Collection[str]) -> bool:
    """Return whether a node is a ConvTranspose of one group, without computed weights or bias.

    Folding may add a bias. With a bias, a ConvTranspose of several groups has one scale for all
    channels, see `layers.find_split_groups`.
    """
    constant = all(name in constants for name in filter(None, node.input[1:]))
    return node.op_type == "ConvTranspose" and attribute(node, "group", 1) == 1 and constant


def _read_affine(
    links: Links, layer: onnx.NodeProto, node: onnx.NodeProto, rank: int
) -> _Affine | None:
    """Return how a node changes the channels of the layer's output.

    Returns None if the change differs within a channel, or if the layer cannot compute it.

    Args:
        rank: number of axes of a product's output; 0 if unknown, which counts as 2. A constant with
            more axes would add axes to the output, so it is not folded.
    """
    weights = links.constants[layer.input[1]]
    channels = weights.dims[channel_axis(layer)]
    ones = np.ones(channels)
    zeros = np.zeros(channels)
    is_product = layer.op_type != "ConvTranspose"

    # In inference, batch normalization scales and shifts each channel
    if node.op_type == "BatchNormalization":
        if layer.op_type == "MatMul":
            return None
        constants = [read_initializer(links, name) for name in node.input[1:]]
        weight, bias, mean, variance = np.array(constants, np.float64)
        scale = weight / np.sqrt(variance + attribute(node, "epsilon", 1e-5))
        return _Affine(scale, bias - mean * scale)

    # Otherwise the node is a Mul or an Add of one constant
    [name] = [name for name in node.input if name != layer.output[0]]
    values = read_initializer(links, name)
    behind = 0 if is_product else len(weights.dims) - 2  # axes behind the channels
    if not _is_by_channel(values.shape, channels, behind):
        return None
    axes = len(weights.dims)
    if is_product:
        axes = rank or 2
    if values.ndim > axes:  # the constant would add axes
        return None
    by_channel = np.broadcast_to(values.reshape(-1), channels).astype(np.float64)
    if node.op_type == "Mul":
        return _Affine(by_channel, zeros)
    if layer.op_type == "MatMul":  # a MatMul has no bias
        return None
    return _Affine(ones, by_channel)


def _fold_into(links: Links, layer: onnx.NodeProto, affine: _Affine) -> None:
    weights = read_weights(links, layer).astype(np.float64)
    bias = read_bias(links, layer).astype(np.float64)
    by_channel = affine.scale.reshape(-1, *[1] * (weights.ndim - 1))
    write_weights(links, layer, weights * by_channel)
    if layer.op_type != "MatMul":
        write_bias(links, layer, bias * affine.scale + affine.offset)


def _is_by_channel(shape: tuple[int, ...], channels: int, behind: int = 0) -> bool:
    """Return whether a constant has a single value, or one for each channel along their axis.

    Args:
        shape: the shape of the constant.
        behind: number of axes behind the channels.

    >>> _is_by_channel((1, 8), 8), _is_by_channel((8, 1), 8), _is_by_channel((), 8)
    (True, False, True)
    >>> _is_by_channel((8, 1, 1), 8, behind=2), _is_by_channel((8,), 8, behind=2)
    (True, False)
    """
    aligned = (1,) * (behind + 1) + shape
    axis = len(aligned) - 1 - behind
    others = aligned[:axis] + aligned[axis + 1 :]
    return math.prod(others) == 1 and aligned[axis] in (1, channels)


@contextmanager
def _strict() -> Iterator[None]:
    """Raise RuntimeError when `quant_pre_process` logs an error, such as a failed optimization."""

    def refuse(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            raise RuntimeError(f"optimization failed: {sys.exc_info()[1]}")
        return True

    log = logging.getLogger("onnxruntime.quantization.shape_inference")
    log.addFilter(refuse)
    try:
        yield
    finally:
        log.removeFilter(refuse)


def _operators(path: Path) -> dict[str, int]:
    nodes = onnx.load(path).graph.node
    return dict(Counter(node.op_type for node in nodes))
