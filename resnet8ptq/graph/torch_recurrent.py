"""ONNX's LSTM, GRU and RNN as torch's, which onnx2torch lacks."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

from resnet8ptq.graph.layers import attribute

Constants = Mapping[int, NDArray[Any]]
KINDS = ("LSTM", "GRU", "RNN")
_STATES = slice(5, 7)  # the initial states among the inputs
_GATES = {"LSTM": [0, 2, 3, 1], "GRU": [1, 0, 2], "RNN": [0]}  # in torch's order
_ACTIVATIONS = {
    "LSTM": [[b"Sigmoid", b"Tanh", b"Tanh"]],
    "GRU": [[b"Sigmoid", b"Tanh"]],
    "RNN": [[b"Tanh"], [b"Relu"]],
}
# Operators whose output has values of their first input only.
_MOVING = (
    *("Cast", "Expand", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Tile", "Transpose"),
    "Unsqueeze",
)


def drop_zero_states(graph: onnx.GraphProto) -> None:
    """Drop initial states of 0, ONNX's default, in place; exporters expand them to the batch."""
    if not any(node.op_type in KINDS for node in graph.node):
        return
    zeros = {t.name for t in graph.initializer if not onnx.numpy_helper.to_array(t).any()}
    for node in graph.node:
        if _is_zero(node, zeros):
            zeros.add(node.output[0])
        if node.op_type in KINDS:
            states = node.input[_STATES]
            node.input[_STATES] = ["" if name in zeros else name for name in states]
            while not node.input[-1]:
                del node.input[-1]


def _is_zero(node: onnx.NodeProto, zeros: Collection[str]) -> bool:
    if node.op_type == "ConstantOfShape":
        value = attribute(node, "value", None)
        return value is None or not onnx.numpy_helper.to_array(value).any()
    return node.op_type in _MOVING and node.input[0] in zeros


def find_function(node: onnx.NodeProto, constants: Constants) -> Callable[..., Any] | None:
    """Return torch's function for a node; None for a variant that torch lacks."""
    kind, directions = node.op_type, len(constants[1])
    functions = attribute(node, "activations", _ACTIVATIONS[kind][0] * directions)
    usual = functions in [names * directions for names in _ACTIVATIONS[kind]]
    after = kind != "GRU" or attribute(node, "linear_before_reset", 0)
    others = any(attribute(node, name, 0) for name in ("clip", "layout", "input_forget"))
    if not constants.keys() <= {1, 2, 3} or not usual or not after or others:
        return None
    suffix = f"_{functions[0].decode()}" if kind == "RNN" else ""
    function: Callable[..., Any] = getattr(torch, f"{kind}{suffix}".lower())
    return function


def find_weights(node: onnx.NodeProto, constants: Constants) -> list[torch.Tensor]:
    """Return weights and biases of each direction, in torch's order, also of the gates."""
    directions, rows, _ = constants[1].shape
    biases = constants.get(3, np.zeros((directions, 2 * rows), np.float32))
    parts = constants[1], constants[2], biases[:, :rows], biases[:, rows:]
    order = _GATES[node.op_type]
    return [
        torch.from_numpy(np.concatenate([np.split(part[index], len(order))[i] for i in order]))
        for index in range(directions)
        for part in parts
    ]
