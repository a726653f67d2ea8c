"""Warnings of a run that follow from its network and its file."""

import numpy as np
import onnx
import pytest
from onnx import parser

from resnet8ptq.experiment.run_warnings import warn_of_size
from resnet8ptq.experiment.settings import resolve
from tests.helpers.configs import make_config


def dense(inputs: int, outputs: int, products: int = 1) -> onnx.GraphProto:
    repeated = [f"h{n} = MatMul(h{n - 1}, w)" for n in range(1, products)]
    second = "  ".join([*repeated, f"y = Relu(h{products - 1})"])
    graph = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        network (float[N, {inputs}] x) => (float[N, {outputs}] y) {{
            h0 = MatMul(x, w)  {second}
        }}"""
    ).graph
    values = np.ones((inputs, outputs), np.float32)
    graph.initializer.append(onnx.numpy_helper.from_array(values, "w"))
    for index, node in enumerate(graph.node):
        node.name = f"node{index}"
    return graph


@pytest.mark.parametrize(
    ("graph", "words", "reason"),
    [
        (dense(4, 4), (), "0.1 kB only"),
        (dense(100, 100, products=5), (), "several layers share"),
        (dense(100, 100, products=2), (), "try slim=true"),
        (dense(4, 2000), ("per_channel=true",), "per_channel=false"),
        (dense(100, 100), (), "FP32's (3.0 kB, 2.0 kB)"),
        (dense(100, 100), (), "try slim=true"),
    ],
)
def test_file_larger_than_fp32_has_one_line(caplog, graph, words, reason):
    warn_of_size(graph, 3000, 2000, resolve(make_config("data=shapes", *words)))
    [record] = caplog.records
    assert reason in record.getMessage()


def test_weights_of_layers_in_float_count(caplog):
    graph = dense(4, 4)
    recurrent = np.ones((100, 100), np.float32)
    graph.initializer.append(onnx.numpy_helper.from_array(recurrent, "of_an_lstm"))
    warn_of_size(graph, 3000, 2000, resolve(make_config("data=shapes")))
    [record] = caplog.records
    assert "kB only" not in record.getMessage()


@pytest.mark.parametrize("words", [("slim=true",), ("backend=torch",)])
def test_slim_is_advised_only_where_it_is_new_and_possible(caplog, words):
    warn_of_size(
        dense(100, 100, products=2), 3000, 2000, resolve(make_config("data=shapes", *words))
    )
    [record] = caplog.records
    assert "slim" not in record.getMessage()


def test_smaller_file_has_no_line(caplog):
    warn_of_size(dense(4, 4), 2000, 3000, resolve(make_config("data=shapes")))
    assert not caplog.records
