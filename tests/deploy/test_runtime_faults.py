"""Known faults of older ONNX Runtimes are named for the files that have their nodes alone."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from resnet8ptq.deploy import runtime_faults
from resnet8ptq.graph.session import open_runner

HEAD = '<ir_version: 8, opset_import: ["" : 13]> g (float[n, 4] x) => (float[n, 4] y)'
MOVED = "w = DequantizeLinear(levels, scale)  t = Transpose(w)  y = MatMul(x, t)"
MOVED_INT32 = "w = DequantizeLinear(bias, scale)  t = Reshape(w, shape)  y = Add(x, t)"
RESIZED = """
q = QuantizeLinear(x, scale, zero)  d = DequantizeLinear(q, scale, zero)
r = Resize <mode = 'linear'> (d, , scales)
p = QuantizeLinear(r, scale, zero)  y = DequantizeLinear(p, scale, zero)
"""
PRODUCT = """
q = QuantizeLinear(x, scale, zero)  d = DequantizeLinear(q, scale, zero)
w = DequantizeLinear(levels, scale, zero)  b = DequantizeLinear(bias, squared)
y = Gemm <alpha = ALPHA> (d, w, b)
"""
CONVOLUTION = """
q = QuantizeLinear(x, scale, zero)  d = DequantizeLinear(q, scale, zero)
w = DequantizeLinear(levels, scale, zero)  b = DequantizeLinear(bias, BIAS)
y = Conv(d, w, b)
"""
CONSTANTS = {
    "levels": np.arange(-8, 8, dtype=np.int8).reshape(4, 4),
    "bias": np.arange(4, dtype=np.int32),
    "scale": np.float32(0.5),
    "squared": np.float32(0.25),
    "zero": np.int8(0),
    "shape": np.array([1, 4], np.int64),
    "scales": np.array([1, 2], np.float32),
}


def build(body: str) -> onnx.ModelProto:
    text = body.replace("'", '"').replace("\n", " ")
    proto = parser.parse_model(f"{HEAD} {{ {text} }}")
    read = {name for node in proto.graph.node for name in node.input}
    for name in read & {*CONSTANTS}:
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(CONSTANTS[name]), name))
    return proto


@pytest.mark.parametrize(
    ("body", "report", "fixed"),
    [
        (MOVED, 27845, 28),
        (MOVED_INT32, 25001, 28),
        (RESIZED, 28448, 27),
        (PRODUCT.replace("ALPHA", "2.0"), 28130, 28),
        (CONVOLUTION.replace("BIAS", "scale"), 24711, 27),
    ],
)
def test_a_fault_is_named_up_to_the_release_that_fixed_it(body, report, fixed):
    proto = build(body)
    for version in (runtime_faults.TRIED, 20, fixed - 1):
        [line] = runtime_faults.find_known_faults(proto, version)
        assert f"/issues/{report}" in line and f"fixed in 1.{fixed}" in line
    assert runtime_faults.find_known_faults(proto, fixed) == []


@pytest.mark.parametrize(
    "body",
    [
        MOVED.replace("scale)", "scale, zero)"),
        RESIZED.replace("linear", "nearest"),
        PRODUCT.replace("ALPHA", "1.0"),
        CONVOLUTION.replace("BIAS", "squared"),
    ],
)
def test_a_file_without_the_nodes_has_no_known_fault(body):
    assert runtime_faults.find_known_faults(build(body), 20) == []


def test_a_zero_point_is_written_and_changes_nothing_here():
    proto = build(MOVED)
    samples = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    expected = open_runner(proto, optimized=False)(samples)[0]
    runtime_faults.write_zero_points(proto.graph)
    onnx.checker.check_model(proto)
    assert runtime_faults.find_known_faults(proto, 20) == []
    np.testing.assert_array_equal(open_runner(proto, optimized=False)(samples)[0], expected)
