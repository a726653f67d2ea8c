"""Small data and networks of a user's own."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

QUICK = ("latency.enabled=false", "threads=1", "evaluate.batch_size=50")
CLASSES = 3


def write_data(path: Path, count: int = 120) -> Path:
    """Pictures [8, 6, 3] of which one channel is brighter: that channel is the class."""
    random = np.random.default_rng(0)
    labels = np.arange(count) % CLASSES
    images = random.integers(1, 100, (count, 8, 6, 3), dtype=np.uint8)
    images[np.arange(count), :, :, labels] += 100
    np.savez(path, images=images, labels=labels)
    return path


def write_network(path: Path, outputs: int = CLASSES) -> Path:
    """NCHW, logits, for pixels from 0 to 1: the mean of each channel, cut off at 1."""
    kernel = np.zeros((CLASSES, 3, 3, 3), np.float32)
    kernel[range(CLASSES), range(3), 1, 1] = 1
    head = np.eye(CLASSES, outputs, dtype=np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["pixels", "kernel"], ["c"], "conv", pads=[1] * 4),
            helper.make_node("Clip", ["c", "low", "high"], ["r"], "clip"),
            helper.make_node("GlobalAveragePool", ["r"], ["p"], "pool"),
            helper.make_node("Flatten", ["p"], ["f"], "flatten"),
            helper.make_node("Gemm", ["f", "head"], ["scores"], "head"),
        ],
        "own",
        [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["N", 3, 8, 6])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", outputs])],
        [
            numpy_helper.from_array(kernel, "kernel"),
            numpy_helper.from_array(np.float32(0), "low"),
            numpy_helper.from_array(np.float32(1), "high"),
            numpy_helper.from_array(head, "head"),
        ],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(proto, path)
    return path


def write_tiny(path: Path, inputs: int, outputs: int) -> Path:
    """One layer, from a row of a table to logits."""
    weights = np.random.default_rng(0).normal(size=(inputs, outputs)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["row", "weights"], ["scores"], "head")],
        "tiny",
        [helper.make_tensor_value_info("row", TensorProto.FLOAT, ["N", inputs])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", outputs])],
        [numpy_helper.from_array(weights, "weights")],
    )
    opset = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    return path
