"""The nodes to quantize in a network with attention."""

import onnx
import pytest

from resnet8ptq.core.errors import ConfigError
from resnet8ptq.precision.plan import (
    Selection,
    find_float_nodes,
    find_quantized_layers,
    find_quantized_products,
)
from tests.helpers import onnx_networks, transformers

GRAPH = transformers.build().graph


def quantized(selection: Selection) -> list[str]:
    left = set(find_float_nodes(GRAPH, selection))
    return [node.name for node in GRAPH.node if node.name not in left]


def test_the_default_quantizes_layers_with_weights():
    assert quantized(Selection()) == transformers.LAYERS
    assert list(find_quantized_layers(GRAPH, Selection())) == transformers.LAYERS
    assert find_quantized_products(GRAPH, Selection()) == {}


def test_products_and_all_widen_it():
    selection = Selection(attention="products")
    assert list(find_quantized_products(GRAPH, selection)) == transformers.PRODUCTS
    assert find_float_nodes(GRAPH, Selection(attention="all")) == []


def test_named_nodes_and_operators_take_precedence():
    assert quantized(Selection(nodes_to_quantize=["block/scores"])) == ["block/scores"]
    assert "LayerNormalization" not in {*quantized(Selection(op_types=["MatMul"]))}
    assert "block/mixed" in quantized(Selection(op_types=["MatMul"]))


def test_a_plan_names_products():
    planned = quantized(Selection(bits={"block.scores": 8}))
    assert {*planned} == {*transformers.LAYERS, "block/scores"}
    left = quantized(Selection(float_layers=["block.scores"], attention="products"))
    assert {*left} == {*transformers.LAYERS, "block/mixed"}


def test_a_product_has_no_weights_below_8_bits():
    with pytest.raises(
        ConfigError, match=r"precision\.plan: got 4 for block\.scores, expected 8 or"
    ):
        find_float_nodes(GRAPH, Selection(bits={"block.scores": 4}))


@pytest.mark.parametrize("attention", ["weights", "products", "all"])
def test_nothing_changes_without_attention(attention):
    assert find_float_nodes(onnx_networks.build().graph, Selection(attention=attention)) == []


@pytest.mark.parametrize(
    ("scores", "tail"),
    [("Sigmoid(rows)", ["scores", "joined", "turned"]), ("Reshape(rows, same)", [])],
)
def test_a_tail_that_joins_values_of_different_kinds_stays_in_float(scores, tail):
    """As a detector joins its boxes in pixels with its scores."""
    graph = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        network (float[N, 3] x) => (float[7, N] y)
        <float[3, 4] w = {{0,0,0,0,0,0,0,0,0,0,0,0}}, float[3, 3] v = {{0,0,0,0,0,0,0,0,0}},
         int64[2] same = {{0, 0}}> {{
            [boxes] boxes = MatMul(x, w)
            [rows] rows = MatMul(x, v)
            [scores] scores = {scores}
            [joined] joined = Concat<axis = 1>(boxes, scores)
            [turned] y = Transpose(joined)
        }}"""
    ).graph
    assert find_float_nodes(graph, Selection(float_tail=None)) == tail
    assert find_float_nodes(graph, Selection(float_tail=False)) == []
