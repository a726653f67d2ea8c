"""Attention in ONNX graphs: detected whatever is between its products, and nothing else is."""

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper, parser

from resnet8ptq.graph.attention import (
    attention_products,
    find_attention,
    left_by_attention,
    stretched_by_masks,
)
from resnet8ptq.graph.layers import weight_layers
from tests.helpers import onnx_networks, transformers

BETWEEN = ["Mul", "Div", "Add", "Cast", "Clip", "Identity", "Dropout", "Tanh"]


def parse(body: str) -> onnx.GraphProto:
    head = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>'
    signature = "g (float[2, 4, 4] x) => (float[2, 4, 4] y)"
    return parser.parse_model(f"{head} {signature} {{ {body.replace(';', ' ')} }}").graph


def test_products_have_names_beside_those_of_the_layers():
    graph = transformers.build().graph
    assert list(attention_products(graph)) == transformers.PRODUCTS
    assert list(weight_layers(graph)) == transformers.LAYERS


def test_products_in_another_scope_than_all_layers_have_other_names():
    graph = parse(
        "q = MatMul(x, w); k = MatMul(x, w); s = MatMul(q, k); p = Softmax(s); y = MatMul(p, x)"
    )
    graph.initializer.append(numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    names = ["net/heads/b", "net/heads/c", "net/b", "net/softmax", "net/c"]
    for node, name in zip(graph.node, names, strict=True):
        node.name = name
    layers = weight_layers(graph)
    products = attention_products(graph)
    assert list(layers) == ["b", "c"]
    assert [node.name for node in products.values()] == ["net/b", "net/c"]
    assert products.keys().isdisjoint(layers)


@given(
    st.lists(st.sampled_from(BETWEEN), max_size=4), st.lists(st.sampled_from(BETWEEN), max_size=4)
)
def test_scales_masks_and_moves_may_be_between(before, after):
    lines = ["s0 = MatMul(x, x)"]
    for part, start, kinds in (("s", "s0", before), ("p", "p0", after)):
        last = start
        for index, kind in enumerate(kinds, 1):
            more = ", x" if kind in ("Mul", "Div", "Add") else ""
            name = f"{part}{index}"
            lines.append(f"{name} = {kind}{'<to = 1>' if kind == 'Cast' else ''}({last}{more})")
            last = name
        lines.append(f"p0 = Softmax({last})" if part == "s" else f"y = MatMul({last}, x)")
    products = find_attention(parse("; ".join(lines)))
    assert [node.output[0] for node in products] == ["s0", "y"]


@pytest.mark.parametrize(
    "body",
    [
        "y = Softmax(x)",
        "s = MatMul(x, x); y = Softmax(s)",  # nothing takes the probabilities
        "p = Softmax(x); y = MatMul(p, x)",  # not made of scores
        "s = MatMul(x, x); r = Relu(s); p = Softmax(r); y = MatMul(p, x)",  # a layer between
        "w = Constant<value = float[1, 4, 4] {}>(); s = MatMul(x, w); p = Softmax(s); "
        "y = MatMul(p, x)",  # attention pooling: the scores are a layer's
    ],
)
def test_no_attention(body):
    body = body.replace("{}", "{" + ", ".join(["1.0"] * 16) + "}")
    graph = parse(body)
    assert (find_attention(graph), left_by_attention(graph)) == ([], [])


def test_a_whole_operator_is_attention():
    graph = parse("y = com.microsoft.MultiHeadAttention<num_heads = 1>(x, x, x)")
    assert [node.op_type for node in find_attention(graph)] == ["MultiHeadAttention"]
    assert attention_products(graph) == {}


def test_layers_with_weights_stay_quantized():
    graph = transformers.build().graph
    left = {node.name for node in left_by_attention(graph)}
    assert [node.name for node in graph.node if node.name not in left] == transformers.LAYERS
    wider = {node.name for node in left_by_attention(graph, products=True)}
    assert left - wider == {"block/scores", "block/mixed"}


def test_a_network_without_attention_leaves_nothing():
    assert left_by_attention(onnx_networks.build().graph) == []


@pytest.mark.parametrize("constant", [-1e4, -np.inf, float(np.finfo(np.float32).min), 1e3])
def test_a_mask_stretches_the_scores(constant):
    stretched = stretched_by_masks(transformers.build(mask=constant).graph)
    assert {name: [n.name for n in nodes] for name, nodes in stretched.items()} == {
        "masked": ["masked", "weights"]
    }


@pytest.mark.parametrize("constant", [None, 0.0, -9.0, 999.0])
def test_small_constants_stretch_nothing(constant):
    assert stretched_by_masks(transformers.build(mask=constant).graph) == {}


def test_a_mask_that_is_computed_stretches_too():
    graph = parse(
        "s = MatMul(x, x); c = Constant<value = float {-10000.0}>(); m = Mul(x, c); "
        "a = Add(s, m); p = Softmax(a); y = MatMul(p, x)"
    )
    assert list(stretched_by_masks(graph)) == ["m", "a"]
