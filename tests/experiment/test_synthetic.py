"""Calibration samples from the statistics of batch normalization."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.core.machine import Runtime
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.session import open_runner
from resnet8ptq.simulation import synthetic

CHANNELS = 4


@pytest.fixture
def like():
    return Split(np.zeros((1, 3, 8, 8), np.float32), None, "test")


def save(folder: Path, mean: np.ndarray, variance: np.ndarray) -> Path:
    """Write Conv, BatchNormalization, Relu; the outputs are the convolution's and the last."""
    random = np.random.default_rng(0)
    values = {
        "weights": random.normal(size=(CHANNELS, 3, 3, 3)).astype(np.float32) / 5,
        "scale": np.ones(CHANNELS, np.float32),
        "shift": np.zeros(CHANNELS, np.float32),
        "mean": mean.astype(np.float32),
        "variance": variance.astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "weights"], ["sums"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node(
            "BatchNormalization", ["sums", "scale", "shift", "mean", "variance"], ["normal"], "norm"
        ),
        helper.make_node("Relu", ["normal"], ["y"], "relu"),
    ]
    tensors = [numpy_helper.from_array(array, name) for name, array in values.items()]
    shapes = {"x": ["n", 3, 8, 8], "sums": ["n", CHANNELS, 8, 8], "y": ["n", CHANNELS, 8, 8]}
    x, sums, y = (
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in shapes.items()
    )
    graph = helper.make_graph(nodes, "graph", [x], [y, sums], tensors)
    path = folder / "unfolded.onnx"
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def test_samples_have_the_statistics_of_the_network(tmp_path, like):
    path = save(tmp_path, np.zeros(CHANNELS), np.ones(CHANNELS))
    random = np.random.default_rng(1)
    train = random.normal([[[1.0]], [[-2.0]], [[0.5]]], 2.0, (100, 3, 8, 8)).astype(np.float32)
    sums = open_runner(str(path))(train)[1]
    mean = sums.mean((0, 2, 3))
    variance = sums.var((0, 2, 3))
    path = save(tmp_path, mean, variance)
    runtime = Runtime(tmp_path / "cache", 1, device="cpu")
    samples = synthetic.make_samples(path, like, 20, 0, runtime, "network")
    assert samples.stored.shape == (20, 3, 8, 8)
    assert samples.labels is None
    sums = open_runner(str(path))(samples.inputs(slice(None)))[1]
    np.testing.assert_allclose(sums.mean((0, 2, 3)), mean, atol=0.15)
    np.testing.assert_allclose(sums.std((0, 2, 3)), np.sqrt(variance), rtol=0.15)
    again = synthetic.make_samples(path, like, 20, 0, runtime, "network")
    assert again.digest == samples.digest
    other = synthetic.make_samples(path, like, 20, 1, runtime, "network")
    assert other.digest != samples.digest


def test_pictures_stay_in_their_range(tmp_path):
    path = save(tmp_path, np.zeros(CHANNELS), np.full(CHANNELS, 1e6))
    pictures = Split(np.zeros((1, 8, 8, 3), np.uint8), None, "test", layout=(2, 0, 1))
    runtime = Runtime(tmp_path / "cache", 1, device="cpu")
    samples = synthetic.make_samples(path, pictures, 4, 0, runtime, "network")
    values = samples.inputs(slice(None))
    assert values.shape == (4, 3, 8, 8)
    assert 0 <= values.min() < values.max() <= 255


def test_a_network_without_statistics_is_unsupported(tmp_path, like):
    path = save(tmp_path, np.zeros(CHANNELS), np.ones(CHANNELS))
    proto = onnx.load(path)
    proto.graph.node[1].CopyFrom(helper.make_node("Identity", ["sums"], ["normal"], "norm"))
    onnx.save(proto, path)
    with pytest.raises(UnsupportedError, match=r"BatchNormalization.*calib\.images"):
        synthetic.make_samples(path, like, 4, 0, Runtime(tmp_path, 1, device="cpu"), "network")
