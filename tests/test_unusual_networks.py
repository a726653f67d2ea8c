"""Networks that are unlike a picture classifier: made here, quantized as a run does it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import THREADS, make_config, quantizer_of
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from resnet8ptq.core.errors import ModelError, QuantizationError
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.preprocessing import Preprocessing
from resnet8ptq.experiment.compatibility import fit
from resnet8ptq.models import model
from resnet8ptq.models.inspection import inspect, needs

RANDOM = np.random.default_rng(0)
FLOATS = RANDOM.normal(size=(40, 6)).astype(np.float32)

Sizes = list[int | str]


def weights(*shape: int) -> NDArray[np.float32]:
    return RANDOM.normal(size=shape).astype(np.float32)


def network(
    path: Path,
    nodes: list[onnx.NodeProto],
    constants: dict[str, NDArray],
    takes: dict[str, tuple[int, Sizes]],
    gives: dict[str, Sizes],
) -> Path:
    """Write a network of opset 17; `takes` has the type and the sizes of each input."""
    graph = helper.make_graph(
        nodes,
        "unusual",
        [helper.make_tensor_value_info(name, *each) for name, each in takes.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, s) for name, s in gives.items()],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path
    )
    return path


def data_of(samples: NDArray, preprocessing: Preprocessing | None = None) -> Dataset:
    """Samples without labels, the same to calibrate and to test."""
    split = Split(samples, None, "made")
    split = replace(split, preprocessing=preprocessing) if preprocessing else split
    return Dataset("own", (), split, split)


Quantized = tuple[list[NDArray], list[NDArray], onnx.ModelProto]


@pytest.fixture
def quantized(tmp_path: Path, cache_root: Path) -> Callable[..., Quantized]:
    """Convert, quantize, reload; return the outputs before and after, and the artifact."""

    def run(path: Path, samples: NDArray, *overrides: str, inputs=None) -> Quantized:
        config = make_config("data=arrays", *overrides)
        data = data_of(samples)
        settings = replace(config.model, name="own", path=str(path), inputs=inputs)
        fp32 = model.load(settings, data, cache_root)
        split = fit(data, fp32).test
        quantizer = quantizer_of(config)
        artifact = quantizer.quantize(fp32, split, tmp_path)
        batch = split.inputs(slice(1 if fp32.contract.batch else 20))
        before = quantizer_of(make_config("data=arrays", "dtype=fp32")).load(
            fp32.onnx_path, THREADS
        )
        after = quantizer.load(artifact.path, THREADS)
        outputs = (list(before.predict(batch)), list(after.predict(batch)))
        return *outputs, onnx.load(artifact.path)

    return run


def near(before: list[NDArray], after: list[NDArray]) -> bool:
    """Whether 8 bits changed each output by less than a tenth of its largest value."""
    return all(
        one.shape == other.shape and np.abs(one - other).max() < 0.1 * np.abs(one).max()
        for one, other in zip(before, after, strict=True)
    )


# Names that ONNX Runtime's quantizer makes again


@pytest.mark.parametrize("taken", ["b0", "h_scale", "x_quantized", "w_zero_point"])
@pytest.mark.parametrize("fold", [True, False])
def test_tensors_make_way_for_those_of_the_quantizer(quantized, tmp_path, taken, fold):
    """Two layers share the bias `b`: the quantizer's copy of it is called `b0`."""
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["h"], "first"),
        helper.make_node("Relu", ["h"], ["r"], "relu"),
        helper.make_node("Gemm", ["r", "v", "b"], [taken], "second"),
        helper.make_node("Transpose", [taken], ["t"], "turn", perm=[0, 1]),
        helper.make_node("Relu", ["t"], ["y"], "last"),
    ]
    constants = {"w": weights(6, 6), "v": weights(6, 6), "b": weights(6)}
    takes = {"x": (TensorProto.FLOAT, ["N", 6])}
    path = network(tmp_path / "names.onnx", nodes, constants, takes, {"y": ["N", 6]})
    before, after, proto = quantized(path, FLOATS, f"model.fold={str(fold).lower()}")
    assert near(before, after)
    assert [each.name for each in (*proto.graph.input, *proto.graph.output)] == ["x", "y"]


def test_weights_in_constant_nodes_are_quantized(quantized, tmp_path):
    flat = weights(36)
    nodes = [
        helper.make_node("Constant", [], ["flat"], value_floats=flat.tolist()),
        helper.make_node("Constant", [], ["sizes"], value_ints=[6, 6]),
        helper.make_node("Reshape", ["flat", "sizes"], ["w"]),
        helper.make_node("Constant", [], ["v"], value=numpy_helper.from_array(weights(6, 3))),
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "v"], ["y"]),
    ]
    takes = {"x": (TensorProto.FLOAT, ["N", 6])}
    path = network(tmp_path / "constants.onnx", nodes, {}, takes, {"y": ["N", 3]})
    before, after, proto = quantized(path, FLOATS)
    assert near(before, after)
    assert sum(each.data_type == TensorProto.INT8 for each in proto.graph.initializer) >= 2


# Recurrent layers, and graphs inside operators


def write_lstm(path: Path) -> Path:
    """Takes 5 steps of 6 features; returns the last state."""
    nodes = [
        helper.make_node("Transpose", ["x"], ["steps"], "turn", perm=[1, 0, 2]),
        helper.make_node("LSTM", ["steps", "w", "r"], ["", "last"], "lstm", hidden_size=4),
        helper.make_node("Squeeze", ["last", "first"], ["y"], "squeeze"),
    ]
    constants = {"w": weights(1, 16, 6), "r": weights(1, 16, 4), "first": np.array([0])}
    takes = {"x": (TensorProto.FLOAT, ["N", 5, 6])}
    return network(path, nodes, constants, takes, {"y": ["N", 4]})


def test_an_lstm_is_quantized_dynamically(quantized, tmp_path, cache_root):
    path, steps = write_lstm(tmp_path / "lstm.onnx"), weights(30, 5, 6)
    before, after, proto = quantized(path, steps, "method=dynamic", "dtype=int8")
    assert near(before, after)
    assert [n.op_type for n in proto.graph.node if "LSTM" in n.op_type] == ["DynamicQuantizeLSTM"]
    with pytest.raises(QuantizationError, match=r"; method=dynamic quantizes its LSTM$"):
        quantized(path, steps)
    found = inspect(path, cache_root)
    assert (found.treatment("LSTM", "onnx"), found.treatment("LSTM", "torch")) == (
        "dynamic",
        "float",
    )
    assert "method=dynamic with backend=onnx, to quantize LSTM" in needs(found)


def write_if(path: Path, layer_outside: bool) -> Path:
    """A layer in both branches of an If; its input may be a layer's output."""
    branch = helper.make_graph(
        [helper.make_node("MatMul", ["h", "w"], ["inner"], "inside")],
        "branch",
        [],
        [helper.make_tensor_value_info("inner", TensorProto.FLOAT, ["N", 6])],
    )
    first = ("MatMul", ["x", "w"]) if layer_outside else ("Relu", ["x"])
    nodes = [
        helper.make_node(*first, ["h"], "first"),
        helper.make_node("ReduceSum", ["h"], ["sum"], "sum", keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"], "greater"),
        helper.make_node("If", ["positive"], ["y"], "if", then_branch=branch, else_branch=branch),
    ]
    constants = {"w": weights(6, 6), "zero": np.float32(0)}
    takes = {"x": (TensorProto.FLOAT, [1, 6])}
    return network(path, nodes, constants, takes, {"y": [1, 6]})


def test_layers_inside_an_if_are_named(tmp_path, cache_root):
    with pytest.raises(ModelError, match=r"its layers are inside If, .* takes an export without"):
        inspect(write_if(tmp_path / "around.onnx", layer_outside=False), cache_root)
    found = inspect(write_if(tmp_path / "behind.onnx", layer_outside=True), cache_root)
    assert found.layers == 1
    assert "an export without If, to quantize the 2 layers inside it" in needs(found)
