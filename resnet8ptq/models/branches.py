"""Replaces an If by one of its branches, if the condition is the same for all samples and batches.

Exporters keep both branches if the condition depends on a shape, or on an input that all samples
share, such as a sampling rate. No backend quantizes the layers inside an If of an ONNX graph.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from resnet8ptq.graph.links import Links
from resnet8ptq.graph.passes import Writer, replace, rewrite
from resnet8ptq.graph.session import between, open_session
from resnet8ptq.models.batch_axis import static_tensors
from resnet8ptq.models.gates.onnx import graph_inputs

_LONGEST = 200  # most characters of a joined name

Feeds = Mapping[str, NDArray[Any]]  # inputs by name


def take_branches(proto: onnx.ModelProto, feeds: Sequence[Feeds] = ({},)) -> onnx.ModelProto:
    """Replace each decided If by a branch, see `_find_decided`; return the model.

    If an If was replaced, `proto` must not be used afterwards; otherwise `proto` is returned.

    Args:
        feeds: inputs of several batch sizes, of which only the sizes matter; without inputs, only
            constants decide.
    """
    while taken := _find_decided(proto, feeds):
        node, condition = taken
        key = "then_branch" if condition else "else_branch"
        proto = rewrite(proto, [partial(_inline, output=node.output[0], key=key)])
    return proto


def _find_decided(
    proto: onnx.ModelProto, feeds: Sequence[Feeds]
) -> tuple[onnx.NodeProto, bool] | None:
    """Return the first If whose condition is decided, and the value of the condition.

    Such a condition depends only on shapes and constants, and is equal for all `feeds`. Returns
    None without such an If.
    """
    conditions = [node for node in proto.graph.node if node.op_type == "If"]
    if not conditions:
        return None
    known = Links(proto.graph).constants.keys() | static_tensors(proto.graph)
    for node in conditions:
        if node.input[0] not in known:
            continue
        values = _compute(proto, node.input[0], feeds)
        if len(values) == 1:
            return node, values.pop()
    return None


def _compute(proto: onnx.ModelProto, name: str, feeds: Sequence[Feeds]) -> set[bool]:
    """Return the values of a condition for all `feeds`; empty if an input for it is missing."""
    part = between(proto, "", [name])
    needed = [value.name for value in graph_inputs(part.graph)]
    if not feeds[0].keys() >= {*needed}:
        return set()
    session = open_session(part.SerializeToString(), 0)
    conditions = set()
    for values in feeds:
        [condition] = session.run(None, {name: values[name] for name in needed})
        conditions.add(bool(condition.all()))
    return conditions


def _inline(model: ir.Model, output: str, key: str) -> None:
    """Replace the If with this output by the nodes of a branch, whose tensors get new names."""
    graph = model.graph
    [node] = [other for other in graph if other.outputs[0].name == output]
    branch = node.attributes[key].as_graph()
    nodes = list(branch)
    stored = list(branch.initializers.values())

    # Give the branch's tensors names that the graph does not have
    made = []
    for inner in nodes:
        made += [value for value in inner.outputs if value.name]
    short_names = _short_names(graph)
    for value in (*made, *stored):
        name = f"{output}/{value.name}"
        value.name = name if len(name) <= _LONGEST else next(short_names)

    # Move the nodes, which may belong to one graph only
    branch.remove(nodes)
    branch.initializers.clear()
    for value in stored:
        graph.register_initializer(value)
    graph.insert_before(node, nodes)
    write = Writer(node)
    for result, outer in zip(branch.outputs, node.outputs, strict=True):
        if outer.name:
            replace(outer, write("Identity", [result], outer.name))
    graph.remove(node, safe=True)


def _short_names(graph: ir.Graph) -> Iterator[str]:
    """Yield short names that the graph does not have.

    They replace names longer than `_LONGEST`, because each level of nested branches lengthens the
    names of its tensors.
    """
    used: set[str | None] = set(graph.initializers)
    for node in graph:
        for value in node.outputs:
            used.add(value.name)
    number = 0
    while f"branch_{number}/0" in used:
        number += 1
    for index in itertools.count():
        yield f"branch_{number}/{index}"
