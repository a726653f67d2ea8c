"""Shapes inferred without weights are those that ONNX infers with them."""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from resnet8ptq.graph.shapes import infer_shapes

FOLDER = os.environ.get("SHARED_NETWORKS")


def make_network() -> onnx.ModelProto:
    """Return x -> MatMul -> Reshape, by a shape that is itself an initializer."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], "dense"),
        helper.make_node("Reshape", ["m", "shape"], ["y"], "reshape"),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy"]
    ends[0].type.CopyFrom(helper.make_tensor_type_proto(TensorProto.FLOAT, ["n", 30, "length", 40]))
    weights = np.zeros((40, 60), np.float32), np.array([0, -1, 20], np.int64)
    initializers = map(numpy_helper.from_array, weights, ("w", "shape"))
    graph = helper.make_graph(nodes, "network", ends[:1], ends[1:], [*initializers])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def typed(values: Iterable[onnx.ValueInfoProto]) -> dict[str, bytes]:
    return {value.name: value.type.SerializeToString() for value in values}


def compare(proto: onnx.ModelProto) -> None:
    whole, light = onnx.shape_inference.infer_shapes(proto).graph, infer_shapes(proto)
    for field in ("input", "value_info", "output"):
        assert typed(getattr(light, field)) == typed(getattr(whole, field))


def test_shapes_are_those_of_onnx():
    proto = make_network()
    compare(proto)
    assert len(proto.graph.initializer[0].raw_data) == 40 * 60 * 4  # untouched
    assert not infer_shapes(proto).initializer[0].raw_data


def test_a_free_axis_takes_the_length():
    (made,) = infer_shapes(make_network(), length=7).value_info
    assert [axis.dim_value for axis in made.type.tensor_type.shape.dim] == [0, 30, 7, 60]


@pytest.mark.skipif(not FOLDER, reason="needs SHARED_NETWORKS")
def test_shapes_of_real_networks():
    paths = sorted(Path(FOLDER or "").glob("*/*.onnx"))
    assert paths
    for path in paths:
        compare(onnx.load(path))
