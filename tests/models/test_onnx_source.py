"""An ONNX file as the network: what is taken, what it becomes, what is refused."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper, parser

from resnet8ptq.config.schema import ModelConfig
from resnet8ptq.core import files
from resnet8ptq.core.errors import ModelError, UnsupportedError
from resnet8ptq.data import registry
from resnet8ptq.data.dataset import Dataset
from resnet8ptq.data.sampling import draw_calibration
from resnet8ptq.graph.session import open_runner, open_session
from resnet8ptq.graph.torch_module import load_torch_module
from resnet8ptq.models import conversion, model, network_path
from resnet8ptq.models.contract import Contract, Tensor
from resnet8ptq.models.normalization import write_paddings
from tests.helpers.assembling import assemble
from tests.helpers.configs import make_config
from tests.helpers.factories import THREADS, quantize_network, quantizer_of
from tests.helpers.onnx_networks import DENSE, IMAGES, RANDOM, build

# What is taken


def test_the_scaler_of_a_network_that_scikit_learn_exported_is_taken(take, tmp_path):
    nodes = [
        helper.make_node(
            "Scaler", ["x"], ["y"], domain="ai.onnx.ml", offset=[1.0, 2], scale=[3.0, 4.0]
        ),
        helper.make_node("MatMul", ["y", "w"], ["z"]),
    ]
    weights = np.float32([[1, 2], [3, 4]])
    proto = assemble(nodes, {"x": [None, 2]}, {"z": [None, 2]}, {"w": weights})
    proto.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    samples = RANDOM.normal(size=(5, 2)).astype(np.float32)
    take(proto, samples)
    [z] = open_runner(str(tmp_path / "made" / "folded.onnx"))(samples)
    np.testing.assert_allclose(z, (samples - [1, 2]) * [3, 4] @ weights, rtol=1e-4, atol=1e-5)


def test_the_dict_and_the_class_names_of_a_scikit_learn_export_are_left_out(take, tmp_path):
    of_ml = {"domain": "ai.onnx.ml"}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["products"]),
        helper.make_node("Softmax", ["products"], ["scores"]),
        helper.make_node("ArgMax", ["scores"], ["best"], axis=1),
        helper.make_node("ArrayFeatureExtractor", ["classes", "best"], ["label"], **of_ml),
        helper.make_node("ZipMap", ["scores"], ["dict"], classlabels_int64s=[0, 1], **of_ml),
    ]
    constants = {"w": np.float32([[1, 2], [3, 4]]), "classes": np.int64([0, 1])}
    proto = assemble(nodes, {"x": [None, 2]}, {"scores": [None, 2]}, constants)
    key = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
    of_dict = helper.make_sequence_type_proto(helper.make_map_type_proto(TensorProto.INT64, key))
    del proto.graph.output[:]
    proto.graph.output.append(helper.make_tensor_value_info("label", TensorProto.INT64, [None]))
    proto.graph.output.append(helper.make_value_info("dict", of_dict))
    # The scores beside the dict, and inner types as shape inference writes them
    proto.graph.output.append(helper.make_tensor_value_info("scores", TensorProto.FLOAT, [None, 2]))
    proto.graph.value_info.append(helper.make_value_info("dict", of_dict))
    proto.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    samples = RANDOM.normal(size=(5, 2)).astype(np.float32)
    take(proto, samples)
    [scores] = open_runner(str(tmp_path / "made" / "folded.onnx"))(samples)
    np.testing.assert_allclose(scores.sum(axis=1), 1, rtol=1e-5)


def test_an_input_that_is_no_tensor_is_refused(refused):
    proto = build()
    key = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
    of_dict = helper.make_map_type_proto(TensorProto.INT64, key)
    proto.graph.input.append(helper.make_value_info("dict", of_dict))
    assert "input 'dict' is of type map; expected a tensor" in refused(proto)


def test_a_selection_of_features_is_no_label(refused):
    nodes = [
        helper.make_node("ArrayFeatureExtractor", ["x", "best"], ["y"], domain="ai.onnx.ml"),
        helper.make_node("MatMul", ["y", "w"], ["z"]),
    ]
    constants = {"w": np.float32([[1, 2], [3, 4]]), "best": np.int64([0, 2])}
    proto = assemble(nodes, {"x": [None, 3]}, {"z": [None, 2]}, constants)
    proto.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    assert "every output follows an ArrayFeatureExtractor" in refused(proto)


def test_a_product_of_positions_is_no_layer_in_integers(take):
    """As of windows of a spectrogram, or of shapes."""
    nodes = [
        helper.make_node("Cast", ["x"], ["whole"], to=TensorProto.INT64),
        helper.make_node("MatMul", ["whole", "step"], ["at"]),
        helper.make_node("Cast", ["at"], ["place"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["place", "w"], ["z"]),
    ]
    constants = {"step": np.int64([[2, 0], [0, 3]]), "w": np.float32([[1, 2], [3, 4]])}
    proto = assemble(nodes, {"x": [None, 2]}, {"z": [None, 2]}, constants)
    take(proto, RANDOM.normal(size=(5, 2)).astype(np.float32))


def test_weights_in_a_file_beside_the_network_are_taken_and_count(take, tmp_path):
    path = tmp_path / "network.onnx"
    onnx.save(build(), path, save_as_external_data=True, location="w" * 130, size_threshold=0)
    assert all(
        len(w.raw_data) == 0 for w in onnx.load(path, load_external_data=False).graph.initializer
    )
    assert take(path).parity["onnx, folded"] < 1e-5
    before = network_path.hash_network(ModelConfig(), path)
    assert before != files.sha256(path)
    weights = tmp_path / ("w" * 130)
    weights.write_bytes(bytes(weights.stat().st_size))
    assert network_path.hash_network(ModelConfig(), path) != before


def test_the_graph_keeps_the_names_of_its_inputs_and_outputs(take, tmp_path):
    record = take(build())
    assert set(record.parity) == {
        f"{framework}, {file}" for framework in ("onnx", "torch") for file in ("folded", "unfolded")
    }
    assert record.contract == Contract(
        (Tensor("pixels:0", (32, 32, 3), "float32"),), (Tensor("given", (10,), "float32"),)
    )
    graph = onnx.load(tmp_path / "made" / conversion.UNFOLDED).graph
    assert [value.name for value in graph.input] == ["pixels:0"]  # no weights
    names = [node.name for node in graph.node]
    assert len(set(names)) == len(names)
    assert all(names)
    assert names[-1] == "a/b"  # as onnx2torch would name it


@pytest.mark.parametrize(
    ("changes", "takes"),
    [
        ({"nchw": True, "takes": ["B", 3, 32, 32]}, (3, 32, 32)),
        ({"nchw": True, "takes": [1, 3, 32, 32], "gives": [1, 10]}, (3, 32, 32)),
        ({"nchw": True, "takes": ["B", 3, "H", "W"]}, (3, 32, 32)),
        ({"takes": ["B", "H", "W", 3]}, (32, 32, 3)),
    ],
)
def test_samples_settle_the_layout_and_free_sizes(take, tmp_path, changes, takes):
    record = take(build(**changes))
    assert record.contract.inputs[0].shape == takes
    assert record.contract.batch is None
    assert record.parity["torch, folded"] < 1e-5
    [value] = onnx.load(tmp_path / "made" / conversion.FOLDED).graph.input
    assert [dim.dim_value for dim in value.type.tensor_type.shape.dim] == [0, *takes]


@pytest.mark.parametrize(
    ("field", "last"), [("shape", "Softmax"), ("type", "Softmax"), ("shape", "Reshape")]
)
def test_an_output_without_a_declared_shape_gets_the_one_it_has(take, tmp_path, field, last):
    proto = build(last=last)
    if last == "Reshape":  # to a computed shape, of which onnx infers nothing
        proto.graph.node.insert(0, helper.make_node("Shape", ["pixels:0"], ["four"]))
        proto.graph.node.insert(1, helper.make_node("Compress", ["four", "first"], ["rows"]))
        proto.graph.node.insert(2, helper.make_node("Concat", ["rows", "rest"], ["to"], axis=0))
        proto.graph.node[-1].input.append("to")
        first = np.array([True, False, False, False])
        constants = {"first": first, "rest": np.array([-1], np.int64)}
        for name, values in constants.items():
            proto.graph.initializer.append(numpy_helper.from_array(values, name))
    [output] = proto.graph.output
    (output if field == "type" else output.type.tensor_type).ClearField(field)
    record = take(proto)
    assert record.contract.outputs == (Tensor("given", (10,), "float32"),)
    [value] = onnx.load(tmp_path / "made" / conversion.FOLDED).graph.output
    assert len(value.type.tensor_type.shape.dim) == 2


def test_logits_and_several_outputs_are_taken_as_they_are(take):
    assert take(build(last="Identity")).final == "logits"


def with_three_outputs() -> onnx.ModelProto:
    """A classifier that also returns its logits and the best class."""
    proto = build()
    proto.graph.output.append(helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", 10]))
    proto.graph.node.append(helper.make_node("ArgMax", ["logits"], ["best"], axis=1, keepdims=0))
    proto.graph.output.append(helper.make_tensor_value_info("best", TensorProto.INT64, ["B"]))
    return proto


def test_one_of_several_outputs_can_be_kept(take, tmp_path):
    record = take(with_three_outputs(), outputs=["given"])
    assert [str(output) for output in record.contract.outputs] == ["given [10] float32"]
    assert record.final == "probabilities"
    assert "ArgMax" not in {n.op_type for n in onnx.load(tmp_path / "made/folded.onnx").graph.node}


def test_an_output_that_the_network_lacks_is_refused(take):
    with pytest.raises(
        ModelError, match=r"model\.outputs: got 'a', expected given \| logits \| best"
    ):
        take(with_three_outputs(), outputs=["given", "a"])


def test_several_outputs_are_taken(take):
    record = take(with_three_outputs())
    assert [str(output) for output in record.contract.outputs] == [
        *("given [10] float32", "logits [10] float32", "best [] int64")
    ]
    assert record.final == "values"
    assert max(record.parity.values()) < 1e-5


def test_unlisted_weights_of_ir_version_3_are_taken(take):
    proto = build(8)
    proto.ir_version = 3
    del proto.graph.input[1:]
    assert take(proto).source_opset == 8


@pytest.mark.parametrize("shape", [(1, 10), (1,), ()])
def test_a_bias_that_is_broadcast_is_flattened(take, tmp_path, shape):
    bias = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1
    assert max(take(build(constants={"bias": bias})).parity.values()) < 1e-5
    for name in (conversion.FOLDED, conversion.UNFOLDED):
        graph = onnx.load(tmp_path / "made" / name).graph
        [gemm] = [node for node in graph.node if node.op_type == "Gemm"]
        [result] = [item for item in graph.initializer if item.name == gemm.input[2]]
        assert result.dims == [10]


@pytest.mark.parametrize("name", ["dense", "bias"])
def test_alpha_and_beta_of_a_dense_layer_become_part_of_its_constants(take, tmp_path, name):
    """ONNX Runtime's quantizer divides a bias by beta, in place of multiplying it."""
    proto = build(last="Identity", constants={"bias": np.arange(10, dtype=np.float32)})
    [gemm] = [node for node in proto.graph.node if node.op_type == "Gemm"]
    factor = {"dense": "alpha", "bias": "beta"}[name]
    gemm.attribute.append(helper.make_attribute(factor, 0.5))
    assert max(take(proto).parity.values()) < 1e-5
    for path in (conversion.FOLDED, conversion.UNFOLDED):
        graph = onnx.load(tmp_path / "made" / path).graph
        [gemm] = [node for node in graph.node if node.op_type == "Gemm"]
        factors = {item.name: item.f for item in gemm.attribute}
        assert factors.get(factor, 1) == 1  # ONNX Runtime writes the default
        constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
        whole = {"dense": DENSE, "bias": np.arange(10)}[name]
        assert np.allclose(constants[gemm.input[1 + (name == "bias")]], whole / 2)


def test_weights_that_two_kinds_of_layers_share_get_a_copy_for_each(take, tmp_path):
    """ONNX Runtime's quantizer rounds a constant once, along the axis of one layer's channels."""
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        network (float[N, 4, 5, 5] x) => (float[N, 4, 5, 5] y) {
            a = Conv(x, w)  b = Relu(a)  c = Conv(b, v)  d = Conv(c, v)  e = ConvTranspose(d, w)
            y = Add(e, w0)
        }"""
    )
    for name, shape in {"w": (3, 4, 1, 1), "v": (3, 3, 1, 1), "w0": (1, 1, 1, 1)}.items():
        values = RANDOM.normal(size=shape).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(values, name))
    record = take(proto, RANDOM.normal(size=(8, 4, 5, 5)).astype(np.float32))
    assert max(record.parity.values()) < 1e-5
    for path in (conversion.FOLDED, conversion.UNFOLDED):
        nodes = onnx.load(tmp_path / "made" / path).graph.node
        first, second, third, last = (node.input[1] for node in nodes if "Conv" in node.op_type)
        assert first != last
        assert second == third  # the same role


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("inside", [False, True], ids=["initializer", "constant node"])
def test_weights_that_a_cast_makes_float32_are_taken(take, tmp_path, stored, inside):
    proto = build()
    [gemm] = [node for node in proto.graph.node if node.op_type == "Gemm"]
    kind = getattr(TensorProto, {"float64": "DOUBLE"}.get(stored, stored.upper()))
    values = DENSE.astype(helper.tensor_dtype_to_np_dtype(kind))
    tensor = numpy_helper.from_array(values, "stored")
    if inside:
        proto.graph.node.insert(0, helper.make_node("Constant", [], ["stored"], value=tensor))
    else:
        proto.graph.initializer.append(tensor)
    gemm.input[1] = "cast"
    cast = helper.make_node("Cast", ["stored"], ["cast"], to=TensorProto.FLOAT)
    proto.graph.node.insert(1, cast)
    assert max(take(proto).parity.values()) < 1e-5
    for path in (conversion.FOLDED, conversion.UNFOLDED):
        graph = onnx.load(tmp_path / "made" / path).graph
        [gemm] = [node for node in graph.node if node.op_type == "Gemm"]
        kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
        assert kinds[gemm.input[1]] == TensorProto.FLOAT


BLOCK = """<domain: "own", opset_import: ["" : 17]>
Block (taken, w) => (made) { wide = Conv(taken, w)  made = Relu(wide) }
"""


def with_functions(functions: str, calls: str) -> onnx.ModelProto:
    proto = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17, "own" : 1]>
        network (float[N, 3, 4, 4] x) => (float[N, 3, 4, 4] y) {{ {calls} }}
        {functions}"""
    )
    values = RANDOM.normal(size=(3, 3, 1, 1)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(values, "w"))
    return proto


def test_functions_are_inlined(take, tmp_path):
    twice = """<domain: "own", opset_import: ["" : 17, "own" : 1]>
    Twice (taken, w) => (made) { once = own.Block(taken, w)  made = own.Block(once, w) }"""
    proto = with_functions(BLOCK + twice, "z = own.Twice(x, w)  y = own.Block(z, w)")
    assert max(take(proto, IMAGES[:, :4, :4].transpose(0, 3, 1, 2)).parity.values()) < 1e-5
    made = onnx.load(tmp_path / "made" / conversion.FOLDED)
    assert [node.op_type for node in made.graph.node] == ["Conv", "Relu"] * 3
    assert not made.functions


@pytest.mark.parametrize(
    ("functions", "says"),
    [
        (BLOCK.replace("Relu(", "own.Block(").replace("(wide)", "(wide, w)"), "recursion"),
        (
            BLOCK.replace("Block", "B0")
            + "".join(
                BLOCK.replace("Block", f"B{n}" if n < 40 else "Block").replace(
                    "made = Relu(wide)", f"m = own.B{n - 1}(wide, w) made = own.B{n - 1}(m, w)"
                )
                for n in range(1, 41)
            ),
            "nodes, expected at most 200000",
        ),
    ],
    ids=["a function that calls itself", "a number that doubles 40 times"],
)
def test_functions_that_would_fill_the_memory_are_refused(refused, functions, says):
    assert says in refused(with_functions(functions, "y = own.Block(x, w)"))


def test_a_resize_of_opset_10_keeps_its_coordinates(take):
    """Opset 11 has others by default, which onnx's version converter does not name."""
    proto = parser.parse_model(
        """<ir_version: 5, opset_import: ["" : 10]>
        network (float[N, 3, 4, 4] x) => (float[N, 3, 6, 8] y) <float[4] scales = {1, 1, 1.5, 2}> {
            wide = Conv(x, w)  y = Resize<mode = "linear">(wide, scales)
        }"""
    )
    values = RANDOM.normal(size=(3, 3, 1, 1)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(values, "w"))
    record = take(proto, RANDOM.normal(size=(8, 3, 4, 4)).astype(np.float32))
    assert record.parity["onnx, unfolded"] < 1e-5


@pytest.mark.parametrize("opset", [7, 9, 12])
def test_an_old_opset_is_raised(take, opset):
    record = take(build(opset))
    assert (record.source_opset, record.opset) == (opset, 17)
    assert record.parity["onnx, unfolded"] < 1e-5
    assert not record.without_torch


@pytest.mark.parametrize("opset", [10, 17])
def test_zeros_before_a_max_pool_stay_zeros(take, tmp_path, opset):
    """ONNX Runtime takes them for the pool's own padding, which is never the largest value."""
    widths = [0, 0, 1, 1, 0, 0, 1, 1]
    old, constants = ({"pads": widths}, {}) if opset < 11 else ({}, {"widths": np.array(widths)})
    middle = [
        helper.make_node("Neg", ["relu"], ["negative"]),
        helper.make_node("Pad", ["negative", *constants], ["padded"], **old),
        helper.make_node(
            "MaxPool", ["padded"], ["middle"], kernel_shape=[3, 3], strides=[2, 2], pads=[0] * 4
        ),
    ]
    network = build(opset, middle=middle, constants=constants)
    assert take(network).parity["onnx, unfolded"] < 1e-5
    exact = open_session(network.SerializeToString(), THREADS, optimized=False)
    [expected] = exact.run(None, {"pixels:0": IMAGES})
    for name in (conversion.UNFOLDED, conversion.FOLDED):
        [result] = open_runner(str(tmp_path / "made" / name))(IMAGES)
        assert np.allclose(result, expected, atol=1e-5)


@pytest.mark.parametrize("opset", [13, 17, 20])
def test_a_newer_opset_is_left(take, opset):
    record = take(build(opset))
    assert (record.source_opset, record.opset) == (opset, opset)


def test_an_opset_that_cannot_be_raised_is_refused_by_its_operators(refused):
    message = refused(build(6))
    assert "opset 6 is too old" in message
    assert "from 6 to 7" in message
    assert "Gemm" in message
    assert "Assertion" in message  # the converter's reason


@settings(max_examples=30)
@given(
    size=st.tuples(st.integers(3, 9), st.integers(3, 9)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 3),
    side=st.sampled_from(["SAME_UPPER", "SAME_LOWER"]),
    operator=st.sampled_from(["Conv", "ConvTranspose", "MaxPool"]),
)
def test_written_paddings_are_those_that_onnx_runtime_works_out(
    size, kernel, stride, side, operator
):
    if operator == "MaxPool":  # ONNX Runtime refuses pools with gaps between them
        stride = min(stride, *kernel)
    settings = {"strides": [stride] * 2, "auto_pad": side}
    weights = RANDOM.normal(size=(1, 1, *kernel)).astype(np.float32)
    inputs = ["x"] if operator == "MaxPool" else ["x", "w"]
    node = helper.make_node(operator, inputs, ["y"], kernel_shape=kernel, **settings)
    proto = assemble([node], {"x": [2, 1, *size]}, {"y": None}, {"w": weights})
    samples = RANDOM.normal(size=(2, 1, *size)).astype(np.float32)
    expected = open_runner(proto)(samples)
    write_paddings(proto)
    assert not any(item.name == "auto_pad" for item in proto.graph.node[0].attribute)
    assert np.array_equal(open_runner(proto)(samples), expected)


@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        ({"output_padding": [1, 0]}, True),
        ({"output_padding": [0, 0]}, False),
        ({"output_shape": [9, 11]}, True),
    ],
)
def test_a_set_size_of_the_output_keeps_auto_pad(setting, kept):
    weights = RANDOM.normal(size=(1, 1, 3, 3)).astype(np.float32)
    window = {"strides": [2, 3], "auto_pad": "SAME_UPPER"}
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], **window, **setting)
    proto = assemble([node], {"x": [2, 1, 5, 6]}, {"y": None}, {"w": weights})
    samples = RANDOM.normal(size=(2, 1, 5, 6)).astype(np.float32)
    expected = open_runner(proto)(samples)
    write_paddings(proto)
    names = [item.name for item in proto.graph.node[0].attribute]
    assert ("auto_pad" in names) == kept
    assert np.array_equal(open_runner(proto)(samples), expected)


@pytest.mark.parametrize("opset", [18, 20])
def test_operators_that_onnx2torch_knows_from_before_are_lowered_for_it(take, opset):
    nodes = [
        helper.make_node("ReduceMean", ["relu", "axes"], ["mean of all"], keepdims=1),
        helper.make_node("Add", ["relu", "mean of all"], ["sum"]),
        helper.make_node("Reshape", ["sum", "shape"], ["middle"], allowzero=1),
    ]
    constants = {"axes": np.array([2, 3]), "shape": np.array([-1, 8, 32, 32])}
    record = take(build(opset, middle=nodes, constants=constants))
    assert record.opset == opset
    assert record.parity["torch, folded"] < 1e-5


def test_slices_that_onnx_runtime_makes_one_operator_of_run_in_torch(take):
    nodes = [
        *(
            helper.make_node("Slice", ["relu", f"{y}{x}", "end", "hw", "step"], [f"part{y}{x}"])
            for y in (0, 1)
            for x in (0, 1)
        ),
        helper.make_node("Concat", ["part00", "part10", "part01", "part11"], ["parts"], axis=1),
        helper.make_node("Conv", ["parts", "weights"], ["middle"]),
    ]
    constants = {f"{y}{x}": np.array([y, x]) for y in (0, 1) for x in (0, 1)}
    constants |= {"end": np.array([99, 99]), "hw": np.array([2, 3]), "step": np.array([2, 2])}
    constants["weights"] = RANDOM.normal(0, 0.1, (8, 32, 1, 1)).astype(np.float32)
    record = take(build(middle=nodes, constants=constants))
    assert "SpaceToDepth" in record.preprocessing.operators_after
    assert record.parity["torch, folded"] < 1e-5


def test_groups_are_normalized_by_an_operator_that_torch_has(take):
    """ONNX Runtime's own operators for it have computed shapes."""
    nodes = [
        helper.make_node("Relu", ["relu"], ["again"]),
        helper.make_node("GroupNormalization", ["again", "s", "b"], ["middle"], num_groups=2),
    ]
    scales = {name: RANDOM.normal(size=8).astype(np.float32) for name in "sb"}
    record = take(build(21, middle=nodes, constants=scales))
    assert max(record.parity.values()) < 1e-5
    assert len(record.parity) == 4
    assert record.preprocessing.operators_after["InstanceNormalization"] == 1


def test_what_onnx2torch_does_not_know_is_for_onnx_alone(take, tmp_path):
    nodes = [helper.make_node("Hardmax", ["relu"], ["middle"], axis=1)]
    record = take(build(middle=nodes))
    assert set(record.parity) == {"onnx, folded", "onnx, unfolded"}
    assert "Hardmax" in record.without_torch[conversion.FOLDED]
    with pytest.raises(UnsupportedError, match=r"Hardmax") as caught:
        load_torch_module(tmp_path / "made" / conversion.FOLDED)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def exported(shapes: Dataset, shapes_model: model.Fp32Model, cache_root: Path, tmp_path_factory):
    """The embedded set's network as tf2onnx exports it, under another name of its input."""
    config = make_config("data=shapes", "model.fold=false").model
    proto = onnx.load(model.load_network(config, shapes, cache_root).onnx_path)
    for node in proto.graph.node:
        node.input[:] = ["images" if name == "input" else name for name in node.input]
    proto.graph.input[0].name = "images"
    path = tmp_path_factory.mktemp("exported") / "network.onnx"
    onnx.save(proto, path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_quantizes_like_the_keras_file_it_came_from(
    shapes, shapes_model, cache_root, exported, tmp_path, backend
):
    config = make_config("data=shapes", f"backend={backend}", f"model.path={exported}")
    imported = model.load_network(config.model, shapes, cache_root)
    assert imported.source == exported
    calibration = draw_calibration(shapes, 10, config.seed).split
    [batch] = shapes.test.take(np.arange(200)).batches(200)
    result = []
    for index, network in enumerate((shapes_model, imported)):
        folder = tmp_path / str(index)
        folder.mkdir()
        quantizer = quantizer_of(config)
        artifact = quantize_network(quantizer, network, calibration, folder)
        assert artifact.quantized_layers == 10
        result.append(quantizer.load(artifact.path, THREADS).predict(batch)[0])
    assert np.array_equal(*result)


# The real network


@pytest.mark.slow
@pytest.mark.usefixtures("real_files")
def test_the_real_network_as_an_onnx_file(cache_root):
    real = registry.load("cifar10", os.environ["CIFAR10_DIR"])
    config = make_config("model.fold=false").model
    exported = model.load_network(config, real, cache_root).onnx_path
    imported = model.load_network(replace(config, path=str(exported), fold=True), real, cache_root)
    session = onnxruntime.InferenceSession(imported.onnx_path)
    right = 0
    for start, batch in zip(range(0, 9980, 499), real.test.batches(499), strict=True):
        result = session.run(None, {"input": batch})[0].argmax(1)
        right += int((result == real.test.labels[start : start + 499]).sum())
    assert right == 8703


def test_a_decoder_has_no_past(take, tmp_path):
    """Windows of text are whole, so earlier tokens are none, in batches of any size."""
    proto = parser.parse_model(
        """
        <ir_version: 8, opset_import: ["" : 17]>
        decoder (
            int64[N, T] input_ids, float[N, 2, P, 3] past_key_values_key,
            float[N, 2, P, 3] past_key_values_value
        ) => (float[N, T, 11] logits, float[N, 2, Q, 3] present_key)
        <int64[4] heads = {0, 0, 2, 3}, int64[3] flat = {0, 0, 6}, int64[1] two = {2}> {
            x = Gather(table, input_ids)
            split = Reshape(x, heads)
            moved = Transpose<perm = [0, 2, 1, 3]>(split)
            present_key = Concat<axis = 2>(past_key_values_key, moved)
            value = Concat<axis = 2>(past_key_values_value, moved)
            product = Mul(present_key, value)
            back = Transpose<perm = [0, 2, 1, 3]>(product)
            joined = Reshape(back, flat)
            sizes = Shape(past_key_values_key)
            before = Gather(sizes, two)
            passed = Cast<to = 1>(before)
            shifted = Add(joined, passed)
            logits = MatMul(shifted, head)
        }
        """
    )
    table = RANDOM.normal(size=(11, 6)).astype(np.float32)
    head = RANDOM.normal(size=(6, 11)).astype(np.float32)
    for name, values in (("table", table), ("head", head)):
        proto.graph.initializer.append(numpy_helper.from_array(values, name))
    tokens = RANDOM.integers(0, 11, (5, 7))
    take(proto, tokens, ["logits"])
    made = tmp_path / "made" / conversion.UNFOLDED
    assert [value.name for value in onnx.load(made).graph.input] == ["input_ids"]
    [logits] = open_runner(str(made))(tokens)
    np.testing.assert_allclose(logits, table[tokens] ** 2 @ head, rtol=1e-4, atol=1e-4)
