"""Weights in 8 bits by channel, computed with in float: weight_only.block_size=null."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from resnet8ptq.backends.onnx import weight_storage
from resnet8ptq.config.naming import Combination
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.graph.embeddings import round_rows
from tests.backends.test_weight_only import load, quantize
from tests.helpers.configs import make_config
from tests.helpers.factories import quantizer_of
from tests.helpers.product_networks import write

STORED = ("method=weight_only", "dtype=w8", "weight_only.block_size=null")
RANDOM = np.random.default_rng(0)


def weights(*shape: int) -> Any:
    return RANDOM.normal(size=shape).astype(np.float32)


def node(kind: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
    outputs = ["", output] if kind in ("GRU", "LSTM", "RNN") else [output]
    return helper.make_node(kind, inputs, outputs, f"the_{kind}", **attributes)


CASES = {  # nodes, constants, shape of a sample, shape of an output
    "Conv": ([node("Conv", ["x", "w"], "y")], {"w": weights(8, 4, 3, 3)}, [4, 6, 6], [8, 4, 4]),
    "grouped Conv": (
        [node("Conv", ["x", "w"], "y", group=4)],
        {"w": weights(8, 1, 3, 3)},
        [4, 6, 6],
        [8, 4, 4],
    ),
    "grouped ConvTranspose": (
        [node("ConvTranspose", ["x", "w"], "y", group=2)],
        {"w": weights(4, 3, 2, 2)},
        [4, 5, 5],
        [6, 6, 6],
    ),
    "Gemm": (
        [node("Gemm", ["x", "w", "b"], "y", transB=1)],
        {"w": weights(8, 40), "b": weights(8)},
        [40],
        [8],
    ),
    "MatMul": ([node("MatMul", ["x", "w"], "y")], {"w": weights(40, 8)}, [40], [8]),
    "LSTM": (
        [
            helper.make_node("Transpose", ["x"], ["t"], "turn", perm=[1, 0, 2]),
            node("LSTM", ["t", "w", "r"], "h", hidden_size=8),
            helper.make_node("ReduceMean", ["h"], ["y"], "sum", keepdims=0, axes=[0]),
        ],
        {"w": weights(1, 32, 16), "r": weights(1, 32, 8)},
        [5, 16],
        [8],
    ),
    "GRU": (
        [
            helper.make_node("Transpose", ["x"], ["t"], "turn", perm=[1, 0, 2]),
            node("GRU", ["t", "w", "r"], "h", hidden_size=8),
            helper.make_node("ReduceMean", ["h"], ["y"], "sum", keepdims=0, axes=[0]),
        ],
        {"w": weights(1, 24, 16), "r": weights(1, 24, 8)},
        [5, 16],
        [8],
    ),
}


@pytest.mark.parametrize("slim", ["false", "true"])
@pytest.mark.parametrize("name", CASES)
def test_every_layer_with_weights_is_stored_and_keeps_its_outputs(name, slim, tmp_path, cache_root):
    nodes, constants, sample, output = CASES[name]
    source = write(
        tmp_path / "net.onnx", nodes, constants, {"x": ["N", *sample]}, {"y": ["N", *output]}
    )
    fp32, split = load(source, cache_root, weights(20, *sample))
    config = make_config(*STORED, f"slim={slim}")
    artifact = quantize(config, fp32, split, tmp_path)
    assert artifact.quantized_layers == 1
    graph = onnx.load(artifact.path).graph
    assert {t.data_type for t in graph.initializer if len(t.dims) > 2} <= {onnx.TensorProto.INT8, 1}
    loaded = quantizer_of(config).load(artifact.path, 1)
    floats = quantizer_of(make_config("dtype=fp32")).load(fp32.onnx_path, 1)
    batch = next(iter(split.batches(20)))
    [ours], [theirs] = loaded.predict(batch), floats.predict(batch)
    noise = np.square(ours - theirs).mean() / np.square(theirs).mean()
    assert 0 < noise < 1e-3


def test_levels_are_within_half_a_step_of_the_weights():
    values = RANDOM.normal(size=(4, 50)).astype(np.float32) * np.array([[1e-40], [1], [1e3], [0]])
    levels, scale = round_rows(values.astype(np.float32), (1,))
    assert levels.dtype == np.int8
    assert np.all(np.abs(levels * scale - values) <= scale / 2 * (1 + 1e-5))


def make_pair() -> onnx.ModelProto:
    """Return two products that share their weights."""
    return helper.make_model(
        helper.make_graph(
            [
                helper.make_node("MatMul", ["x", "w"], ["a"], "first"),
                helper.make_node("MatMul", ["a", "w"], ["y"], "second"),
            ],
            "g",
            [helper.make_tensor_value_info("x", 1, ["N", 8])],
            [helper.make_tensor_value_info("y", 1, ["N", 8])],
            [onnx.numpy_helper.from_array(weights(8, 8), "w")],
        )
    )


def test_only_layers_that_stay_in_float_are_counted():
    graph = make_pair().graph
    assert not weight_storage.count_left(graph, ())
    assert weight_storage.count_left(graph, ["first"]) == {"MatMul": 1}


def test_weights_that_two_layers_share_are_stored_once():
    proto = weight_storage.quantize(make_pair(), ())
    onnx.checker.check_model(proto)
    assert [t.data_type for t in proto.graph.initializer] == [onnx.TensorProto.INT8, 1]
    assert weight_storage.count_layers(proto.graph) == 2


def test_a_network_without_weights_is_unsupported(tmp_path: Path, cache_root):
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], "tiny")]
    path = write(
        tmp_path / "n.onnx",
        nodes,
        {"w": weights(2, 2, 1, 1)},
        {"x": ["N", 2, 4, 4]},
        {"y": ["N", 2, 4, 4]},
    )
    fp32, split = load(path, cache_root, weights(4, 2, 4, 4))
    with pytest.raises(UnsupportedError, match="method=weight_only: no layer"):
        quantize(make_config(*STORED), fp32, split, tmp_path)


@pytest.mark.parametrize(
    "word", ["dtype=w4", "weight_only.algorithm=hqq", "symmetric.weights=false"]
)
def test_settings_of_blocks_are_unsupported(word):
    with pytest.raises(UnsupportedError, match=word.partition("=")[0]):
        quantizer_of(make_config(*STORED, word)).resolve()


def test_the_name_of_a_run_says_that_scales_are_by_channel():
    config = make_config(*STORED)
    assert Combination.of_config(config).cells[-1] == "per channel"
    logged = {"method": "weight_only", "dtype": "w8", "weight_only.block_size": "null"}
    assert Combination.of_params(logged).cells[-1] == "per channel"
