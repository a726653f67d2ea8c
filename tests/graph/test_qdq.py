"""The rounded tensors of a QDQ graph, and their rounding in the FP32 graph."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from resnet8ptq.graph.qdq import rounded_weights

HEAD = '<ir_version: 10, opset_import: ["" : 21]>'


@pytest.mark.parametrize("zero_point", [True, False])
def test_stored_weights_need_no_zero_point(zero_point):
    """As 4-bit weights, which are symmetric, are stored."""
    values = np.array([[1.1, -3.0], [0.4, 2.6]], np.float32)
    fp32 = onnx.parser.parse_model(
        f"{HEAD} network (float[N, 2] x) => (float[N, 2] y) {{ [dense] y = MatMul(x, w) }}"
    ).graph
    fp32.initializer.append(numpy_helper.from_array(values, "w"))
    keys = "levels, scale, zero" if zero_point else "levels, scale"
    quantized = onnx.parser.parse_model(
        f"""{HEAD} network (float[N, 2] x) => (float[N, 2] y)
        {{ w = DequantizeLinear <axis = 1> ({keys})  [dense] y = MatMul(x, w) }}"""
    ).graph
    stored = helper.make_tensor("levels", TensorProto.INT4, [2, 2], [2, -6, 1, 5])
    zeros = helper.make_tensor("zero", TensorProto.INT4, [2], [0, 0])
    scales = numpy_helper.from_array(np.array([0.5, 0.25], np.float32), "scale")
    quantized.initializer.extend([stored, zeros, scales])

    [weight] = rounded_weights(fp32, quantized)
    assert weight.rounded.tolist() == [[1.0, 0.5], [-1.5, 1.25]]  # output channels first
    assert (weight.scales, weight.dtype) == (2, "int4")
