"""Normalized graphs compute the same, and mean the same in every framework."""

import copy

import numpy as np
import onnx
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from onnx import helper

from resnet8ptq.core.errors import ModelError
from resnet8ptq.graph.layers import attribute, find_offset_clips
from resnet8ptq.graph.session import open_runner
from resnet8ptq.models import normalization
from resnet8ptq.models.batch_axis import fix_sizes
from resnet8ptq.models.normalization import copy_shared_weights, write_ceil_mode, write_explicitly
from tests.helpers.assembling import assemble

RANDOM = np.random.default_rng(0)
NUMBERS = st.integers(1, 3)


@given(
    kind=st.sampled_from(["AveragePool", "MaxPool"]),
    sizes=st.tuples(st.integers(3, 8), st.integers(3, 8)),
    kernel=st.tuples(NUMBERS, NUMBERS),
    strides=st.tuples(NUMBERS, NUMBERS),
    pads=st.tuples(*[st.integers(0, 2)] * 4),
    counts=st.booleans(),
)
def test_pool_in_ceil_mode_computes_the_same(kind, sizes, kernel, strides, pads, counts):
    assume(all(pad < size for pad, size in zip(pads, kernel * 2, strict=True)))
    window = {"kernel_shape": kernel, "strides": strides, "pads": pads, "ceil_mode": 1}
    if kind == "AveragePool":
        window["count_include_pad"] = int(counts)
    pool = helper.make_node(kind, ["x"], ["y"], **window)
    proto = assemble([pool], {"x": ["N", 2, *sizes]}, {"y": [None] * 4}, {}, opset=19)
    samples = RANDOM.normal(size=(2, 2, *sizes)).astype(np.float32)
    [expected] = open_runner(proto)(samples)
    written = onnx.ModelProto()
    written.CopyFrom(proto)
    write_ceil_mode(written)
    [values] = open_runner(written)(samples)
    np.testing.assert_allclose(values, expected, atol=1e-6)
    last = written.graph.node[-1]
    whole = [
        (n + a + b - k) // s + 1
        for n, a, b, k, s in zip(sizes, pads[:2], pads[2:], kernel, strides, strict=True)
    ]
    assert attribute(last, "ceil_mode", 0) == (list(expected.shape[2:]) != whole)
    assert not (attribute(last, "ceil_mode", 0) and attribute(last, "count_include_pad", 0))


def test_layers_do_not_share_a_bias():
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["h"]),
        helper.make_node("Gemm", ["h", "w", "b"], ["g"]),
        helper.make_node("Add", ["g", "b"], ["y"]),
    ]
    constants = {"w": np.eye(4, dtype=np.float32), "b": np.ones(4, np.float32)}
    proto = assemble(nodes, {"x": ["N", 4]}, {"y": ["N", 4]}, constants)
    copy_shared_weights(proto.graph)
    assert len({name for node in proto.graph.node for name in node.input if name[0] == "b"}) == 3
    assert {node.input[1] for node in proto.graph.node[:2]} == {"w"}


@pytest.mark.parametrize("sizes", [(2, 4), (3, 4)])
def test_an_output_with_a_fixed_number_of_rows_is_refused(sizes):
    """Two rows for two samples, and two for three."""
    nodes = [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("Neg", ["t"], ["table"])]
    constants = {"t": np.ones(sizes, np.float32)}
    outputs = {"y": ["N", 4], "table": sizes}
    proto = assemble(nodes, {"x": ["N", 4]}, outputs, constants)
    with pytest.raises(ModelError, match=r"'table'.*model\.outputs=\[y\]"):
        fix_sizes(proto, np.zeros((1, 4), np.float32), None)


@pytest.mark.parametrize(
    ("low", "high", "lacks"),
    [(-1, 1, False), (0, 6, False), (0.1, 1, True), (-1, -0.1, True), (None, 1, False)],
)
@pytest.mark.parametrize("computed", [True, False])
def test_clips_whose_interval_may_lack_0_are_found(low, high, lacks, computed):
    ends = {"low": low, "high": high}
    constants = {name: np.float32(end) for name, end in ends.items() if end is not None}
    names = [name if name in constants else "" for name in ends]
    nodes = [helper.make_node("Neg", ["high"], ["computed"])] if computed else []
    inputs = ["x", names[0], "computed"] if computed else ["x", *names]
    nodes.append(helper.make_node("Clip", inputs, ["y"], "clip"))
    proto = assemble(nodes, {"x": ["N", 4]}, {"y": ["N", 4]}, constants)
    assert find_offset_clips(proto.graph) == (["clip"] if lacks or computed else [])


@pytest.mark.parametrize("axes", [[-1], [2, 0], [0, 1, 2]])
def test_widths_of_a_pad_are_written_for_all_axes(axes):
    widths = np.arange(2 * len(axes))
    constants = {"widths": widths, "value": np.float32(2), "axes": np.array(axes)}
    pad = helper.make_node("Pad", ["x", *constants], ["y"])
    proto = assemble([pad], {"x": ["N", 3, 4]}, {"y": [None] * 3}, constants, opset=18)
    samples = RANDOM.normal(size=(2, 3, 4)).astype(np.float32)
    [expected] = open_runner(proto)(samples)
    proto = write_explicitly(proto)
    [values] = open_runner(proto)(samples)
    assert len(proto.graph.node[0].input) == 3
    np.testing.assert_array_equal(values, expected)


def einsum(equation: str, weights_first: bool, shared: bool = False) -> onnx.ModelProto:
    """Return a network of an Einsum of x [N, 3, 4] and weights; `shared`: of two with the same."""
    first, second = equation.split("->")[0].split(",")
    axes = first if weights_first else second
    axes = axes.strip()
    sizes = {"b": 2, "t": 3, "d": 4, "h": 5, "k": 6}
    weights = np.random.default_rng(0).normal(size=[sizes[axis] for axis in axes])
    names = ["w", "x"] if weights_first else ["x", "w"]
    outputs = ["y", "z"] if shared else ["y"]
    nodes = []
    for name in outputs:
        nodes.append(helper.make_node("Einsum", names, [name], name=name, equation=equation))
    rank = len(equation.split("->")[1])
    gives = {name: [None] * rank for name in outputs}
    return assemble(nodes, {"x": ["N", 3, 4]}, gives, {"w": weights.astype(np.float32)})


@pytest.mark.parametrize(
    ("equation", "weights_first"),
    [
        ("btd,dhk->bthk", False),
        ("btd,dhk->bhtk", False),
        ("btd, htd -> bh", False),
        ("btd,tdh->bh", False),
        ("btd,th->bdh", False),
        ("hd,btd->hbt", True),
    ],
)
def test_an_einsum_of_weights_is_a_product(equation, weights_first):
    model = einsum(equation, weights_first)
    x = np.random.default_rng(1).normal(size=(2, 3, 4)).astype(np.float32)
    expected = open_runner(copy.deepcopy(model))(x)
    written = normalization.store_and_write_products(model)
    operators = [node.op_type for node in written.graph.node]
    assert "MatMul" in operators and "Einsum" not in operators
    assert "w" not in {tensor.name for tensor in written.graph.initializer}
    np.testing.assert_allclose(open_runner(written)(x)[0], expected[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("equation", "weights_first"),
    [("btd,tdk->btk", False), ("btd,d->bt", False), ("btd,td->b", False), ("btd,dh", False)],
)
def test_another_einsum_stays(equation, weights_first):
    model = einsum(equation if "->" in equation else "btd,dh->bth", weights_first)
    model.graph.node[0].attribute[0].s = equation.encode()
    written = normalization.store_and_write_products(model)
    assert [node.op_type for node in written.graph.node] == ["Einsum"]


def test_einsums_that_share_weights_share_the_matrix():
    written = normalization.store_and_write_products(einsum("btd,dhk->bthk", False, shared=True))
    products = [node for node in written.graph.node if node.op_type == "MatMul"]
    assert len({node.input[1] for node in products}) == 1


@pytest.mark.parametrize(
    ("opset", "scales"), [pytest.param(18, 2, id="by-group"), pytest.param(21, 4, id="by-channel")]
)
def test_scales_of_groups_follow_the_opset(opset, scales):
    """Opset 18 has a scale for each group, opset 21 for each channel."""
    proto = normalize_groups("Relu", opset, scales)
    samples = RANDOM.normal(size=(2, 4, 3, 3)).astype(np.float32)
    expected = open_runner(proto)(samples)
    written = write_explicitly(proto)
    assert "InstanceNormalization" in {node.op_type for node in written.graph.node}
    np.testing.assert_allclose(open_runner(written)(samples), expected, atol=1e-5)


def test_groups_of_unknown_size_stay():
    """onnx infers no shape after an operator of another domain."""
    written = write_explicitly(normalize_groups("com.microsoft.Gelu", opset=21, scales=4))
    assert written.graph.node[-1].op_type == "GroupNormalization"


def normalize_groups(before, opset, scales):
    proto = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1]>
        network (float[N, 4, 3, 3] x) => (float[N, 4, 3, 3] y)
        {{ before = {before}(x)  y = GroupNormalization <num_groups = 2> (before, s, b) }}"""
    )
    for name in "sb":
        values = RANDOM.normal(size=scales).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return proto
