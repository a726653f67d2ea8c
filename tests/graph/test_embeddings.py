"""Tables of embeddings in 8 bits by row."""

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from onnx import numpy_helper, parser

from resnet8ptq.backends.onnx.rewriting import quantize_tables
from resnet8ptq.graph.embeddings import find_tables, find_tied, round_rows
from resnet8ptq.graph.passes import remove_unused, rewrite
from resnet8ptq.graph.session import open_runner

TABLES = npst.arrays(
    np.float32,
    npst.array_shapes(min_dims=2, max_dims=2, max_side=6),
    elements=st.floats(-9, 9, width=32),
)


@given(TABLES)
def test_a_value_is_off_by_half_a_step_of_its_row_at_most(table):
    levels, scale = round_rows(table)
    steps = np.abs(table).max(axis=1, keepdims=True) / 127
    assert (np.abs(levels * scale - table) <= 0.5001 * steps + 1e-30).all()


def network(axis: int = 0, shared: bool = False) -> onnx.ModelProto:
    """Return rows of a table, by an input and by a constant; `shared`: also multiplied by it."""
    product = "p = MatMul(rows, table)" if shared else "p = Relu(rows)"
    proto = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 17]>
        g (int64[N, L] ids, float[4, 4] picked)
        => (float[N, L, 4] p, float[1, 4] first, float[A] c) {{
            rows = Gather <axis: int = {axis}> (table, ids)
            first = Gather(table, zero)
            c = Gather(picked, ids)
            {product}
        }}""")
    for index, node in enumerate(proto.graph.node):
        node.name = f"node{index}"
    table = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(table, "table"))
    proto.graph.initializer.append(numpy_helper.from_array(np.array([0]), "zero"))
    return proto


@pytest.mark.parametrize(("axis", "names"), [(0, ["node0"]), (1, [])])
def test_tables_are_gathers_of_constant_rows_by_computed_indices(axis, names):
    assert [node.name for node in find_tables(network(axis).graph)] == names


@pytest.mark.parametrize("change", [None, np.transpose, np.negative])
def test_a_product_with_the_weights_of_a_table_is_tied_to_it(change):
    """Folding stores the transpose of a table as a constant of its own."""
    proto = network(shared=True)
    graph = proto.graph
    if change is not None:
        table = numpy_helper.to_array(graph.initializer[0])
        graph.initializer.append(numpy_helper.from_array(change(table).copy(), "changed"))
        graph.node[3].input[1] = "changed"
    tied = [(table.name, product.name) for table, product in find_tied(graph)]
    assert tied == ([] if change is np.negative else [("node0", "node3")])


@pytest.mark.parametrize("shared", [False, True])
def test_rows_are_rounded_and_other_readers_keep_the_float_table(shared):
    proto = network(shared=shared)
    table = numpy_helper.to_array(proto.graph.initializer[0])
    proto = rewrite(proto, [quantize_tables(["node0"]), remove_unused])
    onnx.checker.check_model(proto)
    del proto.graph.output[1:], proto.graph.input[1:]
    ids = np.array([[0, 3, 1]])
    levels, scale = round_rows(table)
    rows = (levels * scale)[ids]
    expected = rows @ table if shared else np.maximum(rows, 0)
    del proto.graph.node[[n.output[0] for n in proto.graph.node].index("c")]
    np.testing.assert_allclose(open_runner(proto)(ids)[0], expected, rtol=1e-5)


def test_constants_of_inner_graphs_stay():
    proto = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (int64[N] ids, bool b) => (float[N, 4] y) {
            rows = Gather(table, ids)
            added = If (b) <
                then_branch = t () => (float[4] a) { a = Identity(ones) },
                else_branch = e () => (float[4] d) {
                    i = Constant <value_int = 1>()
                    d = Gather(table, i)
                }
            >
            y = Add(rows, added)
        }""")
    table, ones = np.eye(4, dtype=np.float32), np.ones(4, np.float32)
    for name, values in (("table", table), ("ones", ones)):
        proto.graph.initializer.append(numpy_helper.from_array(values, name))
    proto.graph.node[0].name = "lookup"
    proto = rewrite(proto, [quantize_tables(["lookup"])])
    run = onnxruntime.InferenceSession(proto.SerializeToString()).run
    for branch, added in ((True, ones), (False, table[1])):
        [values] = run(None, {"ids": np.array([0, 2]), "b": np.array(branch)})
        np.testing.assert_allclose(values, table[[0, 2]] + added)
