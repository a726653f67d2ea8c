"""An ONNX file for an older release of ONNX Runtime."""

import numpy as np
import onnx
import pytest
from onnx import parser
from onnx.reference import ReferenceEvaluator

from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.deploy import older_runtime


def build(opset: int, body: str) -> onnx.ModelProto:
    head = f'<ir_version: 11, opset_import: ["" : {opset}]>'
    return parser.parse_model(f"{head} g (float[n, 4] x) => (float[n, 4] y) {{ {body} }}")


def test_opset_and_ir_are_lowered_where_the_operators_allow():
    proto = build(22, "a = Relu(x)  b = Sigmoid(a)  y = Add(a, b)")
    inputs = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
    expected = ReferenceEvaluator(proto).run(None, {"x": inputs})[0]
    assert older_runtime.lower(proto, 17) == "opset 22, IR 11 -> opset 20, IR 9"
    assert (proto.opset_import[0].version, proto.ir_version) == (20, 9)
    result = ReferenceEvaluator(proto).run(None, {"x": inputs})[0]
    np.testing.assert_array_equal(result, expected)


def test_opsets_without_an_operator_are_left_out():
    proto = build(20, "a = com.microsoft.FastGelu(x)  y = Relu(a)")
    for domain, version in {"com.microsoft": 1, "ai.onnx.ml": 5}.items():
        proto.opset_import.append(onnx.helper.make_opsetid(domain, version))
    older_runtime.lower(proto, 17)
    assert {entry.domain: entry.version for entry in proto.opset_import} == {
        "": 20,
        "com.microsoft": 1,
    }


@pytest.mark.parametrize(
    ("body", "version", "reason"),
    [
        ("y = Gelu(x)", 16, "operator Gelu .* is of opset 20; that version reads up to 19"),
        ("y = Swish(x)", 17, "operator Swish .* is of opset 24"),
        ("y = Cast <to = 1, round_mode = 'down'> (x)", 17, "operator Cast .* attribute round_mode"),
    ],
)
def test_operator_that_the_older_version_lacks_is_named(body, version, reason):
    with pytest.raises(UnsupportedError, match=reason):
        older_runtime.lower(build(24, body.replace("'", '"')), version)


@pytest.mark.parametrize(("dtype", "is_taken"), [("uint16", False), ("uint8", True)])
def test_a_type_that_the_older_operator_lacks_is_refused(dtype, is_taken):
    """ONNX's checker takes the lowered node, which ONNX Runtime then does not load."""
    body = "q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)  y = com.microsoft.Gelu(d)"
    proto = build(21, body)
    proto.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    for name, value in {"s": np.float32(0.1), "z": np.array(0, dtype)}.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    if is_taken:
        assert older_runtime.lower(proto, 14).endswith("-> opset 18, IR 8")
        return
    with pytest.raises(UnsupportedError, match=r"QuantizeLinear.*uint16"):
        older_runtime.lower(proto, 14)


def test_operators_of_inner_graphs_are_checked_too():
    """A pool in a branch means something else before opset 19, but is a valid node there."""
    branches = []
    for name in ("then", "else"):
        node = onnx.helper.make_node("AveragePool", ["x"], [name], kernel_shape=[1])
        output = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        branches.append(onnx.helper.make_graph([node], name, [], [output]))
    proto = build(22, "y = Relu(x)")
    choice = onnx.helper.make_node(
        "If", ["chosen"], ["z"], then_branch=branches[0], else_branch=branches[1]
    )
    chosen = onnx.helper.make_tensor_value_info("chosen", onnx.TensorProto.BOOL, [])
    proto.graph.input.append(chosen)
    proto.graph.node.append(choice)
    with pytest.raises(UnsupportedError, match=r"operator AveragePool .* means something else"):
        older_runtime.lower(proto, 13)


@pytest.mark.parametrize("minor", range(10, 26))
def test_each_version_reads_at_most_what_the_next_one_does(minor):
    """By ONNX's own table, so that no version has an opset without its IR."""
    opset, ir_version = older_runtime.find_formats(minor)
    assert older_runtime.check_version(f"1.{minor}") == minor
    assert onnx.helper.OP_SET_ID_VERSION_MAP["ai.onnx", opset] == ir_version
    assert older_runtime.find_formats(minor + 1) >= (opset, ir_version)
