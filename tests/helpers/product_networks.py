"""Networks of matrix products."""

from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from tests.helpers.assembling import assemble
from tests.helpers.own_data import CLASSES

Array = NDArray[np.float32]


def write_mixer(path: Path) -> Path:
    """Pictures [N, 3, 8, 6] to logits: a convolution, two MatMuls that share weights, a Gemm.

    It scores the data of `own_data.write_data`: the mean of each channel, and some noise.
    """
    random = np.random.default_rng(0)
    mixing = np.eye(CLASSES) + random.normal(0, 0.05, (CLASSES, CLASSES))
    kernel = np.zeros((CLASSES, 3, 1, 1))
    kernel[range(CLASSES), range(3)] = 1
    nodes = [
        helper.make_node("Conv", ["pixels", "kernel"], ["c"], "conv"),
        helper.make_node("GlobalAveragePool", ["c"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("MatMul", ["f", "mixing"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["r"], "relu"),
        helper.make_node("MatMul", ["r", "mixing"], ["b"], "second"),
        helper.make_node("Gemm", ["b", "head", "bias"], ["scores"], "head", transB=1),
    ]
    constants = {"kernel": kernel, "mixing": mixing, "head": mixing, "bias": np.zeros(CLASSES)}
    return write(path, nodes, constants, {"pixels": ["N", 3, 8, 6]}, {"scores": ["N", CLASSES]})


def split_network(path: Path) -> Array:
    """Two halves of a convolution's channels are added and classified; return four samples."""
    random = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv"),
        helper.make_node("Split", ["c"], ["left", "right"], "split", axis=1),
        helper.make_node("Add", ["left", "right"], ["m"], "add"),
        helper.make_node("GlobalAveragePool", ["m"], ["g"], "pool"),
        helper.make_node("Flatten", ["g"], ["f"], "flatten"),
        helper.make_node("MatMul", ["f", "v"], ["l"], "dense"),
        helper.make_node("Softmax", ["l"], ["y"], "softmax", axis=-1),
    ]
    constants = {"w": random.normal(size=(4, 3, 3, 3)) / 5, "v": random.normal(size=(2, 5))}
    write(path, nodes, constants, {"x": ["n", 3, 8, 8]}, {"y": ["n", 5]})
    return random.normal(size=(4, 3, 8, 8)).astype(np.float32)


def write(
    path: Path,
    nodes: list[onnx.NodeProto],
    constants: dict[str, NDArray],
    takes: dict[str, list[int | str]],
    gives: dict[str, list[int | str]],
    integers: bool = False,
) -> Path:
    """Write a network of opset 17 with float outputs and constants; inputs may be `integers`."""
    kinds = dict.fromkeys(takes, TensorProto.INT64) if integers else {}
    floats = {name: array.astype(np.float32) for name, array in constants.items()}
    onnx.save(assemble(nodes, takes, gives, floats, kinds=kinds), path)
    return path
