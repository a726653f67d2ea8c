"""Small data and networks of a user's own."""

from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from tests.helpers.assembling import assemble

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
    nodes = [
        helper.make_node("Conv", ["pixels", "kernel"], ["c"], "conv", pads=[1] * 4),
        helper.make_node("Clip", ["c", "low", "high"], ["r"], "clip"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "head"], ["scores"], "head"),
    ]
    constants = {"kernel": kernel, "low": np.float32(0), "high": np.float32(1), "head": head}
    sides = {"pixels": ["N", 3, 8, 6]}, {"scores": ["N", outputs]}
    onnx.save(assemble(nodes, *sides, constants, opset=13), path)
    return path


def write_tiny(path: Path, inputs: int, outputs: int) -> Path:
    """One layer, from a row of a table to logits."""
    weights = np.random.default_rng(0).normal(size=(inputs, outputs)).astype(np.float32)
    head = helper.make_node("Gemm", ["row", "weights"], ["scores"], "head")
    sides = {"row": ["N", inputs]}, {"scores": ["N", outputs]}
    onnx.save(assemble([head], *sides, {"weights": weights}, opset=13), path)
    return path
