"""Renames tensors of a graph, inner graphs included, and gives them unique names."""

import copy
import itertools
from collections.abc import Mapping

import onnx
import onnx_ir
from onnx import helper
from onnx_ir.passes.common import NameFixPass

from resnet8ptq.graph.links import Links
from resnet8ptq.graph.pruning import find_all


def rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Rename tensors (old to new name); a tensor that already has a new name gets a suffix."""
    taken = {*names.values()}

    def change(name: str) -> str:
        if name in names:
            return names[name]
        return f"{name}__of_file" if name in taken else name

    del graph.quantization_annotation[:]
    values = find_all(graph, onnx.ValueInfoProto), find_all(graph, onnx.TensorProto)
    for value in itertools.chain(*values):
        value.name = change(value.name)
    for node in find_all(graph, onnx.NodeProto):
        node.input[:] = [change(name) for name in node.input]
        node.output[:] = [change(name) for name in node.output]


def rename_inside(graph: onnx.GraphProto, name: str, to: str) -> None:
    """Rename a tensor between nodes; inputs and outputs of the graph keep their names."""
    for node in find_all(graph, onnx.NodeProto):
        for names in (node.input, node.output):
            names[:] = [to if other == name else other for other in names]


def name_inner_tensors(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model, in which no tensor of an inner graph has the name of an outer one.

    ONNX allows such names, and the inner tensor is then meant. A model without any stays unchanged.
    """
    if not any(next(find_all(node, onnx.GraphProto), None) for node in proto.graph.node):
        return proto
    model = onnx_ir.from_proto(copy.deepcopy(proto))  # it would rename the constants of `proto`
    return onnx_ir.to_proto(model) if NameFixPass()(model).modified else proto


def compute_outputs(graph: onnx.GraphProto) -> None:
    """Let a node compute each output that is an input or a constant of the graph, in place.

    Passes can then rename or replace an output's tensor as they do any other.
    """
    links = Links(graph)
    inputs = {value.name for value in graph.input}
    for name in sorted(links.outputs - links.producers.keys()):
        source = name
        if name not in inputs:
            source = f"{name}__constant"
            rename_inside(graph, name, source)
            links.constants[name].name = source
        graph.node.append(helper.make_node("Identity", [source], [name], f"{name}__output"))
