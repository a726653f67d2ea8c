"""`slim=true` on graphs that the quantizers write."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from resnet8ptq.backends.onnx.slim import slim


def test_layers_may_share_their_zero_points():
    constants = {
        "scale": np.float32(0.1),
        "zero": np.uint8(0),
        "w": np.ones((2, 2, 1, 1), np.int8),
        "scales": np.float32([0.1, 0.2]),
        "zeros": np.int8([0, 0]),
    }
    of_weights = ["w", "scales", "zeros"]
    nodes = [
        helper.make_node("QLinearConv", [x, "scale", "zero", *of_weights, "scale", "zero"], [y])
        for x, y in (("x", "y"), ("y", "z"))
    ]
    takes, gives = (
        [helper.make_tensor_value_info(name, TensorProto.UINT8, ["N", 2, 4, 4])] for name in "xz"
    )
    tensors = [numpy_helper.from_array(values, name) for name, values in constants.items()]
    graph = helper.make_graph(nodes, "shared", takes, gives, tensors)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    small = slim(proto)
    onnx.checker.check_model(small)
    first, second = (node.input[5] for node in small.graph.node)
    assert first == second
