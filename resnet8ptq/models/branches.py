"""Replaces an If by one of its branches, if the samples do not affect the condition.

Exporters keep both branches if a shape decides, or an input that is the same for all samples, such
as a sampling rate. No backend quantizes the layers inside an If.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import helper

from resnet8ptq.graph.layers import attribute
from resnet8ptq.graph.renaming import rename
from resnet8ptq.graph.session import between, open_session
from resnet8ptq.models.batch_axis import static_tensors
from resnet8ptq.models.gates.onnx import graph_inputs

_LONGEST = 200  # characters of a joined name

Feeds = Mapping[str, NDArray[Any]]  # inputs by name


def take_branches(proto: onnx.ModelProto, feeds: Sequence[Feeds] = ({},)) -> bool:
    """Replace, in place, each If with an equal condition for all `feeds`; return whether any was.

    Args:
        feeds: inputs of several batch sizes; without inputs, only constants decide.
    """
    graph = proto.graph
    any_taken = False
    while taken := _find_decided(proto, feeds):
        node, condition = taken
        _inline(graph, node, attribute(node, f"{'then' if condition else 'else'}_branch", None))
        any_taken = True
    return any_taken


def _find_decided(
    proto: onnx.ModelProto, feeds: Sequence[Feeds]
) -> tuple[onnx.NodeProto, bool] | None:
    """Return the first If whose condition is equal for all `feeds`, and its condition."""
    conditions = [node for node in proto.graph.node if node.op_type == "If"]
    known = {tensor.name for tensor in proto.graph.initializer}
    known |= static_tensors(proto.graph) if conditions else set()
    for node in conditions:
        values = _compute(proto, node.input[0], feeds) if node.input[0] in known else set()
        if len(values) == 1:
            return node, values.pop()
    return None


def _compute(proto: onnx.ModelProto, name: str, feeds: Sequence[Feeds]) -> set[bool]:
    """Return the values of a condition; none if it needs inputs that `feeds` lack."""
    part = between(proto, "", [name])
    needed = [value.name for value in graph_inputs(part.graph)]
    if not feeds[0].keys() >= {*needed}:
        return set()
    session = open_session(part.SerializeToString(), 0)
    inputs = [{name: values[name] for name in needed} for values in feeds]
    return {bool(session.run(None, values)[0].all()) for values in inputs}


def _inline(graph: onnx.GraphProto, node: onnx.NodeProto, branch: onnx.GraphProto) -> None:
    """Replace an If by the nodes of a branch, with unique names."""
    position = [output for other in graph.node for output in other.output[:1]].index(node.output[0])
    made = [*(name for inner in branch.node for name in inner.output if name)]
    made += [tensor.name for tensor in branch.initializer]
    names = {name: f"{node.output[0]}/{name}" for name in made}
    # In a branch that reuses a name, each level of nesting would double it.
    long = [name for name, new in names.items() if len(new) > _LONGEST]
    used = {output for other in graph.node for output in other.output}
    used |= {tensor.name for tensor in graph.initializer}
    number = next(n for n in itertools.count() if f"branch_{n}/0" not in used)
    names |= {name: f"branch_{number}/{index}" for index, name in enumerate(long)}
    rename(branch, names)
    pairs = zip((value.name for value in branch.output), node.output, strict=True)
    copies = [helper.make_node("Identity", [inner], [outer]) for inner, outer in pairs if outer]
    nodes = [*graph.node[:position], *branch.node, *copies, *graph.node[position + 1 :]]
    graph.initializer.extend(branch.initializer)
    del graph.node[:]
    graph.node.extend(nodes)
