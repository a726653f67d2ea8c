"""SmoothQuant keeps the function, and divides only inputs that a scale can absorb."""

import numpy as np
import onnx
import onnxruntime
import pytest

from resnet8ptq.corrections import smooth_quant
from resnet8ptq.precision.plan import Selection
from tests.helpers import transformers


def run(proto: onnx.ModelProto, batch: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    return np.asarray(session.run(None, {"pixels": batch})[0])


def test_inputs_that_only_layers_take():
    graph = transformers.build().graph
    groups = smooth_quant.find_groups(graph, Selection())
    assert [(g.tensor, list(g.layers)) for g in groups] == [
        ("n1", ["query", "key", "value"]),
        ("n2", ["up"]),
        ("gelu", ["down"]),
    ]


def test_a_product_with_a_vector_absorbs_no_division():
    vector = onnx.helper.make_tensor("vector", onnx.TensorProto.FLOAT, [6], np.ones(6))
    weights = onnx.helper.make_tensor("weights", onnx.TensorProto.FLOAT, [4, 3], np.ones(12))
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "vector"], ["sums"], name="pool"),  # [n, 4]
        onnx.helper.make_node("MatMul", ["sums", "weights"], ["y"], name="dense"),
    ]
    graph = onnx.GraphProto(node=nodes, initializer=[vector, weights])
    assert smooth_quant.find_groups(graph, Selection()) == []


@pytest.mark.parametrize("seed", range(3))
def test_division_keeps_the_function(seed):
    random, proto = np.random.default_rng(seed), transformers.build()
    batch = random.random((5, 3, 8, 6), dtype=np.float32)
    before = run(proto, batch)
    for group in smooth_quant.find_groups(proto.graph, Selection()):
        width = transformers.HIDDEN if group.tensor == "gelu" else transformers.WIDTH
        divisors = np.exp(random.normal(0, 2, width)).astype(np.float32)
        smooth_quant._divide(proto.graph, group, divisors)
    assert np.abs(run(proto, batch) - before).max() <= 1e-4 * np.abs(before).max()
