"""method=mixed: dynamic matrix products and LSTMs beside static convolutions."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from resnet8ptq.backends.onnx.quantizer import count_quantized_layers
from resnet8ptq.core.errors import UnsupportedError
from tests.backends.test_weight_only import load, quantize
from tests.helpers.configs import make_config
from tests.helpers.factories import THREADS, quantizer_of
from tests.helpers.product_networks import write

RANDOM = np.random.default_rng(0)
SAMPLES = RANDOM.normal(size=(20, 3, 8, 6)).astype(np.float32)
MIXED = ("data=arrays", "method=mixed", "dtype=u8s8", "per_channel=true", "reduce_range=true")


def write_reader(path: Path) -> Path:
    """Pictures [N, 3, 8, 6]: two convolutions, an LSTM along the 6 columns, a Gemm, a MatMul."""
    nodes = [
        helper.make_node("Conv", ["x", "first"], ["c"], "conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        helper.make_node("Conv", ["r", "second"], ["d"], "conv2", kernel_shape=[8, 1]),
        helper.make_node("Sigmoid", ["d"], ["s"], "gate"),
        helper.make_node("Squeeze", ["s", "two"], ["q"], "squeeze"),  # [N, 8, 6]
        helper.make_node("Transpose", ["q"], ["t"], "steps", perm=[2, 0, 1]),  # [6, N, 8]
        helper.make_node("LSTM", ["t", "w", "u"], ["", "last"], "lstm", hidden_size=8),
        helper.make_node("Squeeze", ["last", "zero"], ["h"], "state"),  # [N, 8]
        helper.make_node("Gemm", ["h", "dense", "bias"], ["g"], "gemm", transB=1),
        helper.make_node("Relu", ["g"], ["k"], "relu2"),
        helper.make_node("MatMul", ["k", "head"], ["y"], "head"),
    ]
    shapes = {"first": (4, 3, 3, 3), "second": (8, 4, 8, 1), "w": (1, 32, 8), "u": (1, 32, 8)}
    shapes |= {"dense": (8, 8), "bias": (8,), "head": (8, 5)}
    constants = {name: RANDOM.normal(size=shape) / 2 for name, shape in shapes.items()}
    write(path, nodes, constants, {"x": ["N", 3, 8, 6]}, {"y": ["N", 5]})
    proto = onnx.load(path)
    for name, axis in (("two", 2), ("zero", 0)):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([axis]), name))
    onnx.save(proto, path)
    return path


@pytest.mark.parametrize(
    "words", [("format=qdq",), ("format=auto", "float_output=true"), ("slim=true",)]
)
def test_products_are_dynamic_and_convolutions_static(words, tmp_path, cache_root):
    fp32, split = load(write_reader(tmp_path / "reader.onnx"), cache_root, SAMPLES)
    artifact = quantize(make_config(*MIXED, *words), fp32, split, tmp_path)
    proto = onnx.load(artifact.path)
    operators = Counter(node.op_type for node in proto.graph.node)
    assert operators["DynamicQuantizeLSTM"] == 1
    assert operators["MatMulInteger"] == 2
    assert operators["ConvInteger"] == operators["LSTM"] == 0
    assert count_quantized_layers(proto) == artifact.quantized_layers == 5
    before = quantizer_of(make_config("data=arrays", "dtype=fp32")).load(fp32.onnx_path, THREADS)
    after = quantizer_of(make_config(*MIXED)).load(artifact.path, THREADS)
    expected, got = before.predict(SAMPLES)[0], after.predict(SAMPLES)[0]
    assert np.abs(expected - got).max() < 0.1 * np.abs(expected).max()


def test_operators_that_only_products_read_stay_in_float(tmp_path, cache_root):
    fp32, split = load(write_reader(tmp_path / "reader.onnx"), cache_root, SAMPLES)
    artifact = quantize(make_config(*MIXED, "format=qdq"), fp32, split, tmp_path)
    assert {*artifact.ranges} == {"x", "c", "r", "d"}


def test_a_node_of_the_user_stays_in_float(tmp_path, cache_root):
    fp32, split = load(write_reader(tmp_path / "reader.onnx"), cache_root, SAMPLES)
    config = make_config(*MIXED, "nodes_to_exclude=[lstm,head]")
    artifact = quantize(config, fp32, split, tmp_path)
    operators = Counter(node.op_type for node in onnx.load(artifact.path).graph.node)
    assert (operators["LSTM"], operators["MatMulInteger"]) == (1, 1)


@pytest.mark.parametrize("excluded", ["conv1,conv2", "lstm,gemm,head"])
def test_mixed_needs_products_and_convolutions(excluded, tmp_path, cache_root):
    fp32, _ = load(write_reader(tmp_path / "reader.onnx"), cache_root, SAMPLES)
    config = make_config(*MIXED, f"nodes_to_exclude=[{excluded}]")
    with pytest.raises(UnsupportedError, match=r"method=mixed: got \d .* try method=static"):
        quantizer_of(config).fit(fp32)
