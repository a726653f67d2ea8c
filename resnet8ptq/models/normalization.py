"""The opset and form of an ONNX graph, made those that the rest of the package takes."""

import copy
import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import defs, numpy_helper, version_converter

from resnet8ptq.core.errors import ModelError
from resnet8ptq.core.text import one_line
from resnet8ptq.graph.layers import LAYERS, attribute
from resnet8ptq.graph.weights import read_bias, write_bias
from resnet8ptq.models.gates.onnx import ONNX_DOMAINS, find_all, graph_inputs, read_constant

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
    raised, version = copy.deepcopy(proto), opset(proto)
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
    """Change a graph in place; what it computes stays, and so do its inputs and outputs.

    Constants are initializers, and no inputs; only the domains that nodes are of are imported.
    """
    graph = proto.graph
    taken = list(graph_inputs(graph))
    del graph.input[:]
    graph.input.extend(taken)
    del graph.value_info[:], graph.quantization_annotation[:]
    proto.ir_version = max(proto.ir_version, MIN_IR_VERSION)
    nodes = list(find_all(proto, onnx.NodeProto))
    for entry in [*proto.opset_import, *nodes]:
        entry.domain = "" if entry.domain == "ai.onnx" else entry.domain
    used = {"", *(node.domain for node in nodes)}
    imports = [entry for entry in proto.opset_import if entry.domain in used]
    del proto.opset_import[:]
    proto.opset_import.extend(imports)
    _move_constants(graph)
    _drop_allowzero(graph)


def _move_constants(graph: onnx.GraphProto) -> None:
    """Turn Constant nodes into initializers: that is where quantization looks for weights."""
    for node in [node for node in graph.node if node.op_type == "Constant"]:
        constant = read_constant(node)
        if constant is not None:
            tensor = graph.initializer.add()
            tensor.CopyFrom(constant)
            tensor.name = node.output[0]
            graph.node.remove(node)


def _drop_allowzero(graph: onnx.GraphProto) -> None:
    """Drop what a Reshape says of zeros, where its shape has none: onnx2torch refuses it."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        shape = constants.get(node.input[1]) if node.op_type == "Reshape" else None
        if shape is not None and numpy_helper.to_array(shape).all():
            drop_attribute(node, "allowzero")


def flatten_biases(graph: onnx.GraphProto) -> bool:
    """Make the constant bias of each Gemm one number for each output, [N]; tell of any changes.

    ONNX broadcasts [1, N] too; ONNX Runtime's per-channel quantization fails on it.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer}
    wide = [
        node
        for node in graph.node
        if node.op_type == "Gemm"
        and constants.keys() >= set(node.input[1:]) > {node.input[1]}
        and len(dims := constants[node.input[2]].dims) != 1
        and math.prod(dims[:-1]) == 1
    ]
    for node in wide:
        write_bias(graph, node, read_bias(graph, node))
    return bool(wide)


def drop_attribute(node: onnx.NodeProto, name: str) -> None:
    """Remove an attribute from a node that may have it."""
    for each in [each for each in node.attribute if each.name == name]:
        node.attribute.remove(each)


def write_paddings(proto: onnx.ModelProto) -> None:
    """Write out, in place, the paddings that a graph of known sizes leaves to be worked out.

    onnx2torch knows explicit ones only. Of `SAME_UPPER`, as ONNX defines it: as many outputs as
    ceil(size / stride), and the larger half of an odd padding at the end.
    """
    sizes: dict[str, list[int]] = {}
    for node in proto.graph.node:
        auto = next((each for each in node.attribute if each.name == "auto_pad"), None)
        if auto is None or auto.s not in (b"SAME_UPPER", b"SAME_LOWER"):
            continue
        sizes = sizes or _sizes(proto)
        spatial = sizes.get(node.input[0], [])[2:]
        weights = sizes.get(node.input[1], []) if len(node.input) > 1 else []
        kernel = attribute(node, "kernel_shape", weights[2:])
        if not spatial or len(kernel) != len(spatial) or 0 in spatial:
            continue
        ones = [1] * len(spatial)
        strides, dilations = attribute(node, "strides", ones), attribute(node, "dilations", ones)
        small, large = [], []
        for size, width, stride, dilation in zip(spatial, kernel, strides, dilations, strict=True):
            span = (width - 1) * dilation + 1
            total = max((-(-size // stride) - 1) * stride + span - size, 0)
            small.append(total // 2)
            large.append(total - total // 2)
        pads = [*small, *large] if auto.s == b"SAME_UPPER" else [*large, *small]
        node.attribute.remove(auto)
        node.attribute.append(onnx.helper.make_attribute("pads", pads))


def _sizes(proto: onnx.ModelProto) -> dict[str, list[int]]:
    """Return the sizes of each tensor that has a known shape; 0 where one is free."""
    graph = onnx.shape_inference.infer_shapes(proto).graph
    values = [*graph.input, *graph.value_info, *graph.output]
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in values
    }
    return shapes | {tensor.name: list(tensor.dims) for tensor in graph.initializer}


def rename(graph: onnx.GraphProto, wanted: Mapping[str, str]) -> None:
    """Rename tensors everywhere; what has a wanted name already makes way."""

    def change(name: str) -> str:
        if name in wanted:
            return wanted[name]
        return f"{name}__of_file" if name in wanted.values() else name

    del graph.quantization_annotation[:]
    values = find_all(graph, onnx.ValueInfoProto), find_all(graph, onnx.TensorProto)
    for value in itertools.chain(*values):
        value.name = change(value.name)
    for node in find_all(graph, onnx.NodeProto):
        node.input[:] = [change(name) for name in node.input]
        node.output[:] = [change(name) for name in node.output]


# What ONNX Runtime's quantizer puts behind the name of a tensor, to name a tensor of its own.
_SUFFIX = re.compile(r"_\w*(?:scale|zero_point|[Qq]uantize)\w*|quant_scaled_output")


def make_way_for_quantizer(graph: onnx.GraphProto) -> bool:
    """Rename tensors whose names ONNX Runtime's quantizer would make again; tell of any changes.

    It names a tensor's scale after the tensor, and numbers the copies of a bias that layers share,
    without looking whether a tensor of that name exists. Inputs and outputs keep their names.
    """
    nodes = list(find_all(graph, onnx.NodeProto))
    names = {name for node in nodes for name in (*node.input, *node.output) if name}
    kept = {value.name for value in (*graph.input, *graph.output)}
    biases = Counter(n.input[2] for n in nodes if n.op_type in LAYERS and len(n.input) > 2)
    wanted = {}
    for name in names:
        for length in range(1, len(name)):
            base, suffix = name[:length], name[length:]
            copied = biases[base] > 1 and suffix.isdigit()
            if base in names and (copied or _SUFFIX.fullmatch(suffix)):
                renamed = base if name in kept else name
                wanted[renamed] = f"{renamed}__of_file"
    wanted = {name: other for name, other in wanted.items() if name not in kept}
    if wanted:
        rename(graph, wanted)
    return bool(wanted)


def name_nodes(graph: onnx.GraphProto) -> None:
    """Give every node a name of its own, which onnx2torch leaves as it is for its module."""
    taken: set[str] = set()
    for index, node in enumerate(graph.node):
        name = re.sub(r"[^\w/-]", "_", node.name.replace(".", "/")).strip("/")
        if not name or name in taken:
            name = f"{name or node.op_type}_{index}"
        while name in taken:
            name += "_"
        taken.add(name)
        node.name = name
