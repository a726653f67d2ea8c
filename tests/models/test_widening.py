"""Networks that compute in float16 or float64, read as float32."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.checker import check_model

from resnet8ptq.graph.links import find_all
from resnet8ptq.graph.session import open_runner
from resnet8ptq.models.widening import find_dtype, to_float32
from tests.helpers.assembling import assemble
from tests.helpers.converted import convert

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(6, 3, 8, 8)).astype(np.float32)
FILTERS = RANDOM.normal(size=(4, 3, 3, 3)).astype(np.float16)
HALF = TensorProto.FLOAT16


def half(values) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(values, np.float16))


def branch(name: str, factor: float) -> onnx.GraphProto:
    nodes = [
        helper.make_node("Constant", [], ["factor"], value=half([factor])),
        helper.make_node("Mul", ["conv", "factor"], ["scaled"]),
    ]
    return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info("scaled", HALF, None)])


def float16_network(inputs: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """Return a network with float16 weights, constants, inner graphs, casts and value_info."""
    nodes = [
        helper.make_node("Cast", ["x"], ["narrow"], to=HALF),
        helper.make_node("Conv", ["narrow", "filters"], ["conv"], pads=[1] * 4),
        helper.make_node("ReduceMax", ["conv"], ["largest"], keepdims=0),
        helper.make_node("Less", ["largest", "limit"], ["is_small"]),
        helper.make_node(
            "If",
            ["is_small"],
            ["chosen"],
            then_branch=branch("then", 1.5),
            else_branch=branch("else", 0.5),
        ),
        helper.make_node("Shape", ["chosen"], ["sizes"]),
        helper.make_node("ConstantOfShape", ["sizes"], ["ones"], value=half([1])),
        helper.make_node("Add", ["chosen", "ones"], ["sum"]),
        helper.make_node("Cast", ["sum"], ["y"], to=inputs),
    ]
    constants = {"filters": FILTERS, "limit": np.float16(1000)}
    sizes = ["N", 3, 8, 8], ["N", 4, 8, 8]
    proto = assemble(nodes, {"x": sizes[0]}, {"y": sizes[1]}, constants, kinds={"x": inputs})
    proto.graph.output[0].type.tensor_type.elem_type = inputs
    proto.graph.value_info.append(helper.make_tensor_value_info("conv", HALF, sizes[1]))
    return proto


def is_float16(proto: onnx.ModelProto) -> bool:
    tensors = find_all(proto, TensorProto)
    types = find_all(proto, onnx.TypeProto.Tensor)
    casts = find_all(proto, onnx.AttributeProto)
    return (
        any(tensor.data_type == HALF for tensor in tensors)
        or any(declared.elem_type == HALF for declared in types)
        or any(attribute.name == "to" and attribute.i == HALF for attribute in casts)
    )


@pytest.mark.parametrize("inputs", [TensorProto.FLOAT, HALF])
def test_every_part_is_widened_and_computes_the_same(inputs):
    proto = float16_network(inputs)
    [expected] = open_runner(proto)(X.astype(helper.tensor_dtype_to_np_dtype(inputs)))
    assert find_dtype(proto) == HALF
    proto = to_float32(proto, HALF)
    assert not is_float16(proto)
    assert "Cast" not in {node.op_type for node in proto.graph.node}
    check_model(proto, full_check=True)
    [outputs] = open_runner(proto)(X)
    np.testing.assert_allclose(outputs, expected, atol=0.02 * np.abs(expected).max())


def test_weights_keep_their_values():
    proto = float16_network()
    proto = to_float32(proto, HALF)
    [filters] = [tensor for tensor in proto.graph.initializer if tensor.name == "filters"]
    assert (numpy_helper.to_array(filters) == FILTERS).all()


@pytest.mark.parametrize("inputs", [TensorProto.FLOAT, HALF])
def test_a_float16_network_with_weights_in_a_file_beside_it_is_read(tmp_path, inputs):
    path = tmp_path / "a.onnx"
    onnx.save(float16_network(inputs), path, save_as_external_data=True, size_threshold=0)
    record = convert(path, tmp_path / "made", X)
    assert record.original_dtype == "float16"
    assert [t.dtype for t in record.contract.inputs] == ["float32"]
    assert [t.dtype for t in record.contract.outputs] == ["float32"]


def test_a_float32_network_with_a_float16_input_stays(tmp_path):
    nodes = [
        helper.make_node("Cast", ["x"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Conv", ["wide", "filters"], ["y"]),
    ]
    constants = {"filters": FILTERS.astype(np.float32)}
    sides = {"x": ["N", 3, 8, 8]}, {"y": ["N", 4, 6, 6]}
    onnx.save(assemble(nodes, *sides, constants, kinds={"x": HALF}), tmp_path / "a.onnx")
    record = convert(tmp_path / "a.onnx", tmp_path / "made", X)
    assert not record.original_dtype
    assert record.contract.inputs[0].dtype == "float16"


def test_a_float64_input_of_a_float32_network_is_read(tmp_path):
    nodes = [
        helper.make_node("Cast", ["x"], ["narrow"], to=TensorProto.FLOAT),
        helper.make_node("Conv", ["narrow", "filters"], ["y"]),
    ]
    constants = {"filters": FILTERS.astype(np.float32)}
    sides = {"x": ["N", 3, 8, 8]}, {"y": ["N", 4, 6, 6]}
    proto = assemble(nodes, *sides, constants, kinds={"x": TensorProto.DOUBLE})
    onnx.save(proto, tmp_path / "a.onnx")
    record = convert(tmp_path / "a.onnx", tmp_path / "made", X)
    assert record.original_dtype == "double"
    assert [t.dtype for t in record.contract.inputs] == ["float32"]


def test_a_float64_network_is_read(tmp_path):
    nodes = [helper.make_node("Conv", ["x", "filters"], ["y"])]
    sides = {"x": ["N", 3, 8, 8]}, {"y": ["N", 4, 6, 6]}
    proto = assemble(
        nodes, *sides, {"filters": FILTERS.astype(float)}, kinds={"x": TensorProto.DOUBLE}
    )
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    onnx.save(proto, tmp_path / "a.onnx")
    record = convert(tmp_path / "a.onnx", tmp_path / "made", X)
    assert record.original_dtype == "double"
    assert [t.dtype for t in record.contract.inputs] == ["float32"]
