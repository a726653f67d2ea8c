"""The ONNX files that are refused: without layers, quantized, damaged or hostile."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    quantize_dynamic,
    quantize_static,
)

from resnet8ptq.config.schema import ModelConfig
from resnet8ptq.core.errors import ModelError
from resnet8ptq.models import model
from resnet8ptq.models.gates import onnx as gate
from tests.helpers.assembling import assemble
from tests.helpers.onnx_networks import DENSE, FILTERS, IMAGES, build

# Refused: contract


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"takes": ["B", 28, 28, 3]}, "takes (28, 28, 3), the samples are (32, 32, 3)"),
        ({"takes": ["B", 3, "H", 31]}, "takes (3, ?, 31), the samples are (32, 32, 3)"),
        ({"constants": {"filters": np.full_like(FILTERS, np.nan)}}, "NaN or infinity in 'filters'"),
    ],
)
def test_a_graph_that_does_not_fit_is_refused(refused, changes, says):
    assert says in refused(build(gives=["B", "classes"], **changes))


def test_two_inputs_are_refused_by_their_names(refused):
    proto = build()
    proto.graph.input.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, ["B", 5]))
    assert "has 2 inputs (pixels:0 [32, 32, 3] float32, more [5] float32)" in refused(proto)


def test_sparse_weights_are_refused_by_their_name(refused):
    proto = build()
    values = numpy_helper.from_array(np.ones(1, np.float32), "few")
    places = numpy_helper.from_array(np.zeros(1, np.int64), "places")
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [4, 4]))
    assert "tensor 'few' is sparse" in refused(proto)


def test_an_output_that_is_an_input_is_refused_by_its_name(refused):
    proto = build(gives=["B", "classes"])
    proto.graph.output.append(proto.graph.input[0])
    assert "output 'pixels:0' is an input, unchanged" in refused(proto)


def test_another_type_of_input_is_refused(refused):
    proto = build(middle=[helper.make_node("Identity", ["relu"], ["middle"])])
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.INT16
    proto.graph.node.insert(
        0, helper.make_node("Cast", ["pixels:0"], ["floats"], to=TensorProto.FLOAT)
    )
    proto.graph.node[1].input[0] = "floats"
    assert "its input pixels:0 is int16; expected float32, float16, int8, " in refused(proto)


def test_an_output_without_a_batch_axis_is_refused(refused):
    proto = build()
    proto.graph.node.append(helper.make_node("ReduceMax", ["logits"], ["most"], keepdims=1))
    proto.graph.output.append(helper.make_tensor_value_info("most", TensorProto.FLOAT, [1, 1]))
    assert "output 'most' is [1, 1] for 2 samples" in refused(proto)


# Refused: nothing to quantize


class Reader(CalibrationDataReader):
    def __init__(self) -> None:
        self.left = [{"pixels:0": IMAGES}]

    def get_next(self) -> dict[str, NDArray[np.float32]] | None:
        return self.left.pop() if self.left else None


@pytest.mark.parametrize(
    ("kind", "says"),
    [("QDQ", "DequantizeLinear"), ("QOperator", "QLinearConv"), ("dynamic", "ConvInteger")],
)
def test_a_quantized_model_is_refused(refused, tmp_path, kind, says):
    source, path = tmp_path / "source.onnx", tmp_path / "quantized.onnx"
    onnx.save(build(), source)
    if kind == "dynamic":
        quantize_dynamic(source, path)
    else:
        quantize_static(source, path, Reader(), quant_format=QuantFormat[kind])
    message = refused(path)
    assert "already quantized (" in message
    assert says in message
    assert message.endswith("resnet8ptq judge FP32 FILE")


def test_weights_of_8_bits_are_refused(refused):
    nodes = [
        helper.make_node("Cast", ["narrow"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Conv", ["relu", "wide"], ["middle"]),
    ]
    narrow = {"narrow": np.ones((8, 8, 1, 1), np.int8)}
    message = refused(build(middle=nodes, constants=narrow))
    assert "already quantized (int8 weights 'narrow')" in message


@pytest.mark.parametrize("level", ["ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"])
def test_a_model_with_fused_layers_is_refused_by_their_operators(refused, tmp_path, level):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # warns that the file is for this machine alone
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    proto = build(takes=[1, 32, 32, 3], gives=[1, 10])
    del proto.graph.input[1:]  # weights that are inputs may change, and are not optimized
    onnxruntime.InferenceSession(proto.SerializeToString(), options)
    message = refused(tmp_path / "optimized.onnx")
    assert "already optimized (" in message
    assert "com.microsoft" in message
    assert "Conv" in message
    assert "without ONNX Runtime's extended or layout optimizations" in message


def test_a_graph_without_layers_is_refused(refused):
    proto = build()
    del proto.graph.initializer[:]
    del proto.graph.node[1:]
    proto.graph.output[0].name = "nchw"
    assert "quantization would find nothing" in refused(proto)


@pytest.mark.parametrize(
    "layer",
    [
        "w = ConstantOfShape <value: tensor = float[1] {0.1}> (shape)  y = Conv (x, w)",
        "ends = Range (zero, one, tenth)  w = Reshape (ends, two)  y = MatMul (x, w)",
    ],
)
def test_computed_values_are_not_taken_for_weights(refused, layer):
    proto = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        computed (float[N, 3, 8, 8] x) => (float[N, a, b, c] y)
            <int64[4] shape = {{4, 3, 3, 3}}, int64[2] two = {{8, -1}},
             float zero = {{0}}, float one = {{1}}, float tenth = {{0.0625}}>
        {{ {layer} }}"""
    )
    assert "quantization would find nothing" in refused(proto)


# Refused: hostile and damaged files


@pytest.mark.parametrize("inside", ["initializer", "attribute"])
@pytest.mark.parametrize(
    ("location", "says"),
    [
        ("/etc/passwd", "expected files beside the model, named without a folder"),
        ("../weights", "expected files beside the model, named without a folder"),
        ("*/_ORT_MEM_ADDR_/*", "expected files beside the model, named without a folder"),
        ("weights", "cannot be read"),
    ],
)
def test_external_data_outside_of_the_folder_are_refused(refused, location, says, inside):
    proto = build()
    tensor = proto.graph.initializer[0]
    if inside == "attribute":
        node = helper.make_node("Constant", [], ["hidden"], value=numpy_helper.from_array(DENSE))
        proto.graph.node.insert(0, node)
        tensor = proto.graph.node[0].attribute[0].t
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    message = refused(proto)
    assert says in message


def test_operators_of_others_are_refused(refused):
    proto = build(middle=[helper.make_node("Own", ["relu"], ["middle"], domain="evil.example")])
    proto.opset_import.append(helper.make_opsetid("evil.example", 1))
    assert "operator 'Own' of domain 'evil.example'" in refused(proto)


@pytest.mark.parametrize("name", ["EPContext", "PythonOp", "Tokenizer", "BeamSearch"])
def test_operators_of_onnx_runtime_that_do_more_than_compute_are_refused(refused, name):
    domain = "com.microsoft"
    proto = build(middle=[helper.make_node(name, ["relu"], ["middle"], domain=domain)])
    proto.opset_import.append(helper.make_opsetid(domain, 1))
    assert f"operator '{name}' of domain 'com.microsoft'" in refused(proto)


def test_functions_of_another_opset_are_refused(refused):
    proto = build()
    node = helper.make_node("Relu", ["x"], ["y"])
    imports = [helper.make_opsetid("", 18)]
    function = helper.make_function("own", "Own", ["x"], ["y"], [node], imports)
    proto.functions.append(function)
    assert "holds functions" in refused(proto)


def test_a_file_too_large_for_protobuf_is_not_read(refused, tmp_path):
    path = tmp_path / "large.onnx"
    with path.open("wb") as file:
        file.truncate(2**31)  # a hole: takes no room
    assert "larger than 2 GiB" in refused(path)


def test_a_file_of_more_nodes_than_a_network_has(refused, monkeypatch):
    monkeypatch.setattr(gate, "MAX_NODES", 3)
    assert "nodes, expected at most 3" in refused(build())


quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SOUND = build().SerializeToString()


def read_or_refuse(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        gate.read_onnx(path)
    except ModelError as error:
        assert str(error).startswith(f"{path}: ")
        assert "\n" not in str(error)


@quick
@given(content=st.binary(max_size=200))
def test_random_bytes_are_refused_in_one_line(tmp_path, content):
    path = tmp_path / "random.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError):
        gate.read_onnx(path)
    read_or_refuse(path, content)


@quick
@given(length=st.integers(0, len(SOUND) - 1))
def test_what_is_cut_off_is_refused_in_one_line(tmp_path, length):
    read_or_refuse(tmp_path / "cut.onnx", SOUND[:length])


@quick
@given(flips=st.lists(st.integers(0, len(SOUND) * 8 - 1), min_size=1, max_size=8))
def test_flipped_bits_are_refused_in_one_line_or_harmless(tmp_path, flips):
    content = bytearray(SOUND)
    for bit in flips:
        content[bit // 8] ^= 1 << bit % 8
    read_or_refuse(tmp_path / "flipped.onnx", bytes(content))


def test_a_damaged_file_is_refused_by_the_whole_path(shapes, cache_root, tmp_path):
    path = tmp_path / "network.ONNX"
    path.write_bytes(SOUND[:-100])
    with pytest.raises(ModelError) as caught:
        model.load_network(ModelConfig(name="own", path=str(path)), shapes, cache_root)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_an_empty_file_is_refused_by_its_key(shapes, cache_root, tmp_path):
    path = tmp_path / "network.onnx"
    path.touch()
    with pytest.raises(ModelError, match=r"^model\.path: .*is empty"):
        model.load_network(ModelConfig(name="own", path=str(path)), shapes, cache_root)


def test_left_out_inputs_and_outputs_make_no_cycle(tmp_path):
    nodes = [
        helper.make_node("Clip", ["x", "", "most"], ["clipped"]),
        helper.make_node("LSTM", ["clipped", "w", "r"], ["", "last"], hidden_size=1),
    ]
    proto = assemble(nodes, {"x": [1, 1, 1]}, {"last": None}, {})
    path = tmp_path / "quantized.onnx"
    onnx.save(proto, path)
    assert gate.read_quantized(path) == path.read_bytes()
