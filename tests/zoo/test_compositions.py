"""Random compositions of operators, through the flows of ONNX Runtime."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.zoo import flows
from tests.zoo.onnx_networks import node
from tests.zoo.variations import convolved

LEAST_DB = 15.0  # after several roundings of values that later operators enlarge
Make = Callable[[str, str], onnx.NodeProto]


def make(kind: str, *constants: str, **attributes: object) -> Make:
    """Return a function that makes a node from the names of its input and its output."""
    return lambda before, after: node(kind, [before, *constants], [after], **attributes)


# From [N, 8, 6, 6] to the same shape.
ONE: dict[str, Make] = {
    "relu": make("Relu"),
    "clip": make("Clip", "low", "high"),
    "clip_above": make("Clip", "", "high"),
    "leaky_relu": make("LeakyRelu", alpha=0.3),
    "sigmoid": make("Sigmoid"),
    "tanh": make("Tanh"),
    "hard_swish": make("HardSwish"),
    "neg": make("Neg"),
    "abs": make("Abs"),
    "transpose": make("Transpose", perm=[0, 1, 3, 2]),
    "max_pool": make("MaxPool", kernel_shape=[3, 3], pads=[1] * 4),
    "average_pool": make("AveragePool", kernel_shape=[3, 3], pads=[1] * 4),
    "conv": make("Conv", "kernel", "offset", pads=[1] * 4),
    "depthwise": make("Conv", "depth", "offset", pads=[1] * 4, group=8),
    "transposed": make("ConvTranspose", "kernel", "offset", pads=[1] * 4),
    "scale": make("Mul", "gain"),
    "shift": make("Add", "gain"),
    "reshape": make("Reshape", "shape"),
    "softmax": make("Softmax", axis=1),
}
TWO = ("Add", "Mul", "Sub", "Max")
STEPS = st.lists(
    st.tuples(st.sampled_from([*ONE, *TWO]), st.integers(0, 5), st.integers(0, 5)),
    min_size=1,
    max_size=5,
)
RANDOM = np.random.default_rng(3)
CONSTANTS = {
    "low": np.float32(-0.4),
    "high": np.float32(0.5),
    "kernel": (0.15 * RANDOM.normal(size=(8, 8, 3, 3))).astype(np.float32),
    "depth": (0.3 * RANDOM.normal(size=(8, 1, 3, 3))).astype(np.float32),
    "offset": (0.1 * RANDOM.normal(size=8)).astype(np.float32),
    "gain": np.linspace(-1.5, 1.5, 8).reshape(8, 1, 1).astype(np.float32),
    "shape": np.array([0, 8, 6, 6]),
}


@pytest.mark.slow
@pytest.mark.parametrize("flow", ["onnx u8s8", "onnx qoperator"])
@settings(max_examples=8)
@given(steps=STEPS)
def test_composition_is_equal_to_fp32_or_unsupported(flow, steps):
    """Each step reads one or two of the tensors before it."""
    tensors, nodes = ["c"], []
    for number, (kind, first, second) in enumerate(steps):
        output = "d" if number == len(steps) - 1 else f"t{number}"
        one, other = (tensors[index % len(tensors)] for index in (first, second))
        nodes.append(ONE[kind](one, output) if kind in ONE else node(kind, [one, other], [output]))
        tensors.append(output)
    read = {name for item in nodes for name in item.input}
    constants = {name: values for name, values in CONSTANTS.items() if name in read}
    with TemporaryDirectory() as folder:
        outcome = flows.run_network(convolved(nodes, **constants), flows.FLOWS[flow], Path(folder))
    assert outcome.reason or outcome.sqnr_db >= LEAST_DB
