"""TFLite files of networks that TensorFlow's converter does not take."""

import os
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import onnx
import pytest
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.schema_py_generated import TensorType

from resnet8ptq.backends.tflite import (
    contents,
    correspondence,
    edge_quantizer,
    environment,
    onnx_converter,
    predictor,
)
from resnet8ptq.core.errors import QuantizationError, UnsupportedError
from resnet8ptq.data.dataset import Dataset
from resnet8ptq.graph.session import open_runner
from resnet8ptq.models.contract import Contract, Tensor
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.models.sources.formats import format_name
from tests.helpers import onnx2tf, transformers
from tests.helpers.configs import make_config
from tests.helpers.factories import quantize_network, quantizer_of
from tests.helpers.quantized import Quantize

PIXELS = Tensor("pixels", (3, 8, 6), "float32")


@pytest.fixture(scope="session")
def converter(cache_root: Path) -> None:
    """The environment of onnx2tf in the tests' cache, if the user has one or asks for it."""
    if not onnx2tf.link(cache_root):
        pytest.skip(f"onnx2tf is not installed in {onnx2tf.USERS_CACHE}; {onnx2tf.ASKS}=1 does")


@pytest.fixture
def batch(shapes: Dataset) -> np.ndarray:
    return next(iter(shapes.test.batches(20)))


@pytest.fixture
def content(quantize: Quantize) -> bytes:
    """The float file of the embedded network, as another converter wrote it."""
    return quantize("backend=tflite", "dtype=fp32").artifact.path.read_bytes()


# The converter's environment


def test_without_a_suitable_python_it_is_unsupported(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "VERSIONS", ("3.0",))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match=r"needs Python 3\.0 with venv, or uv; got neither"):
        environment.find_interpreter(tmp_path)


def test_a_failed_installation_leaves_nothing(tmp_path, monkeypatch):
    """Its Python says that it is 3.0, makes a folder and then finds no network."""
    fake = tmp_path / "python3.0"
    fake.write_text(
        '#!/bin/sh\ncase "$*" in *ensurepip*) echo 3.0;;'
        ' *) mkdir -p "$4"; echo "no network" >&2; exit 1;; esac\n'
    )
    fake.chmod(0o755)
    monkeypatch.setattr(environment, "VERSIONS", ("3.0",))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(UnsupportedError, match=r"cannot be installed \(no network\)"):
        environment.find_interpreter(tmp_path / "cache")
    left = [path.name for path in (tmp_path / "cache" / "environments").iterdir()]
    assert all(name.endswith(".lock") for name in left)


# Refusals


@pytest.mark.parametrize(
    ("contract", "reason"),
    [
        (Contract((PIXELS, replace(PIXELS, name="size")), ()), r"2 inputs \(pixels, size\)"),
        (Contract((replace(PIXELS, shape=(None,)),), ()), r"pixels \[\?\] float32 with a free"),
        (Contract((replace(PIXELS, dtype="int64"),), ()), "got int64 for input pixels"),
        (Contract((PIXELS,), (), batch=4), "got 4 samples for input pixels"),
    ],
)
def test_inputs_that_a_file_cannot_have(contract, reason, shapes_model):
    record = replace(shapes_model.conversion, contract=contract)
    quantizer = quantizer_of(make_config("backend=tflite", "backend.flow=onnx2tf"))
    with pytest.raises(UnsupportedError, match=f"^backend=tflite: .*{reason}.*try backend=onnx$"):
        quantizer.fit(replace(shapes_model, conversion=record))


@pytest.mark.parametrize("override", ["dtype=w4a8", "method=dynamic", "float_output=true"])
def test_settings_that_it_lacks(override):
    config = make_config("backend=tflite", "backend.flow=onnx2tf", override)
    with pytest.raises(UnsupportedError, match=r"onnx2tf|8 bits"):
        quantizer_of(config).resolve()


@pytest.mark.parametrize(
    ("name", "dtype", "flow"),
    [
        ("a.onnx", "int8", "onnx2tf"),
        ("a.tflite", "int8", "onnx2tf"),
        ("a.tflite", "fp32", "convert"),  # as it is
        ("a.h5", "int8", "convert"),
    ],
)
def test_the_network_decides_who_converts(name, dtype, flow, tmp_path):
    magic = {".h5": b"\x89HDF\r\n\x1a\n", ".tflite": b"\0\0\0\0TFL3"}
    path = tmp_path / name
    path.write_bytes(magic.get(path.suffix, b"onnx"))
    config = make_config("data=shapes", "backend=tflite", f"dtype={dtype}")
    complete = resolve_name(config.backend.descriptor.complete)
    result = complete(config.backend, format_name(path), None, is_float=config.dtype.is_float)
    assert result.flow == flow


# The graph that onnx2tf gets


def test_prepared_graphs_compute_the_same():
    """Layers of matrices become Gemms, with their biases; products of attention stay."""
    proto = transformers.build()
    onnx.checker.check_model(proto)
    sample = np.random.default_rng(0).random((1, 3, 8, 6), np.float32)
    expected = open_runner(proto)(sample)
    prepared = onnx_converter.prepare_graph(proto)
    kinds = [node.op_type for node in prepared.graph.node]
    assert (kinds.count("Gemm"), kinds.count("MatMul")) == (8, 2)
    [up] = [node for node in prepared.graph.node if "up.w" in node.input]
    assert list(up.input[2:]) == ["up.b"]
    for got, wanted in zip(open_runner(prepared)(sample), expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5)


# Tensors of the file and of the graph


def test_tensors_are_matched_by_their_values(content, shapes_model, batch):
    names = correspondence.find_onnx_names(content, shapes_model.onnx_path, batch[:2])
    model, graph = contents.read_model(content), onnx.load(shapes_model.onnx_path).graph
    [taken], [value] = model.subgraphs[0].inputs, model.subgraphs[0].outputs
    assert (names[taken][0], names[value][-1]) == (graph.input[0].name, graph.output[0].name)
    made = [int(operator.outputs[0]) for code, operator in contents.operators(model)]
    kinds = {name: node.op_type for node in graph.node for name in node.output}
    codes = {"CONV_2D": ("Conv", "Relu"), "ADD": ("Add", "Relu"), "FULLY_CONNECTED": ("Gemm",)}
    for index, (code, _) in zip(made, contents.operators(model), strict=True):
        if code in codes:
            assert kinds[names[index][-1]] in codes[code]
    other = correspondence.find_onnx_names(content, shapes_model.onnx_path, batch[:1] * 0 + 7)
    assert other.keys() == names.keys()  # whatever the samples


def quantize_all(
    content: bytes, model: Fp32Model, batch: np.ndarray, skipped: list[str], **options: object
) -> bytes:
    """Quantize with ranges from -1 to 3 everywhere."""
    file, graph = contents.read_model(content), onnx.load(model.onnx_path).graph
    names = correspondence.find_onnx_names(content, model.onnx_path, batch[:2])
    operators = edge_quantizer.find_quantized(file, names, graph, skipped)
    ranges = dict.fromkeys(names, (-1.0, 3.0))
    scheme = edge_quantizer.Scheme(per_channel=True, **options)
    return edge_quantizer.quantize(file, operators, ranges, scheme)


def test_ranges_and_float_layers_are_those_asked_for(content, shapes_model, batch):
    nodes = [n.name for n in onnx.load(shapes_model.onnx_path).graph.node if n.op_type == "Conv"]
    written = contents.read_model(quantize_all(content, shapes_model, batch, nodes[:1]))
    layers = list(contents.layers(written))
    assert [layer.weights.quantization.scale is not None for layer in layers[:2]] == [False, True]
    for layer in layers[1:]:
        assert layer.output.quantization.scale == np.float32(4 / 255)
        assert len(layer.weights.quantization.scale) == layer.weights.shape[0]


@pytest.mark.parametrize("integer", [False, True])
def test_its_inputs_and_outputs_are_as_asked(integer, content, shapes_model, batch):
    written = quantize_all(content, shapes_model, batch, [], integer_io=integer)
    interpreter = predictor.open_interpreter(written, 1)
    ends = interpreter.get_input_details() + interpreter.get_output_details()
    assert {end["dtype"] for end in ends} == {np.int8 if integer else np.float32}


def test_16_bits_have_no_zero_point(content, shapes_model, batch):
    written = quantize_all(content, shapes_model, batch, [], symmetric=True, wide=True)
    for layer in contents.layers(contents.read_model(written)):
        assert (layer.weights.type, layer.output.type) == (TensorType.INT8, TensorType.INT16)
        assert layer.output.quantization.zeroPoint == [0]
    interpreter = predictor.open_interpreter(written, 1)
    assert {end["dtype"] for end in interpreter.get_input_details()} == {np.int16}


def replace_addition(model: Any, kind: int, number: bool) -> Any:
    """Return the first addition of a file, turned into another operator.

    Args:
        number: whether its second input becomes a single number.
    """
    added = next(operator for code, operator in contents.operators(model) if code == "ADD")
    model.operatorCodes.append(schema.OperatorCodeT(kind, builtinCode=kind, version=1))
    added.opcodeIndex, added.builtinOptionsType = len(model.operatorCodes) - 1, 0
    if number:
        model.buffers.append(schema.BufferT(data=np.zeros(1, np.float32).view(np.uint8)))
        constant = schema.TensorT(shape=[1], buffer=len(model.buffers) - 1, name=b"number")
        model.subgraphs[0].tensors.append(constant)
        added.inputs = [added.inputs[0], len(model.subgraphs[0].tensors) - 1]
    return added


@pytest.mark.parametrize("kind", ["MAXIMUM", "DIV"])
def test_operators_whose_integers_fail_stay_in_float(kind, content, shapes_model, batch):
    """ai-edge-quantizer 0.10 gives a single number as many axes as the other input has, and fails.

    TFLite's division of integers fails if a divisor rounds to 0.
    """
    names = correspondence.find_onnx_names(content, shapes_model.onnx_path, batch[:2])
    model, graph = contents.read_model(content), onnx.load(shapes_model.onnx_path).graph
    builtin = getattr(schema.BuiltinOperator, kind)
    changed = replace_addition(model, builtin, number=kind == "MAXIMUM")
    operators = edge_quantizer.find_quantized(model, names, graph, [])
    settings = dict.fromkeys(names, (-1.0, 3.0)), edge_quantizer.Scheme(per_channel=True)
    written = contents.read_model(edge_quantizer.quantize(model, operators, *settings))
    assert all(layer.weights.type == TensorType.INT8 for layer in contents.layers(written))
    outputs = {code: operator.outputs[0] for code, operator in contents.operators(written)}
    assert written.subgraphs[0].tensors[outputs[kind]].type == TensorType.FLOAT32
    if kind == "MAXIMUM":
        with pytest.raises(UnsupportedError, match="ai-edge-quantizer cannot quantize the network"):
            edge_quantizer.quantize(model, [*operators, changed], *settings)


def test_the_parts_of_a_split_have_the_range_of_its_values():
    operator = schema.OperatorT(inputs=[0, 1], outputs=[2, 3])  # axis and values
    graph = schema.SubGraphT(operators=[operator])
    model = schema.ModelT(subgraphs=[graph], operatorCodes=[])
    operator.opcodeIndex = contents.add_code(model, schema.BuiltinOperator.SPLIT, 2)
    reader = schema.OperatorT(inputs=[3], outputs=[4])
    assert 1 in edge_quantizer.tensors_around(model, [reader])
    limits = (-1.0, 2.0)
    assert edge_quantizer._spread(model, {1: limits}) == dict.fromkeys((1, 2, 3), limits)


def test_nothing_to_quantize_is_an_error(content, shapes_model, batch):
    every = [node.name for node in onnx.load(shapes_model.onnx_path).graph.node]
    with pytest.raises(QuantizationError, match="no operator"):
        quantize_all(content, shapes_model, batch, every)


def test_a_file_of_one_sample_takes_batches(content, batch):
    model = contents.read_model(content)
    for tensor in model.subgraphs[0].tensors:
        tensor.shapeSignature = None
    free, fixed = (predictor.open_run(file, 1) for file in (content, contents.write_model(model)))
    np.testing.assert_allclose(fixed(batch)[0], free(batch)[0], atol=1e-6)


def test_an_output_is_transposed(content, batch):
    model = contents.read_model(content)
    contents.transpose_output(model, 0, [1, 0])
    plain, turned = (predictor.open_run(f, 1) for f in (content, contents.write_model(model)))
    np.testing.assert_array_equal(turned(batch[:1])[0], plain(batch[:1])[0].T)


# With onnx2tf


def test_a_transformer_with_channels_first(converter, shapes_model, shapes, tmp_path):
    """The file takes and returns what the network does; its layers of weights are in 8 bits."""
    path = tmp_path / "folded.onnx"
    onnx.save(transformers.build(), path)
    pixels = np.random.default_rng(0).random((24, 3, 8, 6), np.float32)
    samples = replace(shapes.train.take(np.arange(24)), stored=pixels)
    contract = Contract((PIXELS,), (Tensor("head", (3,), "float32"),))
    record = replace(shapes_model.conversion, contract=contract, final="logits")
    model = replace(shapes_model, onnx_path=path, conversion=record)
    expected = open_runner(str(path))(pixels)[0]
    words = ("backend=tflite", "backend.flow=onnx2tf", "per_channel=true")
    for dtype, tolerance in (("fp32", 1e-5), ("int8", 0.1)):
        quantizer = quantizer_of(make_config("data=shapes", *words, f"dtype={dtype}"))
        artifact = quantize_network(quantizer, model, samples, tmp_path)
        [logits] = quantizer.load(artifact.path, 1).predict(pixels)
        np.testing.assert_allclose(logits, expected, atol=tolerance * np.abs(expected).max())
    assert artifact.quantized_layers == 8
    assert quantizer.count_kernels(artifact.path) == (8, 2)  # attention's products in float
