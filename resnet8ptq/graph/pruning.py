"""Removes the nodes and constants of a graph that no output needs, inner graphs included."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import onnx
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)


def prune(graph: onnx.GraphProto) -> None:
    """Remove nodes and constants that no output needs."""
    needed = {value.name for value in graph.output}
    unused = []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(inputs_of(node))
        else:
            unused.append(node)
    remove_nodes(graph, unused)
    constants = [tensor for tensor in graph.initializer if tensor.name in needed]
    del graph.initializer[:]
    graph.initializer.extend(constants)


def remove_nodes(graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto]) -> None:
    """Remove nodes of a graph, found by identity.

    The `remove` of protobuf's lists compares the contents of all nodes before it.
    """
    unwanted = {id(node) for node in nodes}
    for index in reversed(range(len(graph.node))):
        if id(graph.node[index]) in unwanted:
            del graph.node[index]


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
        yield from (name for name in inputs_of(node) if name not in own)
        own.update(node.output)
    yield from (value.name for value in inner.output if value.name not in own)


def find_all(message: Message, kind: type[M]) -> Iterator[M]:
    """Yield all messages of a kind, including those in attributes, subgraphs and functions."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for part in [value] if isinstance(value, Message) else value:
            if isinstance(part, kind):
                yield part
            yield from find_all(part, kind)
