"""Normalizes an ONNX graph: opset, constants, operators, and names of nodes and tensors."""

import copy
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import defs, helper, numpy_helper, version_converter
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from resnet8ptq.core.errors import ModelError
from resnet8ptq.core.text import one_line
from resnet8ptq.graph.layers import LAYERS, attribute, channel_axis
from resnet8ptq.graph.links import Links, find_all, inputs_of
from resnet8ptq.graph.passes import (
    Pass,
    Writer,
    end_with,
    input_of,
    nodes_of,
    producer_of,
    remove_unused,
    rename,
    replace_node,
    rewrite,
    values_of,
)
from resnet8ptq.graph.shapes import find_sizes
from resnet8ptq.graph.weights import read_bias, read_initializer, write_bias, write_input
from resnet8ptq.models.gates.onnx import LABELLERS, ONNX_DOMAINS, SCALER, graph_inputs

Sizes = Mapping[str, Sequence[int]]  # the shape of each tensor; a free size is 0
Role = tuple[str | int, ...]  # the role of a constant, see `_find_role`

OPSET = 17
MIN_OPSET = 13  # the first opset with a per-channel QuantizeLinear
_EXPLICIT_RESIZES = 11  # the first opset in which Resize names its coordinates
_SCALES_BY_CHANNEL = 21  # the first opset whose GroupNormalization scales each channel
PAD_FUSION = "Pad_Fusion"  # ONNX Runtime's optimizer whose fault `_keep_pads` avoids
MIN_IR_VERSION = 8  # the IR of opset 17; since IR 4, initializers need not be inputs


def opset(proto: onnx.ModelProto) -> int:
    """Return the version of ONNX's own operator set that the model imports."""
    return max(entry.version for entry in proto.opset_import if entry.domain in ONNX_DOMAINS)


def raise_opset(proto: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """Return a copy; a graph below opset 13 is converted to 17, or as far as onnx can.

    Raises:
        ModelError: onnx cannot reach opset 13; the message names the step, its operators and the
            reason.
    """
    raised = copy.deepcopy(proto)
    version = opset(proto)
    target = OPSET if version < MIN_OPSET else version

    # Raise by one opset at a time, so that an error names the step
    while version < target:
        try:
            converted = version_converter.convert_version(raised, version + 1)
            onnx.checker.check_model(converted)
        except Exception as error:  # may be RuntimeError, ConvertError or ValidationError
            if version >= MIN_OPSET:
                break
            raise ModelError(
                f"{path}: opset {opset(proto)} is too old, expected {MIN_OPSET} or more, and from "
                f"{version} to {version + 1} it cannot be converted: "
                f"{', '.join(_changed_operators(raised, version + 1))} ({one_line(error)})"
            ) from None
        raised = converted
        version = version + 1
        if version == _EXPLICIT_RESIZES:
            _write_coordinates(raised.graph)
    return raised


def _write_coordinates(graph: onnx.GraphProto) -> None:
    """Give each Resize without coordinates those of opset 10, in place.

    onnx's converter to opset 11 omits them, although opset 11 has other defaults.
    """
    for node in graph.node:
        if node.op_type == "Resize" and not attribute(node, "coordinate_transformation_mode", b""):
            for key, value in (
                ("coordinate_transformation_mode", "asymmetric"),
                ("nearest_mode", "floor"),
            ):
                node.attribute.append(onnx.helper.make_attribute(key, value))


def _changed_operators(proto: onnx.ModelProto, version: int) -> list[str]:
    """Return the graph's operators that opset `version` redefines or lacks, sorted."""
    names = {node.op_type for node in proto.graph.node if node.domain in ONNX_DOMAINS}
    changed = []
    for name in sorted(names):
        try:
            if defs.get_schema(name, version).since_version == version:
                changed.append(name)
        except defs.SchemaError:
            changed.append(name)
    return changed


def normalize(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a normalized model that computes the same; `proto` must not be used afterwards.

    Constants become initializers, no output is an initializer, and unused domains are dropped. Some
    operators get a form that frameworks read correctly, see the passes.
    """
    graph = proto.graph
    inputs = graph_inputs(graph)
    del graph.input[:]
    graph.input.extend(inputs)
    del graph.value_info[:], graph.quantization_annotation[:]
    proto.ir_version = max(proto.ir_version, MIN_IR_VERSION)

    # Use one name for ONNX's own domain, and import only it and the used ones
    nodes = list(find_all(proto, onnx.NodeProto))
    for entry in [*proto.opset_import, *nodes]:
        if entry.domain == "ai.onnx":
            entry.domain = ""
    used = {node.domain for node in nodes}
    used.add("")  # ONNX's own domain is always imported
    imports = [entry for entry in proto.opset_import if entry.domain in used]
    del proto.opset_import[:]
    proto.opset_import.extend(imports)
    passes: list[Pass] = [_store_constants, compute_outputs, _drop_allowzero, _keep_pads]
    if any(node.op_type == "Einsum" for node in graph.node):
        passes.append(write_products)
    return rewrite(proto, passes)


# Constants become initializers, where quantization looks for weights.
_store_constants = LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)


def compute_outputs(model: ir.Model) -> None:
    """Put an Identity before each output that is an initializer, in place.

    Passes can then rename or replace an output's tensor like any other tensor.
    """
    for value in list(model.graph.outputs):
        if value.is_initializer():
            name = str(value.name)
            end_with(model, name, f"{name}__constant", "Identity", f"{name}__output")


def _drop_allowzero(model: ir.Model) -> None:
    """Remove `allowzero`, which onnx2torch refuses, from each Reshape to a shape without zeros.

    A computed shape counts as one without zeros, because no tensor is empty.
    """
    for node in model.graph:
        if node.op_type == "Reshape":
            shape = input_of(node, 1)
            if shape.const_value is None or values_of(shape).all():
                node.attributes.pop("allowzero", None)


def _keep_pads(model: ir.Model) -> None:
    """Pad with -0.0 instead of 0.0 before a MaxPool.

    ONNX Runtime (1.31) turns a Pad with zeros into padding of the pool, which never counts as the
    largest value. The optimizer compares the value's bytes with those of 0.0, so it keeps a Pad
    with -0.0. A Pad after a Relu stays: without negative values, both give the same maximum.
    """
    for node in nodes_of(model, "Pad"):
        source = producer_of(node, 0)
        if source is not None and source.op_type == "Relu":
            continue
        constant = node.attributes.get_string("mode", "constant") == "constant"
        pooled = any(use.node.op_type == "MaxPool" for use in node.outputs[0].uses())
        if constant and pooled and _pads_with_zeros(node):
            node.resize_inputs(max(3, len(node.inputs)))
            zero = Writer(node).constant(f"{node.outputs[0].name}__zero", np.float32(-0.0))
            node.replace_input_with(2, zero)


def _pads_with_zeros(pad: ir.Node) -> bool:
    """Return whether the value of a Pad is a constant 0, which is its default."""
    value = pad.inputs[2] if len(pad.inputs) > 2 else None
    if value is None:
        return True
    return value.const_value is not None and not values_of(value).any()


def keep_scores(graph: onnx.GraphProto) -> None:
    """Replace each output of a ZipMap by its scores, and drop labels from the outputs, in place.

    A ZipMap of scikit-learn's exports turns scores into dicts, which onnx-ir cannot read. Every
    output that follows an operator of `LABELLERS` counts as labels. The nodes of dropped outputs
    stay.
    """
    producers = Links(graph).producers
    outputs: dict[str, onnx.ValueInfoProto] = {}
    for output in graph.output:
        node = producers.get(output.name)
        if node is not None and node.op_type == "ZipMap":
            scores = node.input[0]
            output = helper.make_tensor_value_info(scores, onnx.TensorProto.FLOAT, None)
        if not _follows(output.name, LABELLERS, producers):
            outputs.setdefault(output.name, output)  # the scores may be an output beside the dict
    kept = [*outputs.values()]
    del graph.output[:]
    graph.output.extend(kept)


def _follows(name: str, operators: Sequence[str], producers: Mapping[str, onnx.NodeProto]) -> bool:
    """Return whether a tensor is the output of one of the operators, or depends on one."""
    left = [name]
    seen = set()
    while left:
        name = left.pop()
        node = producers.get(name)
        if node is None or name in seen:
            continue
        if node.op_type in operators:
            return True
        seen.add(name)
        left += inputs_of(node)
    return False


def write_scalers(model: ir.Model) -> None:
    """Replace each Scaler of scikit-learn's exports by basic operators: (input - offset) * scale.

    The input may have any numeric type; the result is float32.
    """
    for node in nodes_of(model, SCALER):
        write = Writer(node)
        name = str(node.outputs[0].name)
        offsets = np.array(node.attributes.get_floats("offset", (0.0,)), np.float32)
        scales = np.array(node.attributes.get_floats("scale", (1.0,)), np.float32)
        numbers = write("Cast", [node.inputs[0]], f"{name}__float", to=onnx.TensorProto.FLOAT)
        offset = write.constant(f"{name}__offset", offsets)
        shifted = write("Sub", [numbers, offset], f"{name}__shifted")
        scale = write.constant(f"{name}__scale", scales)
        replace_node(node, write("Mul", [shifted, scale], name))


def store_and_write_products(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model after `write_products`, with constants as initializers.

    `proto` must not be used afterwards.
    """
    return rewrite(proto, [_store_constants, write_products])


def write_products(model: ir.Model) -> None:
    """Replace Einsums of a computed tensor and weights by MatMuls, which backends quantize.

    For example, attention is exported with the equation `btd,dhk->bthk`. Other Einsums stay, such
    as one with an ellipsis, or with an axis that both inputs and the output have.
    """
    written: dict[tuple[str, tuple[int, ...], int], ir.Value] = {}
    for node in nodes_of(model, "Einsum"):
        product = _Product.of(node)
        if product is not None:
            weights = input_of(node, product.weights_index)
            replace_node(node, product.write(node, written))
            if not weights.uses():
                model.graph.initializers.pop(str(weights.name))


def _common_axes(one: str, other: str, without: str) -> str:
    """Return the axes that two tensors have and a third one lacks, in the order of the first."""
    axes = []
    for axis in one:
        if axis in other and axis not in without:
            axes.append(axis)
    return "".join(axes)


@dataclass(frozen=True)
class _Product:
    """An Einsum of a computed tensor and weights, with a letter for each axis.

    Attributes:
        weights_first: whether the weights are the first input.
        tensor, weights, output: all axes of the computed tensor, of the weights, of the output.
        summed: the axes of both inputs that the output lacks.
        kept: the axes of the tensor that the output has.
        added: the axes of the weights that the output has.
    """

    weights_first: bool
    tensor: str
    weights: str
    output: str
    summed: str
    kept: str
    added: str

    @property
    def weights_index(self) -> int:
        """The index of the weights among the two inputs."""
        return 0 if self.weights_first else 1

    @classmethod
    def of(cls, node: ir.Node) -> "_Product | None":
        """Return the axes of an Einsum; None if `write` cannot make it a MatMul of weights."""
        constant = [value is not None and value.is_initializer() for value in node.inputs]
        equation = node.attributes["equation"].as_string().replace(" ", "")
        terms = re.fullmatch(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]+)", equation)
        if terms is None or sum(constant) != 1 or len(constant) != 2:
            return None

        # A MatMul cannot take the diagonal of a repeated axis
        first, second, output = terms.groups()
        weights, tensor = (first, second) if constant[0] else (second, first)
        repeats_axis = any(len(set(axes)) < len(axes) for axes in (weights, tensor, output))
        if repeats_axis:
            return None

        # Each axis is summed, or belongs to the tensor or to the weights
        summed = _common_axes(tensor, weights, without=output)
        kept = _common_axes(tensor, output, without=weights)
        added = _common_axes(weights, output, without=tensor)
        sizes = len(kept) + len(summed), len(added) + len(summed)
        if sizes != (len(tensor), len(weights)) or not (summed and kept and added):
            return None
        return cls(constant[0], tensor, weights, output, summed=summed, kept=kept, added=added)

    def write(self, node: ir.Node, written: dict[Any, ir.Value]) -> ir.Value:
        """Write a MatMul before the Einsum, with moves of axes around it; return the last output.

        Args:
            written: the matrices that earlier calls have written; the method adds to them, and
                several nodes may share one.
        """
        write = Writer(node)
        name = str(node.outputs[0].name)
        value = input_of(node, 1 - self.weights_index)
        weights = input_of(node, self.weights_index)
        array = values_of(weights)
        sizes = dict(zip(self.weights, array.shape, strict=True))
        rows = math.prod(sizes[axis] for axis in self.summed)

        # The summed axes become the last axis of the tensor, and the rows of the weights
        order = self.kept + self.summed
        if self.tensor != order:
            perm = [self.tensor.index(axis) for axis in order]
            value = write("Transpose", [value], f"{name}__rows", perm=perm)
        if len(self.summed) > 1:
            shape = write.constant(f"{name}__flat", [0] * len(self.kept) + [rows])
            value = write("Reshape", [value, shape], f"{name}__flat_rows")
        axes = tuple(self.weights.index(axis) for axis in self.summed + self.added)
        key = (weights.name, axes, rows)
        if key not in written:
            matrix = array.transpose(axes).reshape(rows, -1)
            written[key] = write.constant(f"{name}__weights", matrix)
        value = write("MatMul", [value, written[key]], f"{name}__product", name=node.name or "")

        # Restore the axes of the output
        if len(self.added) > 1:
            added_sizes = [sizes[axis] for axis in self.added]
            split = [0] * len(self.kept) + added_sizes  # a 0 keeps the size of the product
            shape = write.constant(f"{name}__split", split)
            value = write("Reshape", [value, shape], f"{name}__parts")
        order = self.kept + self.added
        if self.output != order:
            perm = [order.index(axis) for axis in self.output]
            value = write("Transpose", [value], f"{name}__ordered", perm=perm)
        return value


def cast_constants(model: ir.Model) -> None:
    """Replace each Cast of a constant to float32 by its result, unless it is an output.

    Some files store their weights in 16 or 64 bits and cast them.
    """
    for node in nodes_of(model, "Cast"):
        source = input_of(node, 0)
        while (before := source.producer()) is not None and before.op_type == "Identity":
            source = input_of(before, 0)
        stored = ir.convenience.get_const_tensor(source)
        [output] = node.outputs
        to_float = node.attributes.get_int("to", 0) == onnx.TensorProto.FLOAT
        if stored is not None and to_float and not output.is_graph_output():
            values = stored.numpy().astype(np.float32)
            replace_node(node, Writer(node).constant(str(output.name), values))


def simplify_gemms(graph: onnx.GraphProto) -> None:
    """Give Gemms with constant weights and bias an alpha and beta of 1, and a bias [N], in place.

    A Gemm may lack a bias; a bias that differs by row keeps its shape.

    ONNX Runtime's quantizer divides a bias by beta, in place of multiplying it (1.31).
    `_flatten_biases` has the reason for the shape.
    """
    links = Links(graph)
    for node in graph.node:
        if node.op_type != "Gemm":
            continue
        alpha = attribute(node, "alpha", 1.0)
        beta = attribute(node, "beta", 1.0)
        constants = [*filter(None, node.input[1:])]  # weights, and perhaps a bias
        if alpha == beta == 1 or not links.constants.keys() >= {*constants}:
            continue

        # Multiply the weights by alpha, and the bias by beta
        for index, name, factor in zip((1, 2), constants, (alpha, beta), strict=False):
            scaled = read_initializer(links, name) * np.float32(factor)
            write_input(links, node, index, scaled)
        drop_attribute(node, "alpha")
        drop_attribute(node, "beta")
    _flatten_biases(graph)


def copy_shared_weights(graph: onnx.GraphProto) -> None:
    """Give a constant with several roles a copy for each role after the first, in place.

    ONNX Runtime's quantizer rounds a constant once, with the scales of one role, such as a scale
    for each channel of a Conv. The channels of a ConvTranspose are along another axis. A bias has
    the scale of its layer, so each layer needs a copy. Tables of Gather nodes are not copied.
    """
    constants = Links(graph).constants
    roles: dict[str, dict[Role, str]] = {}  # each constant's name in each role
    for node in graph.node:
        for name in constants.keys() & {*inputs_of(node)}.difference(node.input):
            roles[name] = {(): name}  # an inner graph reads the constant

    # Give each further role of a constant its own copy
    for node in graph.node:
        if node.op_type == "Gather":  # embedding tables are large
            continue
        for index, name in enumerate(node.input):
            if name not in constants:
                continue
            role = _find_role(node, index)
            names = roles.setdefault(name, {})
            if not names:
                names[role] = name  # the first role keeps the constant itself
            elif role not in names:
                copy = graph.initializer.add()
                copy.CopyFrom(constants[name])
                copy.name = f"{name}__copy_{len(names)}"
                names[role] = copy.name
            node.input[index] = names[role]


def _find_role(node: onnx.NodeProto, index: int) -> Role:
    """Return the role of an input; a constant needs a copy for each role.

    Weights share a role if their layers have the same operator and axis of channels. The bias of
    each layer has a separate role. All other inputs share one role.
    """
    if index == 0 or node.op_type not in (*LAYERS, "ConvTranspose"):
        return ()
    if index > 1:
        return (node.output[0],)
    return node.op_type, index, channel_axis(node)


def _flatten_biases(graph: onnx.GraphProto) -> None:
    """Give a constant bias of a Gemm the shape [N], unless it differs by row, in place.

    ONNX also broadcasts [1, N] and [1]. However, ONNX Runtime's per-channel quantization and
    torch's quantized linear fail on both shapes.
    """
    links = Links(graph)
    for node in graph.node:
        if node.op_type != "Gemm" or len(node.input) < 3:
            continue
        weights = links.constants.get(node.input[1])
        bias = links.constants.get(node.input[2])
        if weights is None or bias is None:
            continue
        channels = weights.dims[channel_axis(node)]
        if math.prod(bias.dims[:-1]) == 1 and list(bias.dims) != [channels]:
            write_bias(links, node, read_bias(links, node))


def drop_attribute(node: onnx.NodeProto, name: str) -> None:
    """Remove an attribute from a node, if present."""
    for item in list(node.attribute):
        if item.name == name:
            node.attribute.remove(item)


def write_explicitly(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model without some forms of operators that a framework lacks or reads wrongly.

    The functions `write_...` below name these forms. A form stays if the sizes that its replacement
    needs are unknown. `proto` must not be used afterwards.
    """
    write_paddings(proto)
    write_ceil_mode(proto)
    needs_sizes = False
    for node in proto.graph.node:
        has_axes = node.op_type == "Pad" and any(node.input[3:])
        if has_axes or node.op_type == "GroupNormalization":
            needs_sizes = True
    if not needs_sizes:
        return proto
    sizes = find_sizes(proto)
    write_axes = partial(write_pad_axes, sizes=sizes)
    write_groups = partial(write_group_norms, sizes=sizes)
    return rewrite(proto, [write_axes, write_groups, remove_unused])


def write_paddings(proto: onnx.ModelProto) -> None:
    """Replace `SAME_UPPER` and `SAME_LOWER` by explicit paddings, in place, if sizes are known.

    onnx2torch lacks both modes. ONNX defines that they give ceil(size / stride) outputs along an
    axis. A ConvTranspose gives size * stride, or fewer if its kernel is shorter than the stride.
    The larger half of an odd padding is at the end for `SAME_UPPER`, at the beginning for
    `SAME_LOWER`. A ConvTranspose with `output_shape` or `output_padding` keeps `auto_pad`, because
    these attributes change the paddings.
    """
    sizes: dict[str, list[int]] = {}
    for node in proto.graph.node:
        auto_pad = attribute(node, "auto_pad", b"")
        if auto_pad not in (b"SAME_UPPER", b"SAME_LOWER"):
            continue
        sizes = sizes or find_sizes(proto)
        spatial = sizes.get(node.input[0], [])[2:]
        kernel = attribute(node, "kernel_shape", [])

        # Leave out a node whose sizes are unknown, or whose padding other attributes change
        if not kernel and len(node.input) > 1:
            kernel = sizes.get(node.input[1], [])[2:]  # the weights have the kernel's size
        if not spatial or len(kernel) != len(spatial) or 0 in spatial:
            continue
        is_transposed = node.op_type == "ConvTranspose"
        if attribute(node, "output_shape", []) or any(attribute(node, "output_padding", [])):
            continue

        # Split the padding that keeps the output's size
        ones = [1] * len(spatial)
        strides = attribute(node, "strides", ones)
        dilations = attribute(node, "dilations", ones)
        small = []
        large = []
        for size, width, stride, dilation in zip(spatial, kernel, strides, dilations, strict=True):
            span = (width - 1) * dilation + 1
            steps = -(-size // stride) - 1
            needed = span - stride if is_transposed else steps * stride + span - size
            total = max(needed, 0)
            small.append(total // 2)
            large.append(total - total // 2)
        pads = [*small, *large] if auto_pad == b"SAME_UPPER" else [*large, *small]
        drop_attribute(node, "auto_pad")
        node.attribute.append(onnx.helper.make_attribute("pads", pads))


def write_pad_axes(model: ir.Model, sizes: Sizes) -> None:
    """Write the widths of each Pad with `axes` for all axes, if widths, axes and rank are known.

    Pad has had the input `axes` since opset 18. ONNX Runtime inserts Transpose nodes around 8-bit
    convolutions, and the optimizer of these nodes overlooks `axes` (1.31).
    """
    for node in model.graph:
        if node.op_type != "Pad" or not any(node.inputs[3:]):
            continue
        rank = len(sizes.get(str(input_of(node, 0).name), []))
        widths = input_of(node, 1)
        axes = input_of(node, 3)
        if rank and widths.is_initializer() and axes.is_initializer():
            whole = np.zeros((2, rank), np.int64)
            whole[:, values_of(axes)] = values_of(widths).reshape(2, -1)
            name = f"{node.outputs[0].name}__widths"
            node.replace_input_with(1, Writer(node).constant(name, whole.reshape(-1)))
            node.resize_inputs(3)


_POOLS = ("AveragePool", "LpPool", "MaxPool")


def write_ceil_mode(proto: onnx.ModelProto) -> None:
    """Remove `ceil_mode` from pools of known size where it adds no window, in place.

    ONNX Runtime and torch drop a window that would begin after the input, in its padding; OpenVINO
    keeps it. Without `ceil_mode` no such window exists.

    Where `ceil_mode` adds a window, that window may end after the padding. With
    `count_include_pad`, only the part up to the end of the padding counts, but ONNX Runtime's 8-bit
    kernel divides by the whole window (1.31). The function then writes the padding as a Pad.
    """
    nodes = []
    for node in proto.graph.node:
        if node.op_type in _POOLS and attribute(node, "ceil_mode", 0):
            # Infer sizes again, because `ceil_mode` gives the sizes that OpenVINO returns.
            spatial = find_sizes(proto).get(node.input[0], [])[2:]
            windows = _find_windows(node, spatial)
            if windows is not None and not windows[0].any():
                drop_attribute(node, "ceil_mode")
            elif windows is not None and attribute(node, "count_include_pad", 0):
                nodes.extend(_pad_with_zeros(proto.graph, node, *windows))
        nodes.append(node)
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)


def _find_windows(
    pool: onnx.NodeProto, spatial: Sequence[int]
) -> tuple[NDArray[np.bool_], NDArray[np.int64]] | None:
    """Return whether `ceil_mode` adds a window along each axis, and where the other windows end.

    Ends are counted from the end of the input. Returns None if sizes are unknown.
    """
    kernel = attribute(pool, "kernel_shape", [])
    if len(kernel) != len(spatial) or 0 in spatial:
        return None

    # A window is added if the last one ends too early, and the next begins inside the input
    rank = len(kernel)
    sizes = np.array(spatial)
    begin, end = np.reshape(attribute(pool, "pads", [0] * 2 * rank), (2, rank))
    strides = np.array(attribute(pool, "strides", [1] * rank))
    spans = (np.array(kernel) - 1) * attribute(pool, "dilations", [1] * rank) + 1
    steps = (begin + sizes + end - spans) // strides
    ends = steps * strides + spans - begin - sizes
    more = (ends < end) & ((steps + 1) * strides < begin + sizes)
    return more, ends


def _pad_with_zeros(
    graph: onnx.GraphProto,
    pool: onnx.NodeProto,
    more: NDArray[np.bool_],
    ends: NDArray[np.int64],
) -> list[onnx.NodeProto]:
    """Move the padding of a pool into a Pad; return a list of this Pad, empty without padding.

    Along an axis without an additional window, the padding ends with the last window.

    Args:
        more, ends: the result of `_find_windows`.
    """
    begin, end = np.reshape(attribute(pool, "pads", [0, 0] * len(ends)), (2, -1))
    end = np.where(more, end, np.clip(ends, 0, end))
    for name in ("pads", "count_include_pad"):
        drop_attribute(pool, name)
    if not begin.any() and not end.any():
        return []

    # Pad the spatial axes only, with a value that ONNX Runtime does not fuse
    padded = f"{pool.output[0]}__padded"
    constants = {
        f"{padded}__sizes": np.concatenate([[0, 0], begin, [0, 0], end]).astype(np.int64),
        f"{padded}__zero": np.float32(-0.0),  # see `_keep_pads`
    }
    for name, values in constants.items():
        graph.initializer.append(numpy_helper.from_array(values, name))
    pad = onnx.helper.make_node("Pad", [pool.input[0], *constants], [padded], padded)
    pool.input[0] = padded
    return [pad]


def write_group_norms(model: ir.Model, sizes: Sizes) -> None:
    """Replace each GroupNormalization of known sizes by an instance normalization of its groups.

    ONNX Runtime would replace it by twenty to thirty operators with computed shapes, which torch
    cannot trace.
    """
    by_group = model.opset_imports[""] < _SCALES_BY_CHANNEL
    for node in nodes_of(model, "GroupNormalization"):
        known = sizes.get(str(input_of(node, 0).name), [])[1:]
        if known and 0 not in known:
            _normalize_groups(node, known, by_group)


def _normalize_groups(node: ir.Node, sizes: Sequence[int], by_group: bool) -> None:
    """Replace a GroupNormalization of [N, *sizes].

    Args:
        by_group: whether scale and bias have a value for each group, otherwise for each channel.
    """
    write = Writer(node)
    output = str(node.outputs[0].name)
    groups = node.attributes.get_int("num_groups", 1)
    epsilon = node.attributes.get_float("epsilon", 1e-5)

    def constant(part: str, values: NDArray[Any]) -> ir.Value:
        return write.constant(f"{output}__{part}", values)

    def add(kind: str, inputs: Sequence[ir.Value | None], part: str, **attributes: Any) -> ir.Value:
        return write(kind, inputs, f"{output}__{part}", f"{node.name}__{part}", **attributes)

    # Give each group one index of the channel axis, and restore the shape at the end
    parts = constant("parts", np.array([0, groups, -1]))
    whole = constant("whole", np.array([0, *sizes]))
    values, scale, bias = node.inputs
    cut = add("Reshape", [values, parts], "cut")
    if by_group:
        even = add("InstanceNormalization", [cut, scale, bias], "even", epsilon=epsilon)
        replace_node(node, write("Reshape", [even, whole], output, str(node.name)))
        return

    # Normalize each group as one channel, then scale each channel
    by_channel = constant("by_channel", np.array([-1, *[1] * (len(sizes) - 1)]))
    ones = constant("ones", np.ones(groups, np.float32))
    zeros = constant("zeros", np.zeros(groups, np.float32))
    even = add("InstanceNormalization", [cut, ones, zeros], "even", epsilon=epsilon)
    joined = add("Reshape", [even, whole], "joined")
    scales = add("Reshape", [scale, by_channel], "scale")
    biases = add("Reshape", [bias, by_channel], "bias")
    scaled = add("Mul", [joined, scales], "scaled")
    replace_node(node, write("Add", [scaled, biases], output, str(node.name)))


# ONNX Runtime's quantizer adds such a suffix to a tensor's name.
_SUFFIX = re.compile(r"_\w*(?:scale|zero_point|[Qq]uantize)\w*|_Q[48]|quant_scaled_output")


def avoid_quantizer_names(model: ir.Model) -> None:
    """Rename tensors whose names ONNX Runtime's quantizer would give to its own tensors.

    The quantizer names a tensor's scale after the tensor, without checking that the name is free.
    If the conflicting name is an input's or output's, the other tensor is renamed. Inputs and
    outputs keep their names.
    """
    names: set[str] = set()
    for node in model.graph.all_nodes():
        for value in filter(None, (*node.inputs, *node.outputs)):
            if value.name:
                names.add(value.name)
    kept = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}

    # Find tensors named like another one with a suffix of the quantizer
    renamed = set()
    for name in names:
        for length in range(1, len(name)):
            base = name[:length]
            suffix = name[length:]
            if base not in names or not _SUFFIX.fullmatch(suffix):
                continue
            if name in kept:
                renamed.add(base)
            else:
                renamed.add(name)
    new_names = {name: f"{name}__of_file" for name in renamed - kept}
    if new_names:
        rename(new_names)(model)


def name_nodes(graph: onnx.GraphProto) -> None:
    """Give each node of the outer graph a unique name that is valid for onnx2torch's modules."""
    used: set[str] = set()
    for index, node in enumerate(graph.node):
        name = re.sub(r"[^\w/-]", "_", node.name.replace(".", "/")).strip("/")
        if not name or name in used:
            name = f"{name or node.op_type}_{index}"
        while name in used:
            name += "_"
        used.add(name)
        node.name = name
