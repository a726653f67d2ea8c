"""Networks with an If whose branch does not depend on the samples."""

import numpy as np
import onnx
import pytest
from onnx import parser

from resnet8ptq.config.schema import ModelConfig
from resnet8ptq.core.errors import ModelError
from resnet8ptq.graph.session import open_runner
from resnet8ptq.models import conversion
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
