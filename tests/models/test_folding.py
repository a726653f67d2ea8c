"""Folding: batch normalization into layers, and its record."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, parser
from onnxruntime.quantization import shape_inference

from resnet8ptq.core.errors import ModelError
from resnet8ptq.graph.session import open_runner
from resnet8ptq.models import conversion, folding, model
from resnet8ptq.models.folding import fold_into_layers
from tests.helpers.assembling import assemble

RANDOM = np.random.default_rng(0)


def network(
    product: str, shape: tuple[int, ...], outputs: str = "float[N, A, B] y"
) -> onnx.ModelProto:
    proto = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        network (float[N, 4, 3] x) => ({outputs}) {{ p = {product}  y = Mul(p, c) }}"""
    )
    for name, sizes in {"w": (3, 4), "b": (4,), "c": shape}.items():
        values = RANDOM.normal(size=sizes).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return proto


@pytest.mark.parametrize(
    ("shape", "folds"),
    [((), True), ((1,), True), ((4,), True), ((1, 4), True), ((4, 1), False), ((4, 4), False)],
)
def test_constant_is_folded_only_along_the_channels(shape, folds):
    """A factor [4, 1] belongs to the second axis, which has as many values as channels."""
    proto = network("MatMul(x, w)", shape)
    samples = RANDOM.normal(size=(2, 4, 3)).astype(np.float32)
    [before] = open_runner(proto)(samples)
    fold_into_layers(proto.graph)
    [after] = open_runner(proto)(samples)
    assert ([node.op_type for node in proto.graph.node] == ["MatMul"]) == folds
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


def test_constant_that_adds_an_axis_is_not_folded():
    proto = network("MatMul(x, w)", (1, 1, 1, 4))
    fold_into_layers(proto.graph)
    assert [node.op_type for node in proto.graph.node] == ["MatMul", "Mul"]


@pytest.mark.parametrize(("shape", "left"), [((5,), ["MatMul"]), ((1, 5), ["MatMul", "Mul"])])
def test_constant_that_adds_an_axis_to_a_vector_is_not_folded(shape, left):
    """The output of a MatMul is a vector after a Squeeze without axes."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Mul", ["p", "c"], ["y"]),
    ]
    constants = {
        "w": RANDOM.normal(size=(4, 5)).astype(np.float32),
        "c": RANDOM.normal(size=shape).astype(np.float32),
    }
    graph = assemble(nodes, {"x": [4]}, {"y": shape}, constants).graph
    graph.value_info.append(helper.make_tensor_value_info("p", onnx.TensorProto.FLOAT, [5]))
    fold_into_layers(graph)
    assert [node.op_type for node in graph.node] == left


def test_layer_whose_output_is_returned_is_not_folded():
    proto = network("MatMul(x, w)", (4,), outputs="float[N, A, B] y, float[N, A, B] p")
    fold_into_layers(proto.graph)
    assert [node.op_type for node in proto.graph.node] == ["MatMul", "Mul"]


def test_the_effect_of_folding_is_reported(shapes_model, shapes, cache_root):
    described = shapes_model.describe()
    assert described["opset"] == "17"
    assert described["preprocess_nodes"].endswith(" -> 24")
    assert "Mul 7 -> 0" in described["preprocess_operators"]
    before, after = map(int, described["preprocess_bytes"].split(" -> "))
    assert after == shapes_model.onnx_path.stat().st_size != before
    assert not set(described) & {"model", "fold", "dtype", "backend", "calib"}
    assert replace(shapes_model, fold=False).describe() == {"opset": "17"}


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (shape_inference.onnx.shape_inference, "infer_shapes_path"),
        (shape_inference.onnxruntime, "InferenceSession"),  # quant_pre_process only logs this one
    ],
)
def test_a_graph_that_cannot_be_folded_can_be_taken_as_it_is(
    shapes_model, tmp_path, monkeypatch, owner, name
):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("odd\ngraph")

    unfolded, folded = (
        shapes_model.onnx_path.with_name(conversion.UNFOLDED),
        tmp_path / "folded.onnx",
    )
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        result = folding.fold_batch_norms(unfolded, folded)
    assert not folded.exists()
    assert result.failure is not None
    assert "odd graph" in result.failure
    failed = replace(
        shapes_model, conversion=replace(shapes_model.conversion, preprocessing=result)
    )
    with pytest.raises(ModelError, match=r"odd graph.*model\.fold=false"):
        model._report(failed)
    model._report(replace(failed, fold=False))


def test_lines_of_the_shape_inference_are_not_printed(tmp_path, monkeypatch, capsys):
    """On sizes that it cannot follow, it prints lines such as `unsupported broadcast between`."""
    proto = network("MatMul(x, w)", (4,))
    onnx.save(proto, tmp_path / "unfolded.onnx")

    def printing(*_: object, **__: object) -> None:
        print("unsupported broadcast between floor(N) N")
        onnx.save(proto, tmp_path / "folded.onnx")

    monkeypatch.setattr(shape_inference, "quant_pre_process", printing)
    result = folding.fold_batch_norms(tmp_path / "unfolded.onnx", tmp_path / "folded.onnx")
    assert result.failure is None
    assert capsys.readouterr().out == ""


def change(step: str, index: int, shape: int | tuple[int, ...], channels: int = 5):
    """Return the constants and the inputs of a node that changes `y{index}` by channel."""
    if step != "BatchNormalization":
        values = RANDOM.normal(size=shape).astype(np.float32)
        return {f"c{index}": values}, [f"y{index}", f"c{index}"]
    names = [f"{part}{index}" for part in ("scale", "bias", "mean", "variance")]
    constants = {name: RANDOM.uniform(0.5, 2, channels).astype(np.float32) for name in names}
    return constants, [f"y{index}", *names]


@settings(max_examples=30)
@given(
    steps=st.lists(st.sampled_from(["Mul", "Add", "BatchNormalization"]), min_size=1, max_size=3),
    operator=st.sampled_from(["Gemm", "MatMul"]),
    transposed=st.booleans(),
    whole=st.booleans(),
    branches=st.booleans(),
)
def test_what_follows_a_dense_layer_is_folded_into_it(steps, operator, transposed, whole, branches):
    shape = (5, 4) if operator == "Gemm" and transposed else (4, 5)
    constants = {"w": RANDOM.normal(size=shape).astype(np.float32)}
    kind = {"transB": int(transposed)} if operator == "Gemm" else {}
    nodes = [helper.make_node(operator, ["x", "w"], ["y0"], name="layer", **kind)]
    for index, step in enumerate(steps):
        values, inputs = change(step, index, 1 if whole else (1, 5))
        inputs = inputs[::-1] if whole and step != "BatchNormalization" else inputs
        nodes.append(helper.make_node(step, inputs, [f"y{index + 1}"]))
        constants |= values
    outputs = [f"y{len(steps)}", *(["y0"] if branches else [])]
    proto = assemble(nodes, {"x": [3, 4]}, {name: [3, 5] for name in outputs}, constants)
    samples = RANDOM.normal(size=(3, 4)).astype(np.float32)
    expected = open_runner(proto)(samples)
    foldable = len(steps)
    if operator == "MatMul":  # it has no bias
        foldable = [step == "Mul" for step in [*steps, "Add"]].index(False)
    foldable = 0 if branches else foldable
    folding.fold_into_layers(proto.graph)
    assert len(proto.graph.node) == 1 + len(steps) - foldable
    onnx.checker.check_model(proto, full_check=True)
    for result, wanted in zip(open_runner(proto)(samples), expected, strict=True):
        assert np.allclose(result, wanted, atol=1e-5)


def test_a_graph_with_one_empty_optional_input_is_folded():
    constants = {"low": np.float32(0), "c": RANDOM.normal(size=(1, 4)).astype(np.float32)}
    nodes = [
        helper.make_node("Clip", ["x", "low", ""], ["y0"]),
        helper.make_node("Mul", ["y0", "c"], ["y1"]),
    ]
    graph = assemble(nodes, {"x": [3, 4]}, {"y1": [3, 4]}, constants).graph
    folding.fold_into_layers(graph)
    assert [node.op_type for node in graph.node] == ["Clip", "Mul"]


@settings(max_examples=30)
@given(
    steps=st.lists(st.sampled_from(["Mul", "Add", "BatchNormalization"]), min_size=1, max_size=3),
    shape=st.sampled_from([(1, 5, 1, 1), (5, 1, 1), (1,), ()]),
    bias=st.booleans(),
)
def test_what_follows_a_transposed_convolution_is_folded_into_it(steps, shape, bias):
    """As Keras and PaddlePaddle export their decoders."""
    constants = {"w": RANDOM.normal(size=(4, 5, 2, 2)).astype(np.float32)}
    inputs = ["x", "w"]
    if bias:
        constants["b"] = RANDOM.normal(size=5).astype(np.float32)
        inputs.append("b")
    nodes = [helper.make_node("ConvTranspose", inputs, ["y0"], name="layer", strides=[2, 2])]
    for index, step in enumerate(steps):
        values, inputs = change(step, index, shape)
        nodes.append(helper.make_node(step, inputs, [f"y{index + 1}"]))
        constants |= values
    proto = assemble(nodes, {"x": [2, 4, 3, 3]}, {f"y{len(steps)}": [2, 5, 6, 6]}, constants)
    samples = RANDOM.normal(size=(2, 4, 3, 3)).astype(np.float32)
    [expected] = open_runner(proto)(samples)
    folding.fold_into_layers(proto.graph)
    assert [node.op_type for node in proto.graph.node] == ["ConvTranspose"]
    onnx.checker.check_model(proto, full_check=True)
    [result] = open_runner(proto)(samples)
    assert np.allclose(result, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "group"), [((6,), 1), ((1, 1, 6, 1), 1), ((1, 1, 1, 6, 1, 1), 1), ((6, 1, 1), 2)]
)
def test_a_constant_of_another_axis_stays_behind_a_transposed_convolution(shape, group):
    weights = RANDOM.normal(size=(4, 6 // group, 2, 2)).astype(np.float32)
    constants = {"w": weights, "c": RANDOM.normal(size=shape).astype(np.float32)}
    nodes = [
        helper.make_node("ConvTranspose", ["x", "w"], ["y0"], strides=[2, 2], group=group),
        helper.make_node("Add", ["y0", "c"], ["y1"]),
    ]
    outputs = np.broadcast_shapes((2, 6, 6, 6), shape)
    graph = assemble(nodes, {"x": [2, 4, 3, 3]}, {"y1": outputs}, constants).graph
    folding.fold_into_layers(graph)
    assert [node.op_type for node in graph.node] == ["ConvTranspose", "Add"]
