"""Rewrites an ONNX graph to operators and an opset that onnx2torch converts, in place."""

import copy
import math
from collections.abc import Mapping

import numpy as np
import onnx
import torch
from onnx import defs

from resnet8ptq.graph.layers import is_relu
from resnet8ptq.graph.links import Links, input_at
from resnet8ptq.graph.shapes import infer_shapes
from resnet8ptq.graph.torch_operators import Fixed

OWN = "own"  # the domain of nodes for which `torch_operators` has a module
_OPSET = 17  # the newest opset in which onnx2torch supports every common operator
_COUNTED = "num_outputs"  # of Split, since opset 18; the node's outputs give the same number


def ease(graph: onnx.GraphProto) -> None:
    """Name nodes without a name, and rewrite forms that onnx2torch or torch refuses, in place.

    onnx2torch misreads an empty name at the end of a node's inputs as a tensor. It refuses axes
    that are a single number, which exporters write. It also refuses a Clip without a minimum.
    torch's engine qnnpack refuses a quantized Clip with a single bound.
    """
    constants = Links(graph).constants
    for index, node in enumerate(graph.node):
        node.name = node.name or f"unnamed_{index}"
        while node.input and not node.input[-1]:
            del node.input[-1]

        # Write a single axis as a list, and a single bound as Max or Min
        axes = _find_second(node, constants)
        if node.op_type in ("Squeeze", "Unsqueeze") and axes is not None and not axes.dims:
            node.input[1] = f"{node.name}__axes"
            values = onnx.numpy_helper.to_array(axes).reshape(1)
            graph.initializer.append(onnx.numpy_helper.from_array(values, node.input[1]))
        if node.op_type == "Clip" and not is_relu(node, constants):
            _ease_clip(node)


def _ease_clip(clip: onnx.NodeProto) -> None:
    """Turn a Clip with a single bound into a Max or a Min, in place."""
    lowest = input_at(clip, 1)
    highest = input_at(clip, 2)
    if lowest and not highest:
        clip.op_type = "Max"
        clip.input[1:] = [lowest]
    elif highest and not lowest:
        clip.op_type = "Min"
        clip.input[1:] = [highest]


def lower(lowered: onnx.ModelProto, own: Mapping[str, torch.nn.Module]) -> None:
    """Mark the nodes of `own`, and lower a newer opset to `_OPSET` if the operators allow it.

    The graph changes in place. Later opsets mostly add types to operators. They also let
    reductions take their axes as an input, and have an operator Gelu.

    Args:
        own: the modules of `torch_operators`, by the names of the nodes that they replace.
    """
    if own:
        _mark(lowered, own)
    version = max(entry.version for entry in lowered.opset_import if not entry.domain)
    if version <= _OPSET:
        return
    nodes = list(lowered.graph.node)
    original = copy.deepcopy(nodes)

    # Write each node as the older opset defines it
    _set_opset(lowered, _OPSET)
    constants = Links(lowered.graph).constants
    del lowered.graph.node[:]
    for node in nodes:
        axes = _find_second(node, constants)
        is_reduction = node.op_type.startswith("Reduce") and node.op_type != "ReduceSum"
        if is_reduction and axes is not None and math.prod(axes.dims):  # no attribute is empty
            _lower_reduction(node, axes)
        for item in list(node.attribute):
            if _is_dispensable(node, item, version):
                node.attribute.remove(item)
        if node.op_type == "Gelu":
            lowered.graph.node.extend(_to_erf(node, lowered.graph))
        else:
            lowered.graph.node.append(node)

    # Restore the graph if the older opset lacks something
    try:
        onnx.checker.check_model(lowered)
    except onnx.checker.ValidationError:
        _set_opset(lowered, version)
        del lowered.graph.node[:]
        lowered.graph.node.extend(original)


def _lower_reduction(reduction: onnx.NodeProto, axes: onnx.TensorProto) -> None:
    """Turn the axes of a reduction from an input into an attribute, in place."""
    kept = [item for item in reduction.attribute if item.name == "keepdims"]
    values = onnx.numpy_helper.to_array(axes).tolist()
    del reduction.attribute[:], reduction.input[1:]
    reduction.attribute.extend([*kept, onnx.helper.make_attribute("axes", values)])


def _find_second(
    node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]
) -> onnx.TensorProto | None:
    """Return the second input of a node, such as axes; None if it is missing or computed."""
    return constants.get(input_at(node, 1))


def _mark(proto: onnx.ModelProto, own: Mapping[str, torch.nn.Module]) -> None:
    """Move the nodes of `own` to the domain `OWN`, in place.

    onnx cannot infer shapes in this domain, so the outputs' shapes are first declared.
    """
    graph = proto.graph
    marked = []
    unknown: set[str] = set()  # outputs of marked nodes that have no declared shape yet
    for node in graph.node:
        if node.name in own:
            marked.append(node)
            unknown.update(node.output)
    for value in (*graph.value_info, *graph.output):
        unknown.discard(value.name)
    for value in infer_shapes(proto).value_info:
        if value.name in unknown:
            graph.value_info.append(value)

    # Give each marked node the inputs that its module takes, and no attributes
    proto.opset_import.append(onnx.helper.make_opsetid(OWN, 1))
    for node in marked:
        node.domain = OWN
        node.op_type = OWN
        del node.attribute[:]
        takes = getattr(own[node.name], "takes", Fixed.takes)
        taken = []
        for index, name in enumerate(node.input):
            if name and index in takes:
                taken.append(name)
        node.input[:] = taken


def _set_opset(proto: onnx.ModelProto, version: int) -> None:
    for entry in proto.opset_import:
        if not entry.domain:
            entry.version = version


def _is_dispensable(node: onnx.NodeProto, item: onnx.AttributeProto, version: int) -> bool:
    """Return whether the older opset lacks an attribute, and the node computes the same without it.

    This holds for attributes with their default value, and for Split's number of outputs.
    """
    name = node.op_type
    if node.domain or not defs.has(name, _OPSET):
        return False
    if item.name in defs.get_schema(name, _OPSET).attributes:
        return False
    if item.name == _COUNTED:
        return True
    default = defs.get_schema(name, version).attributes[item.name].default_value
    value = onnx.helper.get_attribute_value
    return bool(default.name) and value(default) == value(item)


def _to_erf(gelu: onnx.NodeProto, graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return the nodes of `x * (0.5 + 0.5 * erf(x / sqrt(2)))`; add their constants to `graph`."""
    name = gelu.name
    [source] = gelu.input

    # Store the two constants, then write a node for each step
    root = f"{name}__root"
    half = f"{name}__half"
    for key, value in ((root, 2**-0.5), (half, 0.5)):
        graph.initializer.append(onnx.numpy_helper.from_array(np.float32(value), key))
    steps = [
        ("Mul", [source, root], f"{name}__scaled"),
        ("Erf", [f"{name}__scaled"], f"{name}__erf"),
        ("Mul", [f"{name}__erf", half], f"{name}__halved"),
        ("Add", [f"{name}__halved", half], f"{name}__share"),
    ]
    nodes = []
    for kind, inputs, output in steps:
        nodes.append(onnx.helper.make_node(kind, inputs, [output], output))
    product = onnx.helper.make_node("Mul", [source, f"{name}__share"], gelu.output, name)
    return [*nodes, product]
