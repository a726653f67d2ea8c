"""Folding a constant factor into the layer before it: by channel only, and with one reader only."""

import numpy as np
import onnx
import pytest
from onnx import parser

from resnet8ptq.graph.session import open_runner
from resnet8ptq.models.folding import fold_into_products

RANDOM = np.random.default_rng(0)


def network(
    product: str, shape: tuple[int, ...], outputs: str = "float[N, A, B] y"
) -> onnx.ModelProto:
    proto = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        network (float[N, 4, 3] x) => ({outputs}) {{ p = {product}  y = Mul(p, c) }}"""
    )
    for name, sizes in {"w": (3, 4), "b": (4,), "c": shape}.items():
        values = RANDOM.normal(size=sizes).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return proto


@pytest.mark.parametrize(
    ("shape", "folds"),
    [((), True), ((1,), True), ((4,), True), ((1, 4), True), ((4, 1), False), ((4, 4), False)],
)
def test_constant_is_folded_only_along_the_channels(shape, folds):
    """A factor [4, 1] belongs to the second axis, which has as many values as channels."""
    proto = network("MatMul(x, w)", shape)
    samples = RANDOM.normal(size=(2, 4, 3)).astype(np.float32)
    [before] = open_runner(proto)(samples)
    fold_into_products(proto.graph)
    [after] = open_runner(proto)(samples)
    assert ([node.op_type for node in proto.graph.node] == ["MatMul"]) == folds
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


def test_constant_that_adds_an_axis_is_not_folded():
    proto = network("MatMul(x, w)", (1, 1, 1, 4))
    fold_into_products(proto.graph)
    assert [node.op_type for node in proto.graph.node] == ["MatMul", "Mul"]


def test_layer_whose_output_is_returned_is_not_folded():
    proto = network("MatMul(x, w)", (4,), outputs="float[N, A, B] y, float[N, A, B] p")
    fold_into_products(proto.graph)
    assert [node.op_type for node in proto.graph.node] == ["MatMul", "Mul"]
