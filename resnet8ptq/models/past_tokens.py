"""Removes a decoder's inputs for earlier tokens: windows of text, which are whole, have none."""

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from resnet8ptq.graph.links import inputs_of
from resnet8ptq.models.gates.onnx import graph_inputs

PAST = "past_key_values"  # start of the inputs' names


def remove(graph: onnx.GraphProto) -> list[str]:
    """Remove the inputs `past_key_values...`, as if they were empty; return their names.

    They stay if a node does more than join them to the present tokens or read their shape.
    """
    inputs = graph_inputs(graph)
    past = {value.name: value for value in inputs if value.name.startswith(PAST)}
    others = [value.name for value in inputs if value.name not in past]
    readers = [node for node in graph.node if not past.keys().isdisjoint(inputs_of(node))]
    if not past or not others or not all(_can_do_without(node, past) for node in readers):
        return []

    first = numpy_helper.from_array(np.zeros(1, np.int64), f"{PAST}_axis")
    graph.initializer.append(first)
    for node in readers:
        if node.op_type == "Concat":
            kept = [name for name in node.input if name not in past]
            del node.input[:]
            node.input.extend(kept)
        else:
            _write_shape(graph, node, past[node.input[0]], others[0], first.name)
    for value in past.values():
        graph.input.remove(value)
    return list(past)


def _can_do_without(node: onnx.NodeProto, past: Mapping[str, onnx.ValueInfoProto]) -> bool:
    """Whether a node joins earlier tokens to others, or returns the whole shape of its input."""
    read = [past[name].type.tensor_type.shape.dim for name in node.input if name in past]
    if not read:  # by an inner graph
        return False
    free = [axis for axis, dim in enumerate(read[0]) if axis and not dim.dim_value]
    if node.op_type == "Concat":
        axis = helper.get_node_attr_value(node, "axis") % max(len(read[0]), 1)
        return axis in free and len(read) < len(node.input)
    return node.op_type == "Shape" and not node.attribute and len(free) == 1


def _write_shape(
    graph: onnx.GraphProto, node: onnx.NodeProto, past: onnx.ValueInfoProto, other: str, axis: str
) -> None:
    """Let a node return the shape of an empty input: the batch of the `other` input, then sizes.

    A free size, that of the earlier tokens, is 0.
    """
    dims = past.type.tensor_type.shape.dim
    sizes = np.array([dim.dim_value for dim in dims[1:]], np.int64)
    [shape] = node.output
    graph.initializer.append(numpy_helper.from_array(sizes, f"{shape}_others"))
    node.input[0] = other
    node.output[0] = f"{shape}_present"
    gather = helper.make_node("Gather", [f"{shape}_present", axis], [f"{shape}_batch"])
    concat = helper.make_node("Concat", [f"{shape}_batch", f"{shape}_others"], [shape], axis=0)
    index = list(graph.node).index(node)
    graph.node.insert(index + 1, gather)
    graph.node.insert(index + 2, concat)
