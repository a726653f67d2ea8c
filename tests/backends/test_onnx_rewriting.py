"""What ONNX Runtime's quantizer must not replace."""

import numpy as np
import pytest
from onnx import helper

from resnet8ptq.backends.onnx.rewriting import find_not_fused
from tests.helpers.assembling import assemble

CONSTANTS = {"low": np.float32(0.1), "high": np.float32(1), "sizes": np.zeros(4, np.int64)}
NODES = {
    "alone": [("Sigmoid", ["x"], "a"), ("Relu", ["a"], "y")],
    "read_twice": [("Sigmoid", ["x"], "a"), ("Relu", ["a"], "r"), ("Add", ["r", "a"], "y")],
    "moved": [("Transpose", ["x"], "a"), ("Relu", ["a"], "y")],
    "offset": [("Sigmoid", ["x"], "a"), ("Clip", ["a", "low", "high"], "y")],
    "zeros": [("Pad", ["x", "sizes"], "y")],
    "padded": [("Pad", ["x", "sizes", "low"], "y")],
}


@pytest.mark.parametrize(
    ("name", "in_qdq", "in_qoperator"),
    [
        ("alone", [], []),
        ("read_twice", [], ["Relu"]),
        ("moved", [], ["Relu"]),
        ("offset", ["Clip"], ["Clip"]),
        ("zeros", [], []),
        ("padded", [], ["Pad"]),
    ],
)
def test_nodes_that_rounding_cannot_replace_are_found(name, in_qdq, in_qoperator):
    nodes = [helper.make_node(kind, ins, [out], kind) for kind, ins, out in NODES[name]]
    graph = assemble(nodes, {"x": [4, 4]}, {"y": [4, 4]}, CONSTANTS).graph
    assert find_not_fused(graph, qoperator=False) == in_qdq
    assert find_not_fused(graph, qoperator=True) == in_qoperator
