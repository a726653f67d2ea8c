"""Files of other programs: which are read, which are refused, and what they return."""

import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from ai_edge_litert import schema_py_generated as schema
from onnx import TensorProto, helper, numpy_helper, parser

from resnet8ptq.backends.contract import Predictor, Quantizer
from resnet8ptq.backends.file import (
    onnx_file,
    openvino_file,
    predictor,
    program_file,
    reading,
    tflite_file,
)
from resnet8ptq.backends.file.contents import Contents, Layer, Port, rounded
from resnet8ptq.backends.file.matching import match_inputs, match_outputs
from resnet8ptq.backends.onnx.options import OnnxConfig
from resnet8ptq.backends.openvino import archive
from resnet8ptq.backends.openvino.library import core, library
from resnet8ptq.backends.tflite.options import TfliteConfig
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import code, files
from resnet8ptq.core.descriptor import find_readers
from resnet8ptq.core.errors import ConfigError, ModelError
from resnet8ptq.evaluation.evaluator import baseline_config
from resnet8ptq.exploration.tensors.comparing import compare_file
from resnet8ptq.graph.qdq import rounded_activations
from resnet8ptq.models.contract import Tensor
from resnet8ptq.models.gates.onnx import read_quantized
from resnet8ptq.models.model import Fp32Model
from tests.helpers.configs import make_config
from tests.helpers.factories import THREADS, quantize_network, quantizer_of
from tests.helpers.frameworks import needs
from tests.helpers.quantized import Probabilities, Quantize

IMAGES = 50
ops = torch.ops.quantized_decomposed


def contents_of(path: Path, cache_root: Path) -> Contents:
    return reading.admit(path, cache_root).contents


def fitted(asked: RunConfig, fp32: Fp32Model) -> Quantizer:
    return quantizer_of(replace(asked, **quantizer_of(asked).fit(fp32)))


def judged(path: Path, fp32: Fp32Model, folder: Path, quantize: Quantize) -> Probabilities:
    """Return what a file predicts, copied and loaded as a run does."""
    quantizer = fitted(make_config("data=shapes", "backend=file", f"backend.path='{path}'"), fp32)
    data = quantize("backend=onnx", "dtype=int8").data
    artifact = quantize_network(quantizer, fp32, data.train, folder)
    loaded = quantizer.load(artifact.path, THREADS)
    return np.asarray(loaded.predict(data.test.inputs(slice(IMAGES)))[0])


# Formats


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "framework", "activations"),
    [
        ("tflite", "TFLite", "int8"),
        ("executorch", "ExecuTorch", "int8"),
        ("torch_pt2e", "exported program", "int8"),
    ],
)
def test_predicts_what_its_framework_predicts(
    quantize, shapes_model, tmp_path, cache_root, backend, framework, activations
):
    cell = quantize(f"backend={backend}", "dtype=int8")
    contents = contents_of(cell.artifact.path, cache_root)
    assert contents.format.startswith(framework)
    assert (contents.weight_dtype, contents.activation_dtype) == ("int8", activations)
    assert len(contents.quantized) == len(contents.layers) == 10
    got = judged(cell.artifact.path, shapes_model, tmp_path, quantize)
    np.testing.assert_allclose(got, cell.predict(IMAGES, IMAGES), atol=1e-6)
    size = reading.admit(cell.artifact.path, cache_root).path.stat().st_size
    assert size == pytest.approx(cell.artifact.size_bytes, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("backend=onnx", "dtype=u8s8"),
        ("backend=onnx", "dtype=int8", "format=qoperator"),
        ("backend=tflite", "dtype=int8"),
        pytest.param(("backend=openvino_nncf", "dtype=int8"), marks=needs("openvino_nncf")),
        ("backend=torch_pt2e", "dtype=int8"),
        ("backend=torch_pt2e", "dtype=w8", "method=weight_only"),
        ("backend=torch_pt2e", "dtype=fp16"),
        ("backend=onnx", "dtype=fp16"),
        ("backend=onnx", "method=weight_only", "dtype=w8", "weight_only.block_size=null"),
    ],
)
def test_the_tensors_of_a_file_are_those_of_the_network(quantize, shapes_model, cache_root, words):
    """Each format gives its tensors in an order and layout of its own."""
    cell = quantize(*words)
    admitted = reading.admit(cell.artifact.path, cache_root)
    ports = shapes_model.contract.inputs, admitted.contents.inputs
    matched = match_inputs(*ports, None, cell.artifact.path)
    compared = compare_file(shapes_model, admitted, matched, cell.data.train, THREADS)
    assert compared is not None
    named = [tensor.operator for tensor in compared.tensors]
    assert named.count("Conv") + named.count("Relu") >= 9
    assert compared.costliest.own_db > 10
    assert compared.first_lost is None
    if "format=qoperator" not in words:  # whose weights are not read
        assert len(compared.weights) >= 9  # NNCF's dense layer is matched behind its softmax
        assert min(weight.spread.sqnr_db for weight in compared.weights) > 25


class DynamicProduct(torch.nn.Module):
    """A matrix product whose input is rounded to a range that it measures, with int8 weights."""

    def __init__(self):
        super().__init__()
        self.register_buffer("levels", torch.arange(12, dtype=torch.int8).reshape(4, 3))

    def forward(self, x):
        limits = (-128, 127)
        grid = (*ops.choose_qparams.tensor(x, *limits, 1e-6, torch.int8), *limits, torch.int8)
        x = ops.dequantize_per_tensor.tensor(ops.quantize_per_tensor.tensor(x, *grid), *grid)
        weights = ops.dequantize_per_tensor(self.levels, 0.5, 0, *limits, torch.int8)
        return torch.nn.functional.linear(x, weights)


class RoundedProduct(torch.nn.Module):
    """A product of two rounded tensors that both depend on the input."""

    def forward(self, x):
        grid = (0.5, 0, -128, 127, torch.int8)
        left = ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *grid), *grid)
        right = ops.dequantize_per_tensor(ops.quantize_per_tensor(-x, *grid), *grid)
        return left @ right


def test_a_product_of_two_computed_tensors_has_no_weights():
    program = torch.export.export(RoundedProduct(), (torch.ones(3, 3),))
    content = io.BytesIO()
    torch.export.save(program, content)
    tensors = program_file.open_tensors(content.getvalue(), THREADS)
    assert [tensor.weights for tensor in tensors.inner] == [None] * 3


def test_a_program_that_measures_ranges_while_it_runs_is_dynamic(tmp_path, cache_root):
    program = torch.export.export(DynamicProduct(), (torch.ones(2, 3),))
    torch.export.save(program, tmp_path / "own.pt2")
    admitted = reading.admit(tmp_path / "own.pt2", cache_root)
    contents = admitted.contents
    assert (contents.weight_dtype, contents.activation_dtype) == ("int8", "int8")
    assert contents.dynamic
    [product] = admitted.open_tensors(THREADS).inner
    np.testing.assert_array_equal(product.weights, np.arange(12).reshape(4, 3) / 2)


def test_layers_of_inner_graphs_are_among_the_layers(tmp_path, cache_root):
    """A network inside a branch has its layers there."""
    proto = parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17]>
        inside (float[n, 2] x) => (float[n, 2] y)
        <bool yes = {1}, int8[2, 2] levels = {1, 2, 3, 4}, float scale = {0.5}> {
            y = If (yes) <
                then_branch = one () => (float[n, 2] a)
                    { weights = DequantizeLinear(levels, scale) a = MatMul(x, weights) },
                else_branch = other () => (float[n, 2] b) { b = Identity(x) }
            >
        }""")
    onnx.save(proto, tmp_path / "inside.onnx")
    contents = contents_of(tmp_path / "inside.onnx", cache_root)
    assert [layer.weights for layer in contents.quantized] == ["int8"]


def test_the_second_factor_of_a_product_has_not_the_scale_of_the_first():
    proto = parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17]>
        product (uint8[n, 2] a, uint8[2, 2] b) => (uint8[n, 2] y)
        <float first = {0.5}, float second = {0.25}, float third = {1.0}, uint8 zero = {0}> {
            y = QLinearMatMul(a, first, zero, b, second, zero, third, zero)
        }""")
    contents = onnx_file.read(proto.SerializeToString(), Path("product.onnx"))
    assert [port.scale for port in contents.inputs] == [0.5, None]


@pytest.mark.parametrize(
    ("kind", "rounding", "levels"),
    [("int8", "", "x"), ("float", "q = QuantizeLinear(x, scale, zero)", "q")],
)
def test_levels_without_a_zero_point_have_the_dtype_of_their_tensor(kind, rounding, levels):
    proto = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 17]>
        signed ({kind}[n, 2] x) => (float[n, 2] y)
        <int8[2, 2] w = {{1, 2, 3, 4}}, float scale = {{0.5}}, int8 zero = {{0}}> {{
            {rounding}
            data = DequantizeLinear({levels}, scale)
            weights = DequantizeLinear(w, scale)
            y = MatMul(data, weights)
        }}""")
    [layer] = onnx_file.read(proto.SerializeToString(), Path("signed.onnx")).layers
    assert layer.activations == "int8"


@pytest.mark.parametrize(
    ("weights", "activations"),
    [("w = Cast<to = 1>(h)", "float32"), ("w = Transpose(h)", "float16")],
)
def test_weights_in_float16_may_become_float32_before_the_layer(weights, activations):
    kind = activations.removesuffix("32")
    proto = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 17]>
        half ({kind}[n, 2] x) => ({kind}[n, 2] y) <float16[2, 2] h = {{1, 2, 3, 4}}> {{
            {weights}
            y = MatMul(x, w)
        }}""")
    [layer] = onnx_file.read(proto.SerializeToString(), Path("half.onnx")).layers
    assert (layer.weights, layer.activations) == ("float16", activations)


@needs("openvino")
@pytest.mark.parametrize("activations", ["float32", "float16"])
def test_weights_in_float16_may_become_float32_in_openvino(tmp_path, activations):
    operators = library().opset13
    data = operators.parameter([-1, 2], np.dtype(activations), name="x")
    weights = operators.constant(np.float16([[1, 2], [3, 4]]))
    if activations == "float32":
        weights = operators.convert(weights, "f32")
    product = operators.matmul(data, weights, False, False)
    path = tmp_path / "half.xml"
    library().save_model(library().Model([product], [data]), path, compress_to_fp16=False)
    [layer] = openvino_file.read(openvino_file.fetch(path), path).layers
    assert (layer.weights, layer.activations) == ("float16", activations)


def test_quantize_linear_without_a_zero_point_names_its_dtype(tmp_path, cache_root):
    """Since opset 21 an attribute may name the dtype; without it, it is uint8."""
    proto = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        signed (float[n, 2] x) => (float[n, 2] y)
        <int8[2, 2] levels = {1, 2, 3, 4}, float scale = {0.5}> {
            rounded = QuantizeLinear <output_dtype = 3> (x, scale)
            data = DequantizeLinear(rounded, scale)
            weights = DequantizeLinear(levels, scale)
            y = MatMul(data, weights)
        }""")
    onnx.save(proto, tmp_path / "signed.onnx")
    contents = contents_of(tmp_path / "signed.onnx", cache_root)
    assert contents.activation_dtype == "int8"
    [port] = contents.inputs
    assert (port.low, port.high) == (-64.0, 63.5)


def test_logits_behind_an_integer_softmax_are_floats(quantize, shapes_model, tmp_path):
    cell = quantize("backend=tflite", "dtype=int8")
    asked = make_config("data=shapes", "backend=file", f"backend.path={cell.artifact.path}")
    quantizer = fitted(asked, shapes_model)
    batch = cell.data.test.inputs(slice(IMAGES))
    got = quantizer.load(cell.artifact.path, THREADS).logits(batch)
    np.testing.assert_allclose(got, cell.predictor.logits(batch), atol=1e-5)


@needs("openvino")
def test_openvinos_two_files_become_one(quantize, shapes_model, tmp_path, cache_root):
    cell = quantize("backend=onnx", "dtype=u8s8")
    graph, path = core().read_model(str(cell.artifact.path)), tmp_path / "own.xml"
    library().save_model(graph, path, compress_to_fp16=False)
    assert contents_of(path, cache_root).weight_dtype == "int8"
    folder = tmp_path / "run"
    folder.mkdir()
    got = judged(path, shapes_model, folder, quantize)
    assert [file.name for file in folder.iterdir()] == ["model.zip"]
    same = (got.argmax(1) == cell.predict(IMAGES, IMAGES).argmax(1)).mean()
    assert same > 0.95
    path.with_suffix(".bin").unlink()
    with pytest.raises(ConfigError, match=r"its weights are not in own\.bin"):
        reading.admit(path, cache_root)


@pytest.mark.parametrize(
    ("settings", "weights", "execution", "dynamic"),
    [
        (["method=dynamic", "dtype=uint8"], "uint8", "integer", True),
        (["format=qoperator"], "int8", "integer", False),
        (["method=weight_only", "dtype=w4"], "int4", "weights only, computed in float", False),
        (
            ["method=weight_only", "dtype=w8", "weight_only.block_size=null"],
            "int8",
            "weights only, computed in float",
            False,
        ),
    ],
)
def test_kinds_of_onnx_files(
    quantize, shapes_model, cache_root, settings, weights, execution, dynamic
):
    cell = quantize("backend=onnx", *settings)
    contents = contents_of(cell.artifact.path, cache_root)
    assert (contents.weight_dtype, contents.execution) == (weights, execution)
    asked = make_config("data=shapes", "backend=file", f"backend.path={cell.artifact.path}")
    method = fitted(asked, shapes_model).config.method
    assert (method == "dynamic") is dynamic


# Refusals


def small(weights: str = "own.bin", domain: str = "") -> onnx.ModelProto:
    """Return a layer with 8-bit weights in a file beside it."""
    levels = TensorProto(name="levels", dims=[4, 2], data_type=TensorProto.INT8)
    levels.data_location = TensorProto.EXTERNAL
    levels.external_data.add(key="location", value=weights)
    scale = numpy_helper.from_array(np.float32(0.5), "scale")
    nodes = [
        helper.make_node("DequantizeLinear", ["levels", "scale"], ["weights"]),
        helper.make_node("MatMul", ["x", "weights"], ["y"], domain=domain),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 4])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, 2])]
    graph = helper.make_graph(nodes, "small", inputs, outputs, [levels, scale])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def test_data_beside_a_file_is_read(tmp_path, cache_root):
    path = tmp_path / "small.onnx"
    path.write_bytes(small().SerializeToString())
    (tmp_path / "own.bin").write_bytes(bytes(range(8)))
    [result] = reading.admit(path, cache_root).open_run(1)([np.ones((1, 4), np.float32)])
    np.testing.assert_array_equal(result, [[(0 + 2 + 4 + 6) / 2, (1 + 3 + 5 + 7) / 2]])


@pytest.mark.parametrize("name", ["../own.bin", "/etc/hostname", "link.bin", ""])
def test_data_elsewhere_is_not_read(tmp_path, cache_root, name):
    path = tmp_path / "small.onnx"
    path.write_bytes(small(name).SerializeToString())
    (tmp_path / "link.bin").symlink_to("/etc/hostname")
    with pytest.raises(ConfigError, match=r"^backend\.path: .*expected files beside the model"):
        reading.admit(path, cache_root)


def test_data_that_the_hash_of_the_file_misses_is_not_read(tmp_path, cache_root):
    """The fields of an entry in another order are the same message."""
    path = tmp_path / "small.onnx"
    entry = small().graph.initializer[0].external_data[0]
    key, value = b"\n\x08location", b"\x12\x07own.bin"
    assert entry.SerializeToString() == key + value
    path.write_bytes(small().SerializeToString().replace(key + value, value + key))
    assert onnx.load(path, load_external_data=False) == small()
    (tmp_path / "own.bin").write_bytes(bytes(range(8)))
    with pytest.raises(ConfigError, match=r"^backend\.path: .*'own\.bin'"):
        reading.admit(path, cache_root)


@needs("openvino")
@pytest.mark.parametrize("suffix", [".xml", ".zip"])
def test_an_onnx_file_under_openvinos_name_is_refused(tmp_path, cache_root, suffix):
    """Its operators and external data would pass by the gate of ONNX files."""
    content = small().SerializeToString()
    path = tmp_path / f"small{suffix}"
    path.write_bytes(content if suffix == ".xml" else archive.pack(content, b""))
    path.with_suffix(".bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"^backend\.path: .*root element is not <net>"):
        reading.admit(path, cache_root)


def test_an_archive_with_a_suffix_in_capitals_is_read_whole(tmp_path):
    path = tmp_path / "OWN.ZIP"
    path.write_bytes(archive.pack(b"<net>", b""))
    assert openvino_file.fetch(path) == path.read_bytes()


@pytest.mark.parametrize(
    ("activations", "execution"),
    [("float32", "weights only, computed in float"), ("int8", "simulated")],
)
def test_weights_alone_in_a_program_of_torch_are_not_simulated(activations, execution):
    layer = Layer("aten.linear.default", "linear", "int8", activations)
    assert Contents("", "", (), (), (layer,), {}, simulated=True).execution == execution


def test_the_weights_beside_openvinos_file_are_part_of_its_hash(tmp_path):
    path = tmp_path / "own.xml"
    path.write_text("<net>")
    path.with_suffix(".bin").write_bytes(b"1")
    before = reading.digest(path)
    path.with_suffix(".bin").write_bytes(b"2")
    assert reading.digest(path) != before


def test_operators_of_others_are_refused(tmp_path, cache_root):
    path = tmp_path / "small.onnx"
    path.write_bytes(small(domain="own").SerializeToString())
    with pytest.raises(ConfigError, match=r"operator 'MatMul' of domain 'own'"):
        reading.admit(path, cache_root)


@pytest.mark.parametrize(
    "nodes",
    [
        "y = Transpose(a)  a = Transpose(y)",
        """y = If (yes) <
            then_branch = one () => (float[N, 4] a) { a = Identity(b) b = Identity(a) },
            else_branch = other () => (float[N, 4] c) { c = Identity(x) }
        >""",
    ],
)
def test_a_graph_with_a_cycle_is_refused(tmp_path, cache_root, nodes):
    proto = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[N, 4] x) => (float[N, 4] y) <bool yes = {{1}}> {{ {nodes} }}""")
    onnx.save(proto, tmp_path / "cycle.onnx")
    with pytest.raises(ConfigError, match="its graph has a cycle; expected a graph without one"):
        reading.admit(tmp_path / "cycle.onnx", cache_root)


def test_a_float_network_is_no_quantized_file(shapes_model, cache_root):
    with pytest.raises(ConfigError, match=r"none of its 10 layers has integer or float16 weights"):
        reading.admit(shapes_model.onnx_path, cache_root)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("own.pt", r"TorchScript and pickles are code.*expected \.onnx"),
        ("own.txt", r"expected \.onnx \| .*\.tflite"),
        ("gone.onnx", r"not there"),
        ("damaged.onnx", r"not an ONNX model"),
        ("damaged.tflite", r"not a TFLite model"),
        ("damaged.pt2", r"not an archive"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path, cache_root, name, says):
    if name != "gone.onnx":
        (tmp_path / name).write_bytes(b"\0" * 99)
    with pytest.raises(ConfigError, match=rf"^backend\.path: .*{says}") as caught:
        reading.admit(tmp_path / name, cache_root)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".onnx", ".tflite", ".xml", ".pt2", ".pte"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", r"is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", r"git lfs pull"),
        (b"<!DOCTYPE html><html>404</html>", r"is a web page"),
    ],
)
def test_a_file_that_was_not_downloaded_is_named(tmp_path, cache_root, suffix, content, says):
    path = tmp_path / f"own{suffix}"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^backend\.path: .*{says}"):
        reading.admit(path, cache_root)


def test_a_folder_is_no_file(tmp_path, cache_root):
    (tmp_path / "own.onnx").mkdir()
    with pytest.raises(ConfigError, match=r"own\.onnx \(a folder\)"):
        reading.admit(tmp_path / "own.onnx", cache_root)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        (("dtype=fp16",), "float16"),
        (("dtype=w8", "method=weight_only", "weight_only.block_size=null"), "int8"),
    ],
)
def test_weights_behind_a_cast_of_tflite_are_those_of_the_layer(quantize, cache_root, words, dtype):
    cell = quantize("backend=tflite", *words)
    contents = contents_of(cell.artifact.path, cache_root)
    assert (contents.weight_dtype, contents.activation_dtype) == (dtype, "float32")
    assert not contents.dynamic
    tensors = reading.admit(cell.artifact.path, cache_root).open_tensors(THREADS)
    layers = [inner for inner in tensors.inner if inner.weights is not None]
    assert len(layers) == len(contents.layers)
    assert all(inner.weight_dtype == dtype and inner.bias is not None for inner in layers)


def make_tflite(content, dtype, shape, quantization):
    """A model whose tensor 0 holds `content`, and tensor 1 two float16 scales for each row."""
    scales = np.float16([[0.5, 2], [1, 4]]).view(np.uint8).ravel()
    buffers = [schema.BufferT(data=np.asarray(content, np.uint8)), schema.BufferT(data=scales)]
    values = schema.TensorT(shape=shape, type=dtype, buffer=0, quantization=quantization)
    of_blocks = schema.TensorT(shape=[2, 2], type=schema.TensorType.FLOAT16, buffer=1)
    graph = schema.SubGraphT(tensors=[values, of_blocks])
    return schema.ModelT(subgraphs=[graph], buffers=buffers), values


def by_channel(scale, zero):
    return schema.QuantizationParametersT(scale=scale, zeroPoint=zero, quantizedDimension=0)


BY_BLOCK = schema.QuantizationParametersT(
    details=schema.BlockwiseQuantizationT(scales=1, zeroPoints=-1, blockSize=2)
)
WEIGHTS_OF_TFLITE = {
    "2 bits": ([0b11_10_01_00] * 2, "INT2", by_channel([1, 2], [0, 0]), [0, 1, -2, -1]),
    "4 bits": ([0x10, 0x8F] * 2, "INT4", by_channel([1, 2], [0, 0]), [0, 1, -1, -8]),
    "4 bits in blocks": ([0x11, 0x11] * 2, "INT4", BY_BLOCK, [0.5, 0.5, 2, 2]),
    "a zero point": ([128, 130, 128, 0] * 2, "UINT8", by_channel([1], [128]), [0, 2, 0, -128]),
}


@pytest.mark.parametrize("case", WEIGHTS_OF_TFLITE)
def test_weights_of_tflite_are_read(case):
    content, dtype, quantization, first = WEIGHTS_OF_TFLITE[case]
    model, tensor = make_tflite(
        content, getattr(schema.TensorType, dtype), [2, 4], quantization=quantization
    )
    values = tflite_file.read_constant(model, tensor)
    assert values.tolist()[0] == first


def test_weights_of_unknown_scales_are_not_read():
    none = schema.QuantizationParametersT()
    for quantization in (None, none):
        model, tensor = make_tflite([0] * 8, schema.TensorType.INT8, [2, 4], quantization)
        assert tflite_file.read_constant(model, tensor) is None


def test_a_changed_reader_or_gate_admits_files_anew(quantize, tmp_path, monkeypatch):
    reader = find_readers()[".onnx"].reader
    gates = {"onnx", "exported_program"}
    behind = {name for one in find_readers().values() for name in code.closure(one.reader)}
    assert {f"resnet8ptq.models.gates.{gate}" for gate in gates} <= behind
    path = quantize("backend=onnx").artifact.path
    before = reading.admit(path, tmp_path).path
    unchanged = code.behind
    monkeypatch.setattr(code, "behind", lambda name: f"{unchanged(name)} {name == reader}")
    assert reading.admit(path, tmp_path).path != before


def test_data_beside_a_file_are_read_once_and_part_of_its_hash(tmp_path, monkeypatch):
    values = [numpy_helper.from_array(np.full((4, 4), n, np.float32), f"w{n}") for n in range(3)]
    nodes = [helper.make_node("MatMul", [f"t{n}", f"w{n}"], [f"t{n + 1}"]) for n in range(3)]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 4]) for n in ("t0", "t3")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], values)
    path = tmp_path / "a.onnx"
    onnx.save(
        helper.make_model(graph), path, save_as_external_data=True, location="w", size_threshold=0
    )
    reads = []
    monkeypatch.setattr(
        files, "read_bytes", lambda path, most: reads.append(path.name) or path.read_bytes()
    )
    whole = onnx.load_from_string(read_quantized(path))
    assert numpy_helper.to_array(whole.graph.initializer[2])[0, 0] == 2
    assert reads == ["a.onnx", "w"]
    before = reading.digest(path)
    (tmp_path / "w").write_bytes(bytes(200))
    assert reading.digest(path) != before


def test_scales_of_other_programs_may_be_computed(quantize):
    """Or have no zero point, or one for each channel."""
    made = onnx.load(quantize("dtype=u8s8").artifact.path)
    fp32 = made.graph
    rounded_before = rounded_activations(fp32, made.graph)
    quantizing = [node for node in made.graph.node if node.op_type == "QuantizeLinear"]
    del quantizing[0].input[2:]
    quantizing[1].input[1] = "computed"
    left = rounded_activations(fp32, made.graph)
    assert len(left) == len(rounded_before) - 2


def test_the_file_to_score_is_asked_for():
    with pytest.raises(ConfigError, match=r"^backend\.path: got null, expected a quantized file"):
        quantizer_of(make_config("backend=file")).resolve()


# Inputs and outputs

IMAGE = Tensor("image", (8, 6, 3), "float32")
MASK, IDS = Tensor("mask", (None,), "int64"), Tensor("ids", (None,), "int64")


def test_matches_layout_and_name():
    port = Port("serving_default_image:0", (3, 8, 6), "float32")
    matched = match_inputs([IMAGE], [port], None, "a")
    assert matched == {"image": {"name": port.name, "axes": [2, 0, 1]}}


def test_matches_several_by_name_in_any_order():
    ports = [Port("mask", (None,), "int64"), Port("IDS:0", (None,), "int32")]
    matched = match_inputs([IDS, MASK], ports, None, "a")
    assert {name: one["name"] for name, one in matched.items()} == {"mask": "mask", "ids": "IDS:0"}


def test_matches_outputs_by_shape():
    tensors = [Tensor("boxes", (50, 4), "float32"), Tensor("scores", (50,), "float32")]
    ports = [Port("a", (1, 50), "float32"), Port("b", (4, 50), "float32")]
    matched = match_outputs(tensors, ports, {"scores": "a"}, "a")
    assert matched["boxes"] == {"name": "b", "axes": [1, 0]}
    assert matched["scores"] == {"name": "a", "axes": None, "shape": [50]}
    assert [*matched] == ["boxes", "scores"]  # outputs are compared in the network's order


@pytest.mark.parametrize(
    ("tensors", "ports", "asked", "says"),
    [
        (
            [IDS, MASK],
            [Port("a", (None,), "int64"), Port("b", (None,), "int64")],
            None,
            r"nothing fills a \[\?\] int64; .*try 'backend\.inputs=\{ids: \.\.\., mask: \.\.\.\}'",
        ),
        ([IMAGE], [Port("a", (9, 6, 3), "float32")], None, r"expected the same sizes: is the file"),
        ([IMAGE], [Port("a", (6, 8, 3), "float32")], None, r"expected the same sizes in any order"),
        (
            [Tensor("image", (8, 8, 8), "float32")],
            [Port("a", (None, None, None), "float32")],
            None,
            r"in 3 orders of its axes; try backend\.inputs\.image=\{name: a, axes: \[0, 1, 2\]\}",
        ),
        ([IMAGE], [Port("a", (8, 6, 3), "float32")], {"imge": "a"}, r"got 'imge', .*image"),
        ([IMAGE], [Port("a", (8, 6, 3), "float32")], {"image": "b"}, r"got 'b', expected a"),
        ([IMAGE], [Port("a", (8, 6, 3), "float32")], {"image": [1]}, r"expected a name or"),
        (
            [IMAGE],
            [Port("a", (8, 6, 3), "float32")],
            {"image": {"axes": [0, 1, 3]}},
            r"expected a n",
        ),
        (
            [IMAGE],
            [Port("a", (8, 6, 3), "float32")],
            {"image": {"axes": [[0], 1, 2]}},
            r"expected a n",
        ),
        (
            [IMAGE],
            [Port("a", (8, 6, 3), "uint8")],
            {"image": {"scale": 1, "zero_point": "z"}},
            r"expected a n",
        ),
        (
            [IDS, MASK],
            [Port("a", (None,), "int64"), Port("b", (None,), "int64")],
            {"ids": "a", "mask": {"name": "a"}},
            r"got a for ids and mask, expected one of them",
        ),
    ],
)
def test_what_is_open_names_the_setting(tensors, ports, asked, says):
    with pytest.raises(ConfigError, match=rf"^backend\.inputs.*{says}"):
        match_inputs(tensors, ports, asked, "a")


class _Loaded:
    """A file whose outputs are its inputs."""

    def __init__(self, *ports: Port, batch: int | None = None) -> None:
        self.contents = Contents("", "", ports, ports, (), {}, batch)

    def open_run(self, threads: int) -> Any:
        return lambda values: [array.copy() for array in values]

    def open_logits(self, threads: int) -> None: ...


def load(file: _Loaded, inputs: Any, outputs: Any) -> Predictor:
    return predictor.load(file, inputs, outputs, 1)


@pytest.mark.parametrize("axes", [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 2, 1]])
def test_axes_that_do_not_fit_are_refused(axes):
    port = Port("x", (3, 8, 6), "float32")
    with pytest.raises(ConfigError, match=r"^backend\.inputs\.image: got axes .*\[2, 0, 1\]$"):
        match_inputs([IMAGE], [port], {"image": {"name": "x", "axes": axes}}, "a")
    with pytest.raises(ConfigError, match=r"^backend\.outputs\.image: got axes .*\[1, 2, 0\]$"):
        match_outputs([IMAGE], [port], {"image": {"name": "x", "axes": axes}}, "a")


def test_axes_may_add_or_leave_out_one_of_size_1():
    grey = Tensor("image", (8, 6), "float32")
    asked = {"image": {"name": "x", "axes": [2, 0, 1]}}
    assert match_inputs([grey], [Port("x", (1, 8, 6), "float32")], asked, "a")
    asked = {"image": {"name": "x", "axes": [1, 0]}}
    whole = Tensor("image", (8, 6, 1), "float32")
    assert match_inputs([whole], [Port("x", (6, 8), "float32")], asked, "a")


def test_integers_are_levels_of_the_file():
    port = rounded(Port("a", (2,), "uint8"), 0.5, 10, "uint8")
    matched = match_inputs([Tensor("x", (2,), "float32")], [port], None, "a")
    network = load(_Loaded(port), matched, matched)
    [got] = network.predict(np.array([[1.6, -99]], np.float32))
    np.testing.assert_array_equal(got, [[1.5, -5]])


def test_integers_without_a_scale_take_whole_numbers():
    port, tensor = Port("a", (2,), "uint8"), Tensor("x", (2,), "float32")
    network = load(_Loaded(port), match_inputs([tensor], [port], None, "a"), {})
    np.testing.assert_array_equal(network.predict(np.array([[3, 255]], np.float32))[0], [[3, 255]])
    with pytest.raises(Exception, match=r"^backend\.inputs: a \[2\] uint8 has no scale"):
        network.predict(np.array([[0.5, 1]], np.float32))


def test_an_output_of_other_sizes_is_refused():
    """Such as the index of the class, [N], where the network returns a score for each."""
    contents = Contents("", "", (Port("x", (2,), "float32"),), (Port("y", (), "int64"),), (), {})
    outputs: Any = {"scores": {"name": "y", "axes": None, "shape": [10]}}
    network = predictor.MatchedNetwork(
        lambda values: [np.zeros(len(values[0]), np.int64)],
        contents,
        inputs={"x": {"name": "x", "axes": None}},
        outputs=outputs,
    )
    with pytest.raises(ModelError, match=r"^backend\.outputs: y has 1 values a sample.* 10;"):
        network(np.zeros((3, 2), np.float32))


def test_a_fixed_batch_is_filled():
    port = Port("a", (1,), "float32")
    one = {"x": {"name": "a", "axes": None}}
    samples = np.arange(5, dtype=np.float32).reshape(5, 1)
    [got] = load(_Loaded(port, batch=2), one, one).predict(samples)
    np.testing.assert_array_equal(got, samples)


def test_a_changed_file_is_read_again(quantize, tmp_path, cache_root):
    path = tmp_path / "a.onnx"
    shutil.copyfile(quantize("backend=onnx", "dtype=int8").artifact.path, path)
    first = contents_of(path, cache_root)
    shutil.copyfile(quantize("backend=onnx", "dtype=uint8").artifact.path, path)
    assert contents_of(path, cache_root).weight_dtype != first.weight_dtype


@pytest.mark.parametrize("keras", [True, False])
def test_fp32_runs_where_its_framework_takes_it(quantize, shapes_model, caplog, keras):
    path = quantize("backend=tflite", "dtype=int8").artifact.path
    fp32 = shapes_model if keras else replace(shapes_model, source=shapes_model.onnx_path)
    asked = make_config("data=shapes", "backend=file", f"backend.path={path}")
    backend = baseline_config(fitted(asked, fp32).config).backend
    assert backend == (TfliteConfig() if keras else OnnxConfig())
    assert ("FP32 runs in ONNX Runtime" in caplog.text) is not keras


@pytest.mark.parametrize("batch", [None, 2])
def test_a_tensor_without_a_batch_axis_is_returned(batch):
    """The scale of a dynamic range, which the comparison of tensors reads too."""
    port = Port("x", (2,), "float32")
    contents = Contents("ONNX", "", (port,), (), (), {}, batch=batch)
    run = lambda arrays: [arrays[0], np.float32(0.5)]  # noqa: E731
    network = predictor.MatchedNetwork(run, contents, {"x": {"name": "x", "axes": None}}, {})
    samples, scale = network(np.ones((3, 2), np.float32))
    assert samples.shape == (3, 2)
    assert {*np.atleast_1d(scale)} == {0.5}
