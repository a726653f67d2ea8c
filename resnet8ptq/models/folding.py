"""Shape inference, graph optimization and folding before quantization: `model.fold`."""

import importlib
import logging
import math
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from resnet8ptq.core.text import one_line
from resnet8ptq.graph.layers import attribute
from resnet8ptq.graph.links import Links
from resnet8ptq.graph.passes import remove_unused, rewrite
from resnet8ptq.graph.weights import Array, read_bias, read_weights, write_bias, write_weights
from resnet8ptq.models import normalization


@dataclass(frozen=True)
class Folding:
    """The graph before and after preprocessing.

    Attributes:
        operators_before, operators_after: number of nodes by operator.
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
    """Fold batch normalization into the convolutions, by ONNX Runtime's own preprocessing.

    Keras 3 exports batch normalization as Mul and Add, which would otherwise stay separate
    operators. A failure of ONNX Runtime is recorded, not raised, because the unfolded graph can
    still be quantized.
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
        with _strict(), tempfile.TemporaryDirectory() as folder, chdir(folder):
            try:
                quant_pre_process(unfolded, folded, skip_symbolic_shape=has_if)
            except Exception:  # ONNX's own inference may still work
                quant_pre_process(unfolded, folded, skip_symbolic_shape=True)
        proto = onnx.load(folded)
        normalization.simplify_gemms(proto.graph)
        fold_into_products(proto.graph)
        normalization.copy_shared_weights(proto.graph)
        proto = rewrite(proto, [remove_unused, normalization.avoid_quantizer_names])
        if not all(node.name for node in proto.graph.node):  # nodes of inlined functions lack names
            normalization.name_nodes(proto.graph)
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


def fold_into_products(graph: onnx.GraphProto) -> None:
    """Fold constant Mul and Add into the Gemm or MatMul before them, in place.

    Such operators are batch normalization after a dense layer, which ONNX Runtime folds into
    convolutions only. The layer's output must have no other consumer. An Add after a MatMul stays,
    because a MatMul has no bias.
    """
    links = Links(graph)
    constants = links.constants
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in graph.value_info}
    layers: dict[str, onnx.NodeProto] = {}  # by output
    kept = []
    for node in graph.node:
        if _is_product(node, constants):
            layers[node.output[0]] = node
        operands = _find_operands(node, layers, constants)
        if operands is not None and not links.is_shared(operands[0]):
            taken, constant = operands
            layer = layers[taken]
            rank = max(2, ranks.get(taken, 0))
            if _fold_into(links, layer, node, numpy_helper.to_array(constants[constant]), rank):
                layer.output[0] = node.output[0]
                layers[layer.output[0]] = layer
                continue
        kept.append(node)
    del graph.node[:]
    graph.node.extend(kept)


def _find_operands(
    node: onnx.NodeProto, layers: Collection[str], constants: Collection[str]
) -> tuple[str, str] | None:
    """Return the names of a layer's output and of the constant by which a Mul or Add changes it."""
    if node.op_type not in ("Mul", "Add"):
        return None
    outputs = [name for name in node.input if name in layers]
    values = [name for name in node.input if name in constants]
    if not outputs or len(values) != 1:
        return None
    return outputs[0], values[0]


def _is_product(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> bool:
    if node.op_type not in ("Gemm", "MatMul") or node.input[1] not in constants:
        return False
    plain = attribute(node, "alpha", 1.0) == attribute(node, "beta", 1.0) == 1
    matrix = len(constants[node.input[1]].dims) == 2
    return plain and matrix and all(name in constants for name in node.input[2:])


def _fold_into(
    links: Links, layer: onnx.NodeProto, node: onnx.NodeProto, values: Array, rank: int
) -> bool:
    """Fold a node's values into the layer before it; return False if they are not [channels].

    Args:
        rank: number of axes of the layer's output; 2 if unknown. A constant with more axes would
            add axes to the output, so it is not folded.
    """
    weights = read_weights(links, layer).astype(np.float64)
    bias = read_bias(links, layer).astype(np.float64)
    channels = len(weights)
    if not _is_by_channel(values.shape, channels):
        return False
    if values.ndim > rank:
        return False
    if node.op_type == "Add" and layer.op_type == "MatMul":  # a MatMul has no bias
        return False
    by_channel = np.broadcast_to(values.reshape(-1), channels).astype(np.float64)
    if node.op_type == "Mul":
        weights = weights * by_channel[:, np.newaxis]
        bias = bias * by_channel
    else:
        bias = bias + by_channel
    write_weights(links, layer, weights)
    if layer.op_type == "Gemm":
        write_bias(links, layer, bias)
    return True


def _is_by_channel(shape: tuple[int, ...], channels: int) -> bool:
    """Return whether a constant broadcasts along the last axis only.

    >>> _is_by_channel((1, 8), 8), _is_by_channel((8, 1), 8), _is_by_channel((), 8)
    (True, False, True)
    """
    return math.prod(shape[:-1]) == 1 and shape[-1:] in ((), (1,), (channels,))


@contextmanager
def _strict() -> Iterator[None]:
    """Raise RuntimeError when `quant_pre_process` logs that its optimization failed."""

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
    return dict(Counter(node.op_type for node in onnx.load(path).graph.node))
