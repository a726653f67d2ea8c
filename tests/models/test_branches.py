"""Networks with an If whose branch does not depend on the samples."""

import numpy as np
import onnx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper, parser

from resnet8ptq.config.schema import ModelConfig
from resnet8ptq.core.errors import ModelError
from resnet8ptq.graph.session import open_runner, open_session
from resnet8ptq.models import conversion
from resnet8ptq.models.branches import take_branches
from tests.helpers.converted import convert

X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
RATES = """
    wanted = Constant<value_int = 16000>()
    is_wanted = Equal(rate, wanted)
    y = If(is_wanted) <
        then_branch = then () => (float[N, 2] out) {
            w = Constant<value = float[4, 2] {1, 2, 3, 4, 5, 6, 7, 8}>()
            out = MatMul(x, w)
        },
        else_branch = else () => (float[N, 2] out) {
            w = Constant<value = float[4, 2] {1, 1, 1, 1, 1, 1, 1, 1}>()
            out = MatMul(x, w)
        }
    >
"""
SIZES = """
    w = Constant<value = float[4, 2] {1, 2, 3, 4, 5, 6, 7, 8}>()
    rows = MatMul(x, w)
    shape = Shape(rows)
    place = Constant<value_int = AXIS>()
    one = Constant<value_int = 1>()
    size = Gather(shape, place)
    is_one = Equal(size, one)
    y = If(is_one) <
        then_branch = then () => (float[N, 2] out) { out = Neg(rows) },
        else_branch = else () => (float[N, 2] out) { out = Identity(rows) }
    >
"""


def write(path, nodes: str, inputs: str = "float[N, 4] x"):
    proto = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 17]>
        g ({inputs}) => (float[N, 2] y) {{ {nodes} }}""")
    onnx.save(proto, path)
    return path


def operators(folder) -> set[str]:
    return {node.op_type for node in onnx.load(folder / "unfolded.onnx").graph.node}


@pytest.mark.parametrize(("rate", "weights"), [(16000, np.arange(1, 9)), (8000, np.ones(8))])
def test_the_value_of_an_input_chooses_the_branch_with_the_layers(tmp_path, rate, weights):
    path, folder = write(tmp_path / "a.onnx", RATES, "float[N, 4] x, int64 rate"), tmp_path / "made"
    folder.mkdir()
    conversion.convert(path, folder, X, ModelConfig(inputs={"rate": rate}))
    assert "If" not in operators(folder)
    [y] = open_runner(str(folder / "folded.onnx"))(X)
    np.testing.assert_allclose(y, X @ weights.reshape(4, 2), rtol=1e-5)


def test_layers_inside_an_if_are_refused_with_the_setting_that_chooses(tmp_path):
    path = write(tmp_path / "a.onnx", RATES, "float[N, 4] x, int64 rate")
    with pytest.raises(ModelError, match=r"inside If.*model\.inputs=\{NAME: \.\.\.\}"):
        convert(path, tmp_path / "made", X)


def test_a_shape_chooses_the_branch_if_all_batch_sizes_agree(tmp_path):
    convert(write(tmp_path / "a.onnx", SIZES.replace("AXIS", "1")), tmp_path / "made", X)
    assert "If" not in operators(tmp_path / "made")


def test_a_branch_that_depends_on_the_batch_size_stays(tmp_path):
    convert(write(tmp_path / "a.onnx", SIZES.replace("AXIS", "0")), tmp_path / "made", X)
    assert "If" in operators(tmp_path / "made")
    run = open_runner(str(tmp_path / "made" / "folded.onnx"))
    np.testing.assert_allclose(run(X[:1])[0], -run(X)[0][:1], rtol=1e-5)


def nest(depth: int, name: str) -> onnx.GraphProto:
    """Return branches inside branches, all with a tensor of one name."""
    declared = [onnx.ValueInfoProto(name=name)]
    other = helper.make_graph([helper.make_node("Neg", ["x"], [name])], "other", [], declared)
    taken = helper.make_graph([helper.make_node("Relu", ["x"], [name])], "taken", [], declared)
    for _ in range(depth):
        branches = {"then_branch": taken, "else_branch": other}
        node = helper.make_node("If", ["always"], [name], **branches)
        taken = helper.make_graph([node], "nested", [], declared)
    return taken


@given(depth=st.integers(0, 5), name=st.sampled_from(["a", "y", "a" * 99]))
@example(depth=14, name="a")
def test_nested_branches_take_no_more_room_than_before(depth, name):
    proto = onnx.ModelProto(ir_version=8, opset_import=[helper.make_opsetid("", 17)])
    proto.graph.CopyFrom(nest(depth, name))
    proto.graph.initializer.append(numpy_helper.from_array(np.array(True), "always"))
    proto.graph.input.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, [4]))
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]))
    before = proto.ByteSize()
    taken = take_branches(proto)
    assert (taken is not proto) == (depth > 0)
    proto = taken
    assert {node.op_type for node in proto.graph.node} <= {"Relu", "Identity"}
    assert proto.ByteSize() < before + 1000 * (depth + 1)
    [y] = open_session(proto.SerializeToString(), 1).run(None, {"x": X[0]})
    np.testing.assert_array_equal(y, np.maximum(X[0], 0))
