"""Passes that rewrite a network: functions of one signature on onnx-ir, which `rewrite` runs.

onnx-ir links each tensor to its producer and to its readers, including those in inner graphs. A
pass therefore needs no maps, and replaces a tensor without a search of the graph. Functions on the
protobuf, which frameworks read and write, use `links.Links` instead.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import ArrayLike
from onnx import numpy_helper
from onnx_ir.passes.common import NameFixPass, RemoveUnusedNodesPass, TopologicalSortPass

logging.getLogger("onnx_ir").setLevel(logging.WARNING)  # onnx-ir's passes log their counts

Pass = Callable[[ir.Model], object]  # changes the model in place

sort: Pass = TopologicalSortPass()  # keeps the order of nodes that do not depend on each other
remove_unused: Pass = RemoveUnusedNodesPass()  # nodes and constants that no output needs


def rewrite(proto: onnx.ModelProto, passes: Iterable[Pass]) -> onnx.ModelProto:
    """Return the model after passes, in order; `proto` must not be used afterwards.

    The passes share the weights of `proto`; only the returned model has copies of them.

    >>> def drop_identities(model: ir.Model) -> None:
    ...     for node in list(model.graph):
    ...         if node.op_type == "Identity":
    ...             replace_node(node, input_of(node, 0))
    >>> proto = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     copy (float[2] x) => (float[2] y) { z = Identity(x) y = Relu(z) }''')
    >>> [node.op_type for node in rewrite(proto, [drop_identities]).graph.node]
    ['Relu']
    """
    model = ir.from_proto(proto)
    for change in passes:
        change(model)
    for graph in model.graphs():  # otherwise onnx-ir declares the types of constants
        for value in graph.initializers.values():
            if not value.is_graph_input() and not value.is_graph_output():
                value.type = value.shape = None
    written = ir.to_proto(model)
    written.graph.sparse_initializer.extend(proto.graph.sparse_initializer)  # unknown to onnx-ir
    return written


def rename(names: Mapping[str, str]) -> Pass:
    """Return a pass that renames tensors (old to new name), including those of inner graphs.

    If one of the new names belongs to a tensor that is not in `names`, this tensor gets the suffix
    `__of_file`. Two tensors may exchange names.
    """

    def change(model: ir.Model) -> None:
        values: list[ir.Value] = []
        for graph in model.graphs():
            values.extend(graph.inputs)
            values.extend(graph.initializers.values())
            for node in graph:
                values.extend(node.outputs)

        # Free all new names first, because two tensors may exchange names
        taken = {*names.values()} - names.keys()
        renamed = []
        for value in dict.fromkeys(values):  # an initializer may be an input, too
            name = value.name or ""
            if name in taken:
                value.name = f"{name}__of_file"
            elif name in names:
                renamed.append((value, names[name]))
        for number, (value, _) in enumerate(renamed):
            value.name = f"renamed {number}"
        for value, name in renamed:
            value.name = name

    return change


def name_inner_tensors(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with other names for inner tensors that hide an outer one of the same name.

    ONNX's checker accepts this for inner inputs and constants. A model without inner graphs is
    returned unchanged; any other `proto` must not be used afterwards.
    """
    graphs = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
    for node in proto.graph.node:
        if any(item.type in graphs for item in node.attribute):
            return rewrite(proto, [NameFixPass()])
    return proto


def end_with(
    model: ir.Model, name: str, inner: str, kind: str, node_name: str, **attributes: Any
) -> ir.Node:
    """Append and return a node that computes the output `name` from its former tensor.

    The former tensor gets the name `inner`. The output keeps its name, type and shape.

    Args:
        kind: the operator of the node.
        attributes: the attributes of the node.
    """
    outputs = model.graph.outputs
    names = [value.name for value in outputs]
    index = names.index(name)
    value = outputs[index]
    value.name = inner
    outputs[index] = ir.Value(name=name, type=value.type, shape=value.shape)
    node = ir.node(kind, [value], attributes, outputs=[outputs[index]], name=node_name)
    model.graph.append(node)
    return node


def nodes_of(model: ir.Model, operator: str) -> list[ir.Node]:
    """Return the nodes of an operator, without those of inner graphs.

    The result is a list, so that a loop over it can replace the nodes.
    """
    return [node for node in model.graph if node.op_type == operator]


class Writer:
    """Writes nodes before a node, in the order of the calls, and constants into its graph.

    >>> x = ir.Value(name="x")
    >>> node = ir.node("Sqrt", [x])
    >>> graph = ir.Graph([x], node.outputs, nodes=[node])
    >>> write = Writer(node)
    >>> node.replace_input_with(0, write("Mul", [x, write.constant("two", np.float32(2))], "y"))
    >>> [other.op_type for other in graph]
    ['Mul', 'Sqrt']
    """

    def __init__(self, before: ir.Node) -> None:
        self._before = before

    @property
    def _graph(self) -> ir.Graph:
        assert isinstance(self._before.graph, ir.Graph)
        return self._before.graph

    def constant(self, name: str, values: ArrayLike) -> ir.Value:
        """Add an initializer, and return it."""
        value = ir.Value(name=name)
        store(value, numpy_helper.from_array(np.asarray(values), name))
        self._graph.register_initializer(value)
        return value

    def __call__(
        self,
        kind: str,
        inputs: Sequence[ir.Value | None],
        output: str,
        name: str = "",
        **attributes: Any,
    ) -> ir.Value:
        """Write a node and return its output.

        Args:
            output: name of the output.
            name: name of the node; by default that of the output.
        """
        value = ir.Value(name=output)
        node = ir.node(kind, inputs, attributes, outputs=[value], name=name or output)
        self._graph.insert_before(self._before, node)
        return value


def store(constant: ir.Value, tensor: onnx.TensorProto) -> None:
    """Replace the values of a constant, perhaps by another dtype or shape; the name stays."""
    constant.const_value = values = ir.from_proto(tensor)
    constant.type = ir.TensorType(values.dtype)
    constant.shape = values.shape


def replace(old: ir.Value, new: ir.Value) -> None:
    """Replace a tensor by another for all readers; a graph output keeps name, type and shape."""
    is_output = old.is_graph_output()
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    if is_output:
        new.name = old.name
        new.type = old.type
        new.shape = old.shape


def replace_node(node: ir.Node, value: ir.Value) -> None:
    """Remove a node with one output, and replace its output by a tensor."""
    [output] = node.outputs
    replace(output, value)
    assert node.graph is not None
    node.graph.remove(node, safe=True)


def input_of(node: ir.Node, index: int) -> ir.Value:
    """Return an input that the node does not omit."""
    value = node.inputs[index]
    assert value is not None
    return value


def values_of(constant: ir.Value) -> Any:
    """Return the values of an initializer as an array."""
    assert constant.const_value is not None
    return constant.const_value.numpy()


def producer_of(node: ir.Node, index: int) -> ir.Node | None:
    """Return the node that computes an input; None if no node does, or the input is missing."""
    if index >= len(node.inputs):
        return None
    value = node.inputs[index]
    return None if value is None else value.producer()


def all_inputs(node: ir.Node) -> Iterator[ir.Value]:
    """Yield the inputs of a node, and those of the nodes in its inner graphs."""
    yield from filter(None, node.inputs)
    for item in node.attributes.values():
        graphs: Iterable[ir.Graph] = ()
        if item.type == ir.AttributeType.GRAPH:
            graphs = [item.value]
        elif item.type == ir.AttributeType.GRAPHS:
            graphs = item.value
        for graph in graphs:
            for inner in graph.all_nodes():
                yield from filter(None, inner.inputs)
