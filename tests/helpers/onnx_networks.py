"""A small ONNX network, as an old exporter wrote it."""

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.integers(0, 256, (20, 32, 32, 3)).astype(np.float32)
FILTERS = RANDOM.normal(0, 0.01, (8, 3, 3, 3)).astype(np.float32)
DENSE = RANDOM.normal(0, 1, (8, 10)).astype(np.float32)
Shape = list[str | int]


def build(
    opset: int = 17,
    *,
    takes: Shape = ["B", 32, 32, 3],  # noqa: B006
    gives: Shape = ["B", 10],  # noqa: B006
    middle: list[onnx.NodeProto] | None = None,
    last: str = "Softmax",
    nchw: bool = False,
    constants: dict[str, NDArray] | None = None,
) -> onnx.ModelProto:
    """Return a network as an old exporter wrote it: nodes without names, weights as inputs too.

    `middle` goes from `relu` to `middle`, both [N, 8, 32, 32].
    """
    tensors = {"filters": FILTERS, "dense": DENSE, "bias": np.zeros(10, np.float32)}
    tensors |= constants or {}
    nodes = [
        helper.make_node("Identity", ["pixels:0"], ["nchw"])
        if nchw
        else helper.make_node("Transpose", ["pixels:0"], ["nchw"], perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["nchw", "filters"], ["input"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["input"], ["relu"]),
        *(middle or []),
        helper.make_node("GlobalAveragePool", ["middle" if middle else "relu"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["flat"]),
        helper.make_node("Gemm", ["flat", "dense", "bias"], ["logits"]),
        helper.make_node(last, ["logits"], ["given"], name="a.b"),
    ]
    inputs = [helper.make_tensor_value_info("pixels:0", TensorProto.FLOAT, takes)]
    inputs += [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape)
        for name, array in tensors.items()
        if array.dtype == np.float32
    ]
    outputs = [helper.make_tensor_value_info("given", TensorProto.FLOAT, gives)]
    initializers = [numpy_helper.from_array(array, name) for name, array in tensors.items()]
    graph = helper.make_graph(nodes, "network", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=4)
