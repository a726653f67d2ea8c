"""Networks that are unlike a picture classifier: made here, quantized as a run does it."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from resnet8ptq.backends.kernels import saturates
from resnet8ptq.core import machine
from resnet8ptq.core.errors import DataError, ModelError, QuantizationError
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.preprocessing import Preprocessing
from resnet8ptq.deploy import example
from resnet8ptq.experiment.network_and_data import fit_data
from resnet8ptq.models import model
from resnet8ptq.models.summary import requirements, summarize
from tests.helpers.assembling import assemble
from tests.helpers.calling import call, call_beside
from tests.helpers.configs import make_config
from tests.helpers.factories import THREADS, quantize_network, quantizer_of

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
    kinds = {name: kind for name, (kind, _) in takes.items()}
    sizes = {name: size for name, (_, size) in takes.items()}
    onnx.save(assemble(nodes, sizes, gives, constants, kinds=kinds), path)
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
        fp32 = model.load_network(settings, data, cache_root)
        split = fit_data(data, fp32).test
        quantizer = quantizer_of(config)
        operators = {node.op_type for node in onnx.load(fp32.onnx_path).graph.node}
        if saturates(quantizer.resolve(), operators, machine.cpu()[1]):
            quantizer = quantizer_of(make_config("data=arrays", *overrides, "reduce_range=true"))
        artifact = quantize_network(quantizer, fp32, split, tmp_path)
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
    assert [item.name for item in (*proto.graph.input, *proto.graph.output)] == ["x", "y"]


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
    assert sum(item.data_type == TensorProto.INT8 for item in proto.graph.initializer) >= 2


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
    result = summarize(path, cache_root)
    assert (result.treatment("LSTM", "onnx"), result.treatment("LSTM", "torch")) == (
        "dynamic",
        "float",
    )
    assert "method=dynamic with backend=onnx, to quantize LSTM" in requirements(result)


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
    with pytest.raises(
        ModelError, match=r"its layers are inside If, .* expected an export without"
    ):
        summarize(write_if(tmp_path / "around.onnx", layer_outside=False), cache_root)
    result = summarize(write_if(tmp_path / "behind.onnx", layer_outside=True), cache_root)
    assert result.layers == 1
    assert "an export without If, to quantize the 2 layers inside it" in requirements(result)


# Inputs of integers


IDS = RANDOM.integers(0, 50, (40, 8))
FLAGS = RANDOM.integers(0, 2, (40, 8)) > 0
INTEGERS = {
    TensorProto.INT32: IDS,
    TensorProto.INT64: IDS,
    TensorProto.UINT8: IDS,
    TensorProto.INT8: IDS.astype(np.uint8),  # as a table's small integers are stored
    TensorProto.BOOL: FLAGS,
}


def write_table(path: Path, kind: int, last: str = "Identity") -> Path:
    """Look eight integers up in a table, and weigh what stands there."""
    nodes = [
        helper.make_node("Cast", ["ids"], ["wide"], "widen", to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "wide"], ["rows"], "look_up"),
        helper.make_node("ReduceMean", ["rows"], ["mean"], "mean", axes=[1], keepdims=0),
        helper.make_node("Gemm", ["mean", "w"], ["h"], "hidden"),
        helper.make_node("Relu", ["h"], ["r"], "relu"),
        helper.make_node("MatMul", ["r", "v"], ["scores"], "output"),
        helper.make_node(last, ["scores"], ["y"], "last"),
    ]
    constants = {"table": weights(50, 12), "w": weights(12, 16), "v": weights(16, 4)}
    return network(path, nodes, constants, {"ids": (kind, ["N", 8])}, {"y": ["N", 4]})


@pytest.mark.parametrize("method", ["dynamic", "static"])
@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_are_given_as_integers(quantized, tmp_path, kind, method):
    path = write_table(tmp_path / "table.onnx", kind)
    before, after, proto = quantized(path, INTEGERS[kind], f"method={method}", "dtype=int8")
    assert near(before, after)
    assert [value.type.tensor_type.elem_type for value in proto.graph.input] == [kind]


@pytest.mark.parametrize("overrides", [("method=dynamic",), ("backend=torch_pt2e",)])
def test_torch_takes_integers(quantized, tmp_path, overrides, cache_root):
    config = make_config("data=arrays", "backend=torch", *overrides)
    path = write_table(tmp_path / "table.onnx", TensorProto.INT64)
    settings = replace(config.model, name="own", path=str(path))
    data = data_of(IDS)
    fp32 = model.load_network(settings, data, cache_root)
    assert fp32.conversion.without_torch == {}
    split, quantizer = fit_data(data, fp32).test, quantizer_of(config)
    artifact = quantize_network(quantizer, fp32, split, tmp_path)
    [scores] = quantizer.load(artifact.path, THREADS).predict(split.inputs(slice(5)))
    assert scores.shape == (5, 4)


@pytest.mark.parametrize(
    ("samples", "preprocessing", "error", "says"),
    [
        (IDS.astype(np.float32), None, ModelError, "takes int32, the samples are float32; store"),
        (IDS, Preprocessing(scale=1 / 255), ModelError, "set preprocess=raw"),
        (IDS + 2**40, None, DataError, r"expected -2147483648 to 2147483647"),
    ],
)
def test_what_are_no_integers_of_the_network_is_refused(
    tmp_path, cache_root, samples, preprocessing, error, says
):
    path = write_table(tmp_path / "table.onnx", TensorProto.INT32)
    settings = replace(make_config("data=arrays").model, name="own", path=str(path))
    with pytest.raises(error, match=says):
        model.load_network(settings, data_of(samples, preprocessing), cache_root)


def test_integers_are_no_pictures_unless_the_network_takes_bytes():
    split = Split(np.zeros((4, 6, 5, 3), np.uint8), None, "made")
    assert [
        replace(split, dtype=dtype).has_pictures for dtype in ("float32", "uint8", "int32")
    ] == [*(True, True, False)]


@pytest.mark.parametrize("dtype", ["int16", "uint16"])
def test_another_type_is_named_with_those_that_are_taken(tmp_path, cache_root, dtype):
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    path = write_table(tmp_path / "table.onnx", kind)
    settings = replace(make_config("data=arrays").model, name="own", path=str(path))
    says = rf"its input \w+ is {dtype}; expected float32, float16, int8, int32"
    with pytest.raises(ModelError, match=says):
        model.load_network(settings, data_of(IDS), cache_root)


# Single numbers, and states that are the same for every sample


def test_scalars_and_states_are_filled_up(quantized, tmp_path):
    """A rate that is a number, a state of two layers, and a loss as the second output."""
    nodes = [
        helper.make_node("Cast", ["rate"], ["r"], "cast", to=TensorProto.FLOAT),
        helper.make_node("Div", ["x", "r"], ["slow"], "div"),
        helper.make_node("Gemm", ["slow", "w"], ["h"], "gemm"),
        helper.make_node("Split", ["state"], ["first", "second"], "split", axis=0),
        helper.make_node("Reshape", ["first", "row"], ["row_of_state"], "row"),
        helper.make_node("Add", ["h", "row_of_state"], ["y"], "add"),
        helper.make_node("ReduceSum", ["y"], ["loss"], "sum", keepdims=0),
    ]
    constants = {"w": weights(6, 4), "row": np.array([1, 4])}
    takes = {
        "x": (TensorProto.FLOAT, ["N", 6]),
        "rate": (TensorProto.INT64, []),
        "state": (TensorProto.FLOAT, [2, "N", 4]),
    }
    path = network(tmp_path / "state.onnx", nodes, constants, takes, {"y": ["N", 4], "loss": []})
    before, after, _ = quantized(path, FLOATS, inputs={"rate": 2, "state": 0})
    assert [item.shape for item in after] == [(1, 4), (1,)]
    np.testing.assert_allclose(before[1], before[0].sum(1), rtol=1e-5)
    np.testing.assert_allclose(before[0], FLOATS[:1] / 2 @ constants["w"], rtol=1e-4, atol=1e-5)


def test_other_inputs_are_asked_for_by_their_names(tmp_path, cache_root):
    nodes = [
        helper.make_node("Mul", ["x", "rate"], ["m"], "mul"),
        helper.make_node("MatMul", ["m", "w"], ["y"], "product"),
    ]
    takes = {"x": (TensorProto.FLOAT, ["N", 6]), "rate": (TensorProto.FLOAT, [])}
    path = network(tmp_path / "rate.onnx", nodes, {"w": weights(6, 4)}, takes, {"y": ["N", 4]})
    assert any(
        "model.inputs={rate: ...}" in line for line in requirements(summarize(path, cache_root))
    )


@pytest.mark.slow
def test_a_run_and_its_deployed_folder_take_integers(tmp_path):
    network_path = write_table(tmp_path / "table.onnx", TensorProto.INT32, "Softmax")
    np.savez(tmp_path / "ids.npz", x=RANDOM.integers(0, 50, (120, 8)).astype(np.int32))
    settings = ("method=dynamic", "dtype=int8", "threads=1", "latency.repeats=5")
    files = ("data=arrays", f"data.root={tmp_path / 'ids.npz'}", f"model.path={network_path}")
    called = call(tmp_path, *files, *settings)
    assert called.code == 0, called.err
    assert "preprocess=raw" not in called.err  # nothing is done to them
    words = (f"run_id={called.runs[0].info.run_id}", f"folder={tmp_path / 'out'}", "verify=false")
    deployed = call_beside(tmp_path, "deploy", *words)
    assert deployed.code == 0, deployed.err
    with np.load(tmp_path / "out" / "test_vectors.npz") as vectors:
        assert vectors["inputs"].dtype == np.int32
    assert "largest difference 0 " in example.run_example(sys.executable, tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert r"| input | ids | \[n, 8\] | int32 |" in text
