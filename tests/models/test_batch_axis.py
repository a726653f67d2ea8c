"""Sizes that a graph computes become constants, for any batch size."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import helper, numpy_helper, parser

from resnet8ptq.graph.session import open_runner
from resnet8ptq.graph.torch_module import to_torch_module
from resnet8ptq.models import conversion
from resnet8ptq.models.batch_axis import find_data_sized, fix_sizes, in_full_batches
from resnet8ptq.models.normalization import name_nodes, normalize
from tests.helpers.onnx_networks import IMAGES, RANDOM, build

LENGTH, WIDTH = 5, 4
CONSTANTS = {
    "token": np.arange(WIDTH, dtype=np.float32).reshape(1, 1, WIDTH),
    "weights": np.random.default_rng(0).normal(size=(WIDTH, 3)).astype(np.float32),
    "masks": np.random.default_rng(2).normal(size=(1, LENGTH, 1, WIDTH)).astype(np.float32),
    "windows": np.array([-1, 1, WIDTH]),
    "whole": np.array([-1, LENGTH, WIDTH]),
    "pair": np.array([1, WIDTH]),
    "rest": np.array([-1]),
    "four": np.array([WIDTH]),
    "seven": np.array([7]),
    "length": np.array([LENGTH]),
    **{name: np.array(value) for name, value in {"zero": 0, "one": 1, "count": LENGTH}.items()},
    **{f"axis{n}": np.array([n]) for n in range(4)},
}
CLASS_TOKEN = """
    rows = Gather(shape, axis0)
    sizes = Concat<axis = 0>(rows, pair)
    tokens = Expand(token, sizes)
    first = Slice(x, axis0, axis1, axis1)
    same = Reshape(first, sizes)
    joined = Concat<axis = 1>(tokens, same)
"""
WIDENED = """
    rows = Gather(shape, axis0)
    first = Slice(x, axis0, axis1, axis1)
    sizes = Concat<axis = 0>(rows, length, axis1)
    second = Expand(first, sizes)
    joined = Mul(second, x)
"""
# As windows of pictures have a mask each, whichever the picture.
WINDOWS = """
    rows = Gather(shape, axis0)
    sizes = Concat<axis = 0>(rows, length, pair)
    parts = Unsqueeze(x, axis2)
    flat = Reshape(parts, windows)
    tiled = Expand(masks, sizes)
    mask = Reshape(tiled, windows)
    masked = Mul(flat, mask)
    joined = Reshape(masked, whole)
"""
# As attention puts its heads beside the samples.
HEADS = """
    rows = Gather(shape, axis0)
    pairs = Mul(rows, axis2)
    sizes = Concat<axis = 0>(pairs, axis2, rest)
    wide = Concat<axis = 2>(x, x)
    turned = Transpose<perm = [0, 2, 1]>(wide)
    heads = Reshape(turned, sizes)
    exp = Softmax(heads)
    back = Concat<axis = 0>(rows, rest, length)
    joined_heads = Reshape(exp, back)
    halves = Transpose<perm = [0, 2, 1]>(joined_heads)
    joined = Slice(halves, axis0, four, axis2)
"""
RESIZED = """
    rows = Gather(shape, axis0)
    sizes = Concat<axis = 0>(rows, length, seven)
    wide = Resize<mode = "linear">(x, , , sizes)
    joined = Slice(wide, axis0, four, axis2)
"""
# The index of each sample, and of each position.
POSITIONS = """
    rows = Gather(shape, zero)
    samples = Range(zero, rows, one)
    column = Unsqueeze(samples, axis1)
    places = Range(zero, count, one)
    line = Unsqueeze(places, axis0)
"""
# As transformers pools the last token of a text.
LAST = f"""
    {POSITIONS}
    sums = ReduceSum<keepdims = 0>(x, axis2)
    last = ArgMax<axis = 1, keepdims = 0>(sums)
    place = Unsqueeze(last, axis1)
    indices = Concat<axis = 1>(column, place)
    picked = GatherND(x, indices)
    joined = Unsqueeze(picked, axis1)
"""
# As transformers reads its masks: at the indices of each sample and each position.
READ = f"""
    {POSITIONS}
    counts = Gather(shape, axis0)
    sizes = Concat<axis = 0>(counts, length)
    by_sample = Expand(column, sizes)
    by_place = Expand(line, sizes)
    deep = Unsqueeze(by_sample, axis2)
    deeper = Unsqueeze(by_place, axis2)
    indices = Concat<axis = 2>(deep, deeper)
    sums = ReduceSum<keepdims = 0>(x, axis2)
    read = GatherND(sums, indices)
    kept = Unsqueeze(read, axis2)
    joined = Mul(kept, x)
"""
# The same by torch's older exporter: at a running index of all samples.
READ_FLAT = f"""
    {POSITIONS}
    before = Mul(column, count)
    indices = Add(before, line)
    sums = ReduceSum<keepdims = 0>(x, axis2)
    added = CumSum(sums, one)
    flat = Flatten<axis = 2>(added)
    kept = Gather(flat, indices)
    joined = Mul(kept, x)
"""
# An empty tensor of each sample's own, as of a detector that finds nothing.
EMPTY = """
    rows = Gather(shape, axis0)
    sizes = Concat<axis = 0>(rows, axis0, four)
    nothing = ConstantOfShape(sizes)
    joined = Concat<axis = 1>(x, nothing)
"""
REVERSED = READ.replace("by_place = Expand(line,", "by_place = Expand(backwards,").replace(
    "counts =", "last = Sub(count, one)\n backwards = Sub(last, line)\n counts ="
)


def make(nodes: str) -> onnx.ModelProto:
    proto = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[N, {LENGTH}, {WIDTH}] x) => (float[N, 3] logits) {{
            shape = Shape(x)
            {nodes}
            pooled = ReduceMean<axes = [1], keepdims = 0>(joined)
            logits = MatMul(pooled, weights)
        }}""")
    proto.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in CONSTANTS.items())
    proto = normalize(proto)
    name_nodes(proto.graph)
    return proto


_COUNTED = {"Shape", "Gather", "Range"}
_REPEATED = {"Shape", "Gather", "Concat", "Expand", "Reshape"}


@pytest.mark.parametrize(
    ("nodes", "kinds"),
    [
        (CLASS_TOKEN, _REPEATED | {"Slice"}),
        (WIDENED, {"Slice", "Expand", "Mul"}),
        (WINDOWS, _REPEATED | {"Unsqueeze", "Mul"}),
        (HEADS, {"Concat", "Transpose", "Reshape", "Softmax", "Slice"}),
        (RESIZED, {"Resize", "Slice"}),
        (READ, {"ReduceSum", "Reshape", "Unsqueeze", "Mul"}),
        (READ_FLAT, {"ReduceSum", "CumSum", "Flatten", "Reshape", "Mul"}),
        (LAST, {*_COUNTED, "ReduceSum", "ArgMax", "Unsqueeze", "Concat", "GatherND"}),
    ],
    ids=["class_token", "widened", "windows", "heads", "resized", "mask", "flat_mask", "last"],
)
def test_torch_traces_what_counts_samples(nodes, kinds):
    proto = make(nodes)
    x = np.random.default_rng(1).normal(size=(6, LENGTH, WIDTH)).astype(np.float32)
    fixed = fix_sizes(proto, x[:1], None)
    assert {node.op_type for node in fixed.graph.node} == {*kinds, "ReduceMean", "MatMul"}
    expected, *_ = open_runner(proto.SerializeToString())(x)
    module = to_torch_module(fixed)
    traced = torch.fx.symbolic_trace(module)
    free = {0: torch.export.Dim("n", min=1, max=64)}
    exported = torch.export.export(module, (torch.from_numpy(x),), dynamic_shapes=(free,)).module()
    for count in (1, 4, 6):
        [logits] = open_runner(fixed.SerializeToString())(x[:count])
        np.testing.assert_allclose(logits, expected[:count], atol=1e-5)
        for run in (traced, exported):
            made = run(torch.from_numpy(x[:count])).detach().numpy()
            np.testing.assert_allclose(made, expected[:count], atol=1e-5)


@pytest.mark.parametrize(
    ("nodes", "kinds"),
    [(REVERSED, {"GatherND"}), (EMPTY, {"Concat", "ReduceMean", "MatMul"})],
    ids=["elements_in_another_order", "an_empty_tensor"],
)
def test_the_output_stays_that_of_any_number_of_samples(nodes, kinds):
    proto = make(nodes)
    x = np.random.default_rng(1).normal(size=(6, LENGTH, WIDTH)).astype(np.float32)
    fixed = fix_sizes(proto, x[:1], None)
    found = {node.op_type for node in fixed.graph.node}
    assert found >= kinds and "ConstantOfShape" not in found
    for count in (1, 4):
        expected, made = (open_runner(p.SerializeToString())(x[:count]) for p in (proto, fixed))
        np.testing.assert_array_equal(expected[0], made[0])


# A batch size that the file fixes


def reshape(*shape: int) -> tuple[list[onnx.NodeProto], dict[str, NDArray]]:
    nodes = [helper.make_node("Reshape", ["relu", "shape"], ["middle"])]
    return nodes, {"shape": np.array(shape, np.int64)}


def constant_reshape(batch: int) -> tuple[list[onnx.NodeProto], dict[str, NDArray]]:
    return reshape(batch, 8, 32, 32)


def computed_reshape(batch: int) -> tuple[list[onnx.NodeProto], dict[str, NDArray]]:
    """As torch's older exporters wrote `x.view(x.size(0), -1, 32, 32)`."""
    nodes = [
        helper.make_node("Shape", ["relu"], ["shape of relu"]),
        helper.make_node("Gather", ["shape of relu", "zero"], ["size"], axis=0),
        helper.make_node("Unsqueeze", ["size"], ["sizes"], axes=[0]),
        helper.make_node("Concat", ["sizes", "rest"], ["shape"], axis=0),
        helper.make_node("Reshape", ["relu", "shape"], ["middle"]),
    ]
    return nodes, {"zero": np.array(0), "rest": np.array([-1, 32, 32])}


def weights_behind_a_reshape(batch: int) -> tuple[list[onnx.NodeProto], dict[str, NDArray]]:
    nodes = [
        helper.make_node("Reshape", ["flat weights", "of weights"], ["weights"]),
        helper.make_node("Conv", ["relu", "weights"], ["middle"]),
    ]
    return nodes, {
        "flat weights": RANDOM.normal(0, 1, (1, 64)).astype(np.float32),
        "of weights": np.array([8, 8, 1, 1]),
    }


@pytest.mark.parametrize("declared", ["fixed", "free"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "middle",
    [constant_reshape, computed_reshape, weights_behind_a_reshape],
    ids=lambda f: f.__name__,
)
def test_a_fixed_batch_is_freed(take, tmp_path, middle, batch, declared):
    if declared == "free" and batch != 1:
        pytest.skip("a graph that says nothing is tried with 1")
    nodes, constants = middle(batch)
    size = batch if declared == "fixed" else "B"
    proto = build(11, takes=[size, 32, 32, 3], middle=nodes, constants=constants)
    record = take(proto)
    assert record.contract.batch is record.why_fixed is None
    assert not record.without_torch
    session = onnxruntime.InferenceSession(tmp_path / "made" / conversion.UNFOLDED)
    assert session.get_inputs()[0].shape[0] == session.get_outputs()[0].shape[0] == "N"
    assert session.run(None, {"pixels:0": IMAGES[:7]})[0].shape == (7, 10)
    graph = onnx.load(tmp_path / "made" / conversion.UNFOLDED).graph
    constant = {tensor.name for tensor in graph.initializer}
    assert not {"Shape", "Gather", "Concat"} & {node.op_type for node in graph.node}
    assert all(n.input[1] in constant for n in graph.node if n.op_type in ("Reshape", "Conv"))


def test_a_batch_that_cannot_be_freed_stays_fixed_and_is_reported(take, tmp_path):
    nodes = [helper.make_node("Add", ["relu", "each"], ["middle"])]
    weights = {"each": np.arange(4, dtype=np.float32).reshape(4, 1, 1, 1)}
    record = take(build(takes=[4, 32, 32, 3], gives=[4, 10], middle=nodes, constants=weights))
    assert record.contract.batch == 4
    assert record.why_fixed
    assert max(record.parity.values()) < 1e-5
    [value] = onnx.load(tmp_path / "made" / conversion.FOLDED).graph.input
    assert value.type.tensor_type.shape.dim[0].dim_value == 4


@settings(max_examples=30)
@given(count=st.integers(1, 9), size=st.integers(1, 5))
def test_any_number_of_samples_fills_up_a_fixed_batch(count, size):
    def run(samples: NDArray) -> list[NDArray]:
        assert len(samples) == size
        return [samples * 2, samples.sum(1)]

    samples = np.arange(count * 3, dtype=np.float32).reshape(count, 3)
    doubled, summed = in_full_batches(run, size)(samples)
    assert np.array_equal(doubled, samples * 2)
    assert np.array_equal(summed, samples.sum(1))


def test_an_omitted_input_does_not_depend_on_an_omitted_output():
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[4] x, float m) => (float[U] u, float[4] y) {
            u, indices = Unique(x)
            y = Clip(x, lowest, m)
        }"""
    )
    unique, clip = proto.graph.node
    unique.output[1] = ""
    clip.input[1] = ""
    assert find_data_sized(proto).keys() == {"u"}


def test_a_reshape_that_copies_the_batch_leaves_the_length_free():
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[N, L, 4] x) => (float[N, 4, M] y)
        <int64[1] zero = {0}, int64[1] one = {1}, int64[1] rest = {-1}> {
            sizes = Shape(x)  length = Gather(sizes, one)
            shape = Concat <axis = 0> (zero, rest, length)  y = Reshape(x, shape)
        }"""
    )
    name_nodes(proto.graph)
    fixed = fix_sizes(proto, np.zeros((1, 6, 4), np.float32), None, ["x"])
    values = np.arange(40, dtype=np.float32).reshape(2, 5, 4)
    [result] = open_runner(fixed)(values)
    assert np.array_equal(result, values.reshape(2, 4, 5))


@pytest.mark.parametrize("branch", ["chosen = NonZero(x)", "chosen = Identity(places)"])
def test_the_size_of_a_branch_that_counts_is_free(branch):
    """As of a detector that has a branch for pictures without boxes."""
    proto = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[2, 4] x, bool some) => (int64[2, U] y) {{
            places = NonZero(x)
            y = If(some) <
                then_branch = yes () => (int64[2, U] chosen) {{ {branch} }},
                else_branch = no () => (int64[2, U] none) {{
                    none = Constant <value = int64[2, 0] {{}}> () }}>
        }}"""
    )
    if "places" not in branch:
        del proto.graph.node[0]
    assert find_data_sized(proto).keys() == {"y"}
