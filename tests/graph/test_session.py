"""Sessions of ONNX Runtime, and the graphs that steps make for them."""

import numpy as np
import onnx

from resnet8ptq.graph.session import between, end_at_logits, open_runner


def test_logits_of_a_rounded_softmax_are_floats():
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        network (float[N, 3] x) => (uint8[N, 3] y)
        <float scale = {0.5}, uint8 zero = {128}, float share = {0.00390625}, uint8 none = {0}>
        { levels = QuantizeLinear(x, scale, zero)
          y = com.microsoft.QLinearSoftmax <axis = -1, opset = 17>
              (levels, scale, zero, share, none) }"""
    )
    assert end_at_logits(proto)
    [logits] = open_runner(proto, threads=1)(np.array([[1.1, -2, 3]], np.float32))
    assert logits.tolist() == [[1.0, -2.0, 3.0]]


def test_a_part_keeps_nodes_with_an_omitted_output():
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[N, 2] x) => (float[N, 2] y) { a, mask = Dropout(x) y = Relu(a) }"""
    )
    proto.graph.node[0].output[1] = ""
    part = between(proto, "", ["y"])
    assert [node.op_type for node in part.graph.node] == ["Dropout", "Relu"]
