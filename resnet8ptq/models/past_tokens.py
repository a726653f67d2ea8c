"""Removes a decoder's inputs for earlier tokens, because each sample is a whole text."""

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from resnet8ptq.graph.links import inputs_of
from resnet8ptq.models.gates.onnx import graph_inputs

PAST = "past_key_values"  # the start of such inputs' names


def remove_past(graph: onnx.GraphProto) -> list[str]:
    """Remove the inputs `past_key_values...`, as if they were empty; return their names.

    All inputs stay, and no name is returned, if a node reads one in a way that `_can_do_without`
    refuses, or if the network has no other inputs.
    """
    past = {}
    others = []
    for value in graph_inputs(graph):
        if value.name.startswith(PAST):
            past[value.name] = value
        else:
            others.append(value.name)
    if not past or not others:
        return []

    # Find the nodes that read the inputs; each must be able to do without them
    readers = []
    for node in graph.node:
        if past.keys().isdisjoint(inputs_of(node)):
            continue
        if not _can_do_without(node, past):
            return []
        readers.append(node)

    # Let the readers take only the present tokens
    first = numpy_helper.from_array(np.zeros(1, np.int64), f"{PAST}_axis")
    graph.initializer.append(first)
    for node in readers:
        if node.op_type == "Concat":
            node.input[:] = [name for name in node.input if name not in past]
        else:
            _write_shape(graph, node, past[node.input[0]], others[0], first.name)
    for value in past.values():
        graph.input.remove(value)
    return list(past)


def _can_do_without(node: onnx.NodeProto, past: Mapping[str, onnx.ValueInfoProto]) -> bool:
    """Return whether a node joins earlier tokens to others, or returns their whole shape.

    The number of earlier tokens must be a free size. If the shape is returned, it must be the only
    free one after the batch.

    Args:
        past: the inputs for earlier tokens, by name.
    """
    read = [name for name in node.input if name in past]
    if not read:  # an inner graph of the node reads them
        return False
    dims = past[read[0]].type.tensor_type.shape.dim
    free = []  # the axes of free size, after the batch
    for axis in range(1, len(dims)):
        if not dims[axis].dim_value:
            free.append(axis)
    if node.op_type == "Concat":
        joined = helper.get_node_attr_value(node, "axis") % max(len(dims), 1)
        return joined in free and len(read) < len(node.input)
    return node.op_type == "Shape" and not node.attribute and len(free) == 1


def _write_shape(
    graph: onnx.GraphProto, node: onnx.NodeProto, past: onnx.ValueInfoProto, other: str, axis: str
) -> None:
    """Replace the output of a Shape node by the shape of an empty input.

    The new shape is the batch size of the input `other`, then the other sizes of `past`. The number
    of earlier tokens, which is the free size, becomes 0.

    Args:
        axis: the name of a constant with the index of the batch axis, 0.
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
