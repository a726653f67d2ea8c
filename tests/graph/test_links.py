"""The readers of a tensor: nodes, inner graphs, and the outside of the graph."""

import onnx
from onnx import parser

from resnet8ptq.graph.links import Links, find_computed
from resnet8ptq.graph.passes import name_inner_tensors, remove_unused, rewrite
from resnet8ptq.models.normalization import compute_outputs

NETWORK = """<ir_version: 8, opset_import: ["" : 17]>
network (float[1] x, bool q) => (float[1] y, float[1] w, float[1] seen) <float[1] w = {3.0}> {
    seen = Abs(x)
    alone = Neg(seen)
    unread = Exp(alone)
    y = If(q) <
        then_branch = a () => (float[1] o) { later = Exp(alone) o = Add(later, w) },
        else_branch = b () => (float[1] o) <float[1] alone = {5.0}> { o = Identity(alone) }>
}"""


def test_inner_graphs_and_outputs_are_readers():
    links = Links(parser.parse_model(NETWORK).graph)
    assert [node.op_type for node in links.readers("alone")] == ["Exp", "If"]
    assert links.only_reader("alone") is None
    assert links.only_reader("seen") is None  # an output
    assert links.readers("later") == []  # of the inner graph
    assert [links.is_shared(name) for name in ("w", "x", "seen")] == [True, False, True]


def test_neighbours_of_a_node():
    links = Links(parser.parse_model(NETWORK).graph)
    node = links.producers["unread"]
    assert [other.op_type for other in links.before(node)] == ["Neg"]
    assert [other.op_type for other in links.after(links.producers["alone"])] == ["Exp", "If"]


def test_a_tensor_is_computed_also_through_an_inner_graph_and_never_by_an_empty_name():
    network = """<ir_version: 8, opset_import: ["" : 17]>
    network (float[1] x) => (float[1] y, float[1] z) <bool q = {1}, float[1] w = {3.0}> {
        y = If(q) <
            then_branch = a () => (float[1] o) { o = Neg(x) },
            else_branch = b () => (float[1] p) { p = Neg(w) }>
        dropped, mask = Dropout(x)
        z = Clip(w, , w)
    }"""
    proto = parser.parse_model(network)
    proto.graph.node[1].output[1] = ""  # left out
    assert find_computed(proto.graph) - {""} == {"x", "y", "dropped"}


def test_pruning_keeps_what_inner_graphs_read():
    proto = parser.parse_model(NETWORK)
    proto = rewrite(proto, [remove_unused])
    assert [node.op_type for node in proto.graph.node] == ["Abs", "Neg", "If"]


def test_inner_tensors_get_names_apart():
    proto = parser.parse_model(NETWORK)
    named = name_inner_tensors(proto)
    onnx.checker.check_model(named, full_check=True)
    links = Links(named.graph)
    [then, other] = [item.g for node in named.graph.node for item in node.attribute]
    assert other.initializer[0].name == other.node[0].input[0] != "alone"
    assert then.node[0].input[0] == "alone"
    assert "alone" in links.producers


def test_constant_output_is_computed_by_a_node():
    proto = parser.parse_model(NETWORK)
    proto = rewrite(proto, [compute_outputs])
    onnx.checker.check_model(proto, full_check=True)
    assert Links(proto.graph).producers["w"].op_type == "Identity"


def test_an_input_is_replaced_before_anything_asks_for_readers():
    links = Links(parser.parse_model(NETWORK).graph)
    [node] = [node for node in links.graph.node if node.op_type == "Exp"]
    other = onnx.helper.make_tensor("other", onnx.TensorProto.FLOAT, [1], [2.0])
    links.replace_input(node, 0, other)
    assert links.readers("other") == [node]
    assert [reader.op_type for reader in links.readers("alone")] == ["If"]
