"""Known faults of older ONNX Runtimes that concern a quantized file.

Each row of `FAULTS` was tried on an x86 CPU with ONNX Runtime 1.12 to 1.30. The tried file had only
the nodes that the row names, and ran with and without graph optimization. Each fault occurred in
all tried releases before the one that `fixed` names.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from resnet8ptq.graph.layers import attribute
from resnet8ptq.graph.links import Links

_ISSUES = "https://github.com/microsoft/onnxruntime/issues"
_MOVES = ("Reshape", "Transpose")
TRIED = 12  # the minor version of the oldest ONNX Runtime 1.x that was tried
_NEAR = 0.01  # relative difference of scales that counts as equal


@dataclass(frozen=True)
class Fault:
    """A fault of graph optimization in releases of ONNX Runtime.

    Attributes:
        fixed: the minor version of the first ONNX Runtime 1.x without the fault.
        nodes: the affected nodes, in words.
        effect: the result, in words.
        source: the address of the public report.
        concerns: returns whether the fault affects a node of a graph.
    """

    fixed: int
    nodes: str
    effect: str
    source: str
    concerns: Callable[[onnx.NodeProto, Links], bool]


def _lacks_zero_point(node: onnx.NodeProto, links: Links) -> bool:
    """Return whether a node dequantizes int8 without a zero point, for a Reshape or Transpose."""
    return _is_moved(node, links, TensorProto.INT8) and not any(node.input[2:3])


def _is_int32_moved(node: onnx.NodeProto, links: Links) -> bool:
    return _is_moved(node, links, TensorProto.INT32)


def _is_moved(node: onnx.NodeProto, links: Links, dtype: int) -> bool:
    if node.op_type != "DequantizeLinear" or not links.constants.keys() >= {*node.input[:2]}:
        return False
    is_of_type = links.constants[node.input[0]].data_type == dtype
    return is_of_type and not {*_MOVES}.isdisjoint(_reader_types(node, links))


def _interpolates_integers(node: onnx.NodeProto, links: Links) -> bool:
    if node.op_type != "Resize" or attribute(node, "mode", b"nearest") == b"nearest":
        return False
    is_quantized = _reader_types(node, links) == ["QuantizeLinear"]
    return is_quantized and _is_dequantized(node.input[0], links)


def _reader_types(node: onnx.NodeProto, links: Links) -> list[str]:
    """Return the types of the operators that read the first output of a node."""
    return [reader.op_type for reader in links.readers(node.output[0])]


def _scales_bias(node: onnx.NodeProto, links: Links) -> bool:
    if node.op_type != "Gemm" or attribute(node, "alpha", 1.0) == 1 or not any(node.input[2:3]):
        return False
    return all(_is_dequantized(name, links) for name in node.input)


def _is_dequantized(name: str, links: Links) -> bool:
    maker = links.producers.get(name)
    return maker is not None and maker.op_type == "DequantizeLinear"


def _scales_bias_otherwise(node: onnx.NodeProto, links: Links) -> bool:
    """Return whether the scale of a Conv's bias differs from that of input times weights."""
    if node.op_type != "Conv" or not any(node.input[2:3]):
        return False
    data = _read_scale(node.input[0], links)
    weights = _read_scale(node.input[1], links)
    bias = _read_scale(node.input[2], links)
    if data is None or weights is None or bias is None:
        return False
    products = data.astype(np.float64) * weights
    return bool((np.abs(bias / products - 1) > _NEAR).any())


def _read_scale(name: str, links: Links) -> np.ndarray | None:
    """Return the constant scales [1] or [channels] of a dequantized tensor; else None."""
    if not _is_dequantized(name, links):
        return None
    scale = links.constants.get(links.producers[name].input[1])
    if scale is None:
        return None
    return numpy_helper.to_array(scale).reshape(-1)


FAULTS = (
    Fault(
        28,
        "DequantizeLinear of int8 without a zero point before Reshape or Transpose",
        "negative values become 0, or the file does not load",
        f"{_ISSUES}/27845",
        _lacks_zero_point,
    ),
    Fault(
        28,
        "DequantizeLinear of int32 before Reshape or Transpose",
        "values are wrong, or the file does not load",
        f"{_ISSUES}/25001",
        _is_int32_moved,
    ),
    Fault(
        27,
        "Resize by interpolation between 8-bit tensors",
        "values are one level too low",
        f"{_ISSUES}/28448",
        _interpolates_integers,
    ),
    Fault(
        28,
        "Gemm in 8 bits with a bias and alpha other than 1",
        "alpha scales the bias too",
        f"{_ISSUES}/28130",
        _scales_bias,
    ),
    Fault(
        27,
        "Conv in 8 bits with a bias of another scale than input times weights",
        "the bias is wrong",
        f"{_ISSUES}/24711",
        _scales_bias_otherwise,
    ),
)


def find_known_faults(proto: onnx.ModelProto, version: int) -> list[str]:
    """Return the faults of ONNX Runtime 1.`version` that concern a file, in words.

    Versions before `TRIED` have no list of faults. Nodes of inner graphs are not checked.
    """
    links = Links(proto.graph)
    lines = []
    for fault in FAULTS:
        if not TRIED <= version < fault.fixed:
            continue
        nodes = [node for node in proto.graph.node if fault.concerns(node, links)]
        if nodes:
            name = nodes[0].name or nodes[0].output[0]
            lines.append(
                f"known fault of ONNX Runtime 1.{version}: {fault.nodes} ({len(nodes)} nodes, "
                f"first {name}): {fault.effect}; fixed in 1.{fault.fixed}; without graph "
                f"optimization the file is correct; {fault.source}"
            )
    return lines


def write_zero_points(graph: onnx.GraphProto) -> None:
    """Add missing zero points of int8 constants before Reshape or Transpose, in place.

    Without them, some releases lose negative values, see `FAULTS`. The file's meaning does not
    change, because a missing zero point counts as 0.
    """
    links = Links(graph)
    for node in graph.node:
        if not _lacks_zero_point(node, links):
            continue
        zeros = np.zeros(tuple(links.constants[node.input[1]].dims), np.int8)
        name = f"{node.output[0]}/zero_point"
        graph.initializer.append(numpy_helper.from_array(zeros, name))
        node.input[:] = [*node.input[:2], name]
