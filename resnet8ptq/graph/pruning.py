"""Removes the nodes and constants of a graph that no output needs, inner graphs included."""

from collections.abc import Iterator
from typing import TypeVar

import onnx
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)


def prune(graph: onnx.GraphProto) -> None:
    """Remove nodes and constants that no output needs."""
    needed = {value.name for value in graph.output}
    for node in reversed(list(graph.node)):
        if needed.intersection(node.output):
            needed.update(inputs_of(node))
        else:
            graph.node.remove(node)
    constants = [tensor for tensor in graph.initializer if tensor.name in needed]
    del graph.initializer[:]
    graph.initializer.extend(constants)


def inputs_of(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names of a node's inputs, and of the tensors that its inner graphs use."""
    yield from filter(None, node.input)
    for inner in find_all(node, onnx.GraphProto):
        yield from (value.name for value in inner.output)
        for part in inner.node:
            yield from filter(None, part.input)


def find_all(message: Message, kind: type[M]) -> Iterator[M]:
    """Yield all messages of a kind, including those in attributes, subgraphs and functions."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for part in [value] if isinstance(value, Message) else value:
            if isinstance(part, kind):
                yield part
            yield from find_all(part, kind)
