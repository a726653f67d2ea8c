"""Torch functions for ONNX's LSTM, GRU and RNN, which onnx2torch lacks."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch.nn import functional

from resnet8ptq.graph.layers import attribute

Constants = Mapping[int, NDArray[Any]]
KINDS = ("LSTM", "GRU", "RNN")
_STATES = slice(5, 7)  # indices of the initial states among the inputs
_GATES = {"LSTM": [0, 2, 3, 1], "GRU": [1, 0, 2], "RNN": [0]}  # the gates in torch's order
_ACTIVATIONS = {
    "LSTM": [[b"Sigmoid", b"Tanh", b"Tanh"]],
    "GRU": [[b"Sigmoid", b"Tanh"]],
    "RNN": [[b"Tanh"], [b"Relu"]],
}
# Operators whose output has values of their first input only.
_MOVING = (
    "Cast",
    "Expand",
    "Gather",
    "Identity",
    "Reshape",
    "Slice",
    "Squeeze",
    "Tile",
    "Transpose",
    "Unsqueeze",
)


def drop_zero_states(graph: onnx.GraphProto) -> None:
    """Drop the initial states of recurrent layers, in place, if all are 0, ONNX's default.

    Exporters write such states as zeros that are expanded to the batch.
    """
    if not any(node.op_type in KINDS for node in graph.node):
        return
    zeros = set()
    for tensor in graph.initializer:
        if not onnx.numpy_helper.to_array(tensor).any():
            zeros.add(tensor.name)

    # Follow the zeros from node to node, up to the layers
    for node in graph.node:
        if _is_zero(node, zeros):
            zeros.add(node.output[0])
        if node.op_type in KINDS:
            if zeros.issuperset(filter(None, node.input[_STATES])):
                node.input[_STATES] = [""] * len(node.input[_STATES])
            while not node.input[-1]:
                del node.input[-1]


def _is_zero(node: onnx.NodeProto, zeros: Collection[str]) -> bool:
    """Return whether a node only makes zeros, or moves those of a tensor in `zeros`."""
    if node.op_type == "ConstantOfShape":
        value = attribute(node, "value", None)
        return value is None or not onnx.numpy_helper.to_array(value).any()
    return node.op_type in _MOVING and node.input[0] in zeros


def find_function(
    node: onnx.NodeProto, constants: Constants, steps: int
) -> Callable[..., Any] | None:
    """Return a function that computes a node, with the signature of `torch.lstm` or `torch.gru`.

    Returns None for a variant without such a function, and if weights or biases are computed.

    Args:
        constants: the constant inputs, by index.
        steps: the number of steps of the input; 0 if unknown.
    """
    # Inputs 1 to 3 are weights of inputs and of states, and biases; 5 and 6 are initial states
    kind = node.op_type
    used = {index for index, name in enumerate(node.input) if name}
    states = {5, 6} if kind == "LSTM" else {5}
    if not constants.keys() >= used & {1, 2, 3}:
        return None
    if used - {0, 1, 2, 3} not in (set(), states):  # lengths of sequences, peepholes, or one state
        return None
    if any(attribute(node, name, 0) for name in ("clip", "layout", "input_forget")):
        return None

    # Each direction must have the usual activation functions
    directions = len(constants[1])
    functions = attribute(node, "activations", _ACTIVATIONS[kind][0] * directions)
    usual = [names * directions for names in _ACTIVATIONS[kind]]
    if functions not in usual:
        return None

    # A GRU that resets first is a loop, which needs a fixed number of steps
    if kind == "GRU" and not attribute(node, "linear_before_reset", 0):
        return partial(_reset_first, steps=steps) if steps else None
    name = kind.lower()
    if kind == "RNN":
        name = f"rnn_{functions[0].decode().lower()}"
    function: Callable[..., Any] = getattr(torch, name)
    return function


def _reset_first(
    values: torch.Tensor,
    states: torch.Tensor,
    weights: Sequence[torch.Tensor],
    *_: Any,
    steps: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a GRU that resets the state before the matrix product; torch resets it afterwards.

    Arguments and result are those of `torch.gru`, with a fixed number of steps.

    Args:
        values: [steps, N, inputs].
        states: the initial states, [directions, N, width].
    """
    directions = []
    last = []
    for direction in range(len(weights) // 4):  # the second direction starts at the last step
        of_values, of_state, bias, state_bias = weights[4 * direction : 4 * direction + 4]
        width = of_state.shape[1]
        state = states[direction]
        outputs = []
        ordered = values.flip(0) if direction else values
        inputs = functional.linear(ordered, of_values, bias)

        # Each step computes the gates from the input and the last state
        for index in range(steps):
            step = inputs[index]
            both = functional.linear(state, of_state[: 2 * width], state_bias[: 2 * width])
            gates = torch.sigmoid(step[:, : 2 * width] + both)
            reset = gates[:, :width]
            update = gates[:, width:]
            kept = functional.linear(reset * state, of_state[2 * width :], state_bias[2 * width :])
            state = torch.lerp(torch.tanh(step[:, 2 * width :] + kept), state, update)
            outputs.append(state)
        if direction:
            outputs.reverse()
        directions.append(torch.stack(outputs))
        last.append(state)
    return torch.cat(directions, 2), torch.stack(last)


def weights_by_direction(node: onnx.NodeProto, constants: Constants) -> list[torch.Tensor]:
    """Return the weights and biases of each direction in turn, with the gates in torch's order.

    Each direction has four tensors: the weights of inputs and of states, and the biases of both.
    """
    directions, rows, _ = constants[1].shape
    biases = constants.get(3, np.zeros((directions, 2 * rows), np.float32))
    parts = (constants[1], constants[2], biases[:, :rows], biases[:, rows:])
    order = _GATES[node.op_type]
    weights = []
    for index in range(directions):
        for part in parts:
            gates = np.split(part[index], len(order))
            ordered = np.concatenate([gates[gate] for gate in order])
            weights.append(torch.from_numpy(ordered))
    return weights
