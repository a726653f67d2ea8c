"""The links of a graph: the constant or the producer of each tensor, and its readers.

A node with inner graphs (If, Loop, Scan) also reads the outer tensors that its inner graphs use.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import TypeVar

import onnx
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)


class Links:
    """The links of a graph, valid until the graph changes other than by `replace_input`.

    Make one object before a loop over the nodes. Each lookup then takes constant time, where a
    search of the graph would make the loop quadratic.

        links = Links(graph)
        for node in graph.node:
            reader = links.only_reader(node.output[0])

    Attributes:
        outputs: names of the graph's outputs.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self.outputs = set(output_names(graph))

    @cached_property
    def constants(self) -> dict[str, onnx.TensorProto]:
        """The initializers, by name."""
        return {tensor.name: tensor for tensor in self.graph.initializer}

    @cached_property
    def producers(self) -> dict[str, onnx.NodeProto]:
        """The node that computes each tensor, by the tensor's name."""
        producers = {}
        for node in self.graph.node:
            for name in filter(None, node.output):  # an omitted output has no name
                producers[name] = node
        return producers

    @cached_property
    def _readers(self) -> dict[str, dict[int, onnx.NodeProto]]:
        """The readers of each tensor, by `id`: thousands may read one constant."""
        readers: dict[str, dict[int, onnx.NodeProto]] = {}
        for node in self.graph.node:
            for name in inputs_of(node):
                readers.setdefault(name, {})[id(node)] = node
        return readers

    @classmethod
    def of(cls, graph: "onnx.GraphProto | Links") -> "Links":
        """Return the links of a graph, or `graph` itself if it is a `Links`."""
        return graph if isinstance(graph, Links) else cls(graph)

    def readers(self, name: str) -> list[onnx.NodeProto]:
        """Return the nodes that read a tensor, in graph order, each once."""
        return [*self._readers.get(name, {}).values()]

    def before(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Return the producer of each input of a node, in order; inner graphs do not count."""
        return [self.producers[name] for name in node.input if name in self.producers]

    def after(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Return the readers of a node's outputs."""
        readers = []
        for name in node.output:
            readers += self.readers(name)
        return readers

    def is_shared(self, name: str) -> bool:
        """Return whether a tensor is an output of the graph, or has several readers.

        A node that has the tensor as two inputs counts twice.
        """
        reader = self.only_reader(name)
        if reader is None:
            return name in self.outputs or name in self._readers
        return list(reader.input).count(name) > 1

    def only_reader(self, name: str) -> onnx.NodeProto | None:
        """Return the only node that reads a tensor.

        Returns None if several nodes or none read the tensor, or if it is an output of the graph.
        """
        readers = self._readers.get(name, {})
        if len(readers) != 1 or name in self.outputs:
            return None
        return next(iter(readers.values()))

    def replace_input(self, node: onnx.NodeProto, index: int, tensor: onnx.TensorProto) -> None:
        """Make an initializer the input of a node at `index`."""
        readers = self._readers  # build the readers before the change
        old = node.input[index]
        node.input[index] = tensor.name
        self.constants[tensor.name] = tensor
        readers.setdefault(tensor.name, {})[id(node)] = node
        # A node may read the old constant twice, or in an inner graph.
        if old and old not in inputs_of(node):
            del readers[old][id(node)]


Linked = onnx.GraphProto | Links


def find_computed(graph: onnx.GraphProto) -> set[str]:
    """Return the inputs of the network, and the tensors that depend on one.

    Inner graphs count: an If depends on the outer tensors that its branches read.
    """
    computed = set(input_names(graph)) - Links(graph).constants.keys()
    for node in graph.node:
        if not computed.isdisjoint(inputs_of(node)):
            computed.update(node.output)
    return computed


def find_last_readers(graph: onnx.GraphProto) -> dict[str, int]:
    """Return the index of the last node that reads each tensor, by name; inner graphs count.

    After that node, the tensor's memory is free. The index of an output of the graph is the number
    of nodes. Any other tensor without a reader is left out.

    >>> node = onnx.helper.make_node("Add", ["x", "y"], ["sum"])
    >>> output = onnx.ValueInfoProto(name="sum")
    >>> find_last_readers(onnx.GraphProto(node=[node], output=[output]))
    {'x': 0, 'y': 0, 'sum': 1}
    """
    last = {}
    for index, node in enumerate(graph.node):
        for name in inputs_of(node):
            last[name] = index
    for value in graph.output:
        last[value.name] = len(graph.node)
    return last


def input_names(graph: onnx.GraphProto) -> list[str]:
    """Return the names of the graph's inputs, in their order."""
    return [value.name for value in graph.input]


def output_names(graph: onnx.GraphProto) -> list[str]:
    """Return the names of the graph's outputs, in their order."""
    return [value.name for value in graph.output]


def input_at(node: onnx.NodeProto, index: int) -> str:
    """Return the name of a node's input; empty if the node leaves it out.

    >>> clip = onnx.helper.make_node("Clip", ["x", "", "most"], ["y"])
    >>> input_at(clip, 1), input_at(clip, 2), input_at(clip, 3)
    ('', 'most', '')
    """
    return str(node.input[index]) if index < len(node.input) else ""


def inputs_of(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names of a node's inputs, and of the outer tensors that its inner graphs use."""
    yield from filter(None, node.input)
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield from _outer_names(attribute.g)
        for inner in attribute.graphs:
            yield from _outer_names(inner)


def _outer_names(inner: onnx.GraphProto) -> Iterator[str]:
    """Yield the names that an inner graph takes from the graphs around it."""
    own = {item.name for item in (*inner.input, *inner.initializer)}
    for node in inner.node:
        for name in inputs_of(node):
            if name not in own:
                yield name
        own.update(node.output)
    for name in output_names(inner):
        if name not in own:
            yield name


def find_all(message: Message, kind: type[M]) -> Iterator[M]:
    """Yield all messages of a kind inside a message, such as in attributes, graphs and functions.

    This serves checks and changes that must not miss a message, such as an operator of an untrusted
    file.

    >>> node = onnx.helper.make_node("Constant", [], ["c"], value_float=1.0)
    >>> [item.name for item in find_all(node, onnx.AttributeProto)]
    ['value_float']
    """
    for field, value in message.ListFields():
        if field.message_type is None:  # a number, a text, or a list of these
            continue
        parts = [value] if isinstance(value, Message) else value
        for part in parts:
            if isinstance(part, kind):
                yield part
            yield from find_all(part, kind)
