"""The opset, names and shapes of an ONNX graph, made those that the rest of the package takes."""

import re
from collections.abc import Callable
from pathlib import Path

import onnx
from onnx import TensorProto, defs, numpy_helper, version_converter

from resnet8ptq.core.errors import ModelError
from resnet8ptq.core.text import one_line
from resnet8ptq.models.gates.onnx import ONNX_DOMAINS, find_all, graph_inputs

OPSET = 17
MIN_OPSET = 13  # the first whose QuantizeLinear knows channels
MIN_IR_VERSION = 8  # belongs to opset 17; from 4 on, initializers need not be inputs


def opset(proto: onnx.ModelProto) -> int:
    """Return the version of ONNX's own operators that the graph is written in."""
    return max(entry.version for entry in proto.opset_import if entry.domain in ONNX_DOMAINS)


def raise_opset(proto: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """Return a copy; from below opset 13 converted to 17, or as far from 13 on as onnx can.

    Raises:
        ModelError: stuck below 13; names the step, its operators and the converter's reason.
    """
    raised, version = onnx.ModelProto(), opset(proto)
    raised.CopyFrom(proto)
    target = OPSET if version < MIN_OPSET else version
    while version < target:
        try:
            converted = version_converter.convert_version(raised, version + 1)
            onnx.checker.check_model(converted)
        except Exception as error:  # RuntimeError, ConvertError, ValidationError
            if version >= MIN_OPSET:
                break
            raise ModelError(
                f"{path}: opset {opset(proto)} is too old, takes {MIN_OPSET} or more, and from "
                f"{version} to {version + 1} it cannot be converted: "
                f"{', '.join(_changed_operators(raised, version + 1))} ({one_line(error)})"
            ) from None
        raised, version = converted, version + 1
    return raised


def _changed_operators(proto: onnx.ModelProto, version: int) -> list[str]:
    """Return the graph's operators that are defined anew, or are gone, in an opset."""
    changed = []
    for name in sorted({node.op_type for node in proto.graph.node if node.domain in ONNX_DOMAINS}):
        try:
            if defs.get_schema(name, version).since_version == version:
                changed.append(name)
        except defs.SchemaError:
            changed.append(name)
    return changed


def normalize(proto: onnx.ModelProto) -> None:
    """Change a graph of one input and one output in place; what it computes stays.

    The input becomes `input` [N, H, W, C], the output `probabilities` [N, classes]; every node has
    a name of its own, which onnx2torch leaves as it is; constants are initializers.
    """
    graph = proto.graph
    [taken], [given] = graph_inputs(graph), graph.output
    del graph.input[:]
    graph.input.append(taken)
    del graph.value_info[:]  # shapes that held before
    proto.ir_version = max(proto.ir_version, MIN_IR_VERSION)
    for entry in [*proto.opset_import, *find_all(proto, onnx.NodeProto)]:
        entry.domain = "" if entry.domain == "ai.onnx" else entry.domain
    _move_constants(graph)
    _rename_tensors(graph, {taken.name: "input", given.name: "probabilities"})
    _name_nodes(graph)
    fixed = graph.input[0].type.tensor_type.shape.dim[0].dim_value
    if fixed:
        _free_batch(graph, fixed)
    for value in (graph.input[0], graph.output[0]):
        if value.type.tensor_type.shape.dim:
            value.type.tensor_type.shape.dim[0].dim_param = "N"


def _move_constants(graph: onnx.GraphProto) -> None:
    """Turn Constant nodes into initializers: that is where quantization looks for weights."""
    kept = []
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            tensor = graph.initializer.add()
            tensor.CopyFrom(node.attribute[0].t)
            tensor.name = node.output[0]
        else:
            kept.append(onnx.NodeProto.FromString(node.SerializeToString()))
    del graph.node[:]
    graph.node.extend(kept)


def _rename_tensors(graph: onnx.GraphProto, wanted: dict[str, str]) -> None:
    """Rename everywhere; a tensor that has a wanted name already gets another."""

    def rename(name: str) -> str:
        if name in wanted:
            return wanted[name]
        return f"{name}__of_file" if name in wanted.values() else name

    _rename(graph, rename)


def _rename(graph: onnx.GraphProto, rename: Callable[[str], str]) -> None:
    for value in [*graph.input, *graph.output, *graph.initializer, *graph.value_info]:
        value.name = rename(value.name)
    del graph.quantization_annotation[:]
    for node in graph.node:
        node.input[:] = [rename(name) for name in node.input]
        node.output[:] = [rename(name) for name in node.output]
        for attribute in node.attribute:
            inner = [attribute.g] if attribute.HasField("g") else []
            for subgraph in [*inner, *attribute.graphs]:
                _rename(subgraph, rename)


def _name_nodes(graph: onnx.GraphProto) -> None:
    """Give every node a name of its own, in characters that torch takes for a module."""
    taken: set[str] = set()
    for index, node in enumerate(graph.node):
        name = re.sub(r"[^\w/-]", "_", node.name.replace(".", "/")).strip("/")
        if not name or name in taken:
            name = f"{name or node.op_type}_{index}"
        while name in taken:
            name += "_"
        taken.add(name)
        node.name = name


def _free_batch(graph: onnx.GraphProto, fixed: int) -> None:
    """Let constant shapes of Reshape copy the batch dimension (0) instead of naming it."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        shape = constants.get(node.input[1]) if node.op_type == "Reshape" else None
        if shape is None or shape.data_type != TensorProto.INT64:
            continue
        dims = numpy_helper.to_array(shape).copy()
        if dims.ndim == 1 and len(dims) > 1 and dims[0] == fixed:
            dims[0] = 0
            freed = numpy_helper.from_array(dims, f"{node.name}__shape")  # others may share it
            graph.initializer.append(freed)
            node.input[1] = freed.name
