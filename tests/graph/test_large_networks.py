"""A network of 20,000 nodes passes through every pass.

A pass that visits all nodes for each node takes minutes here, and others a second.
"""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from resnet8ptq.graph.attention import attention_products, left_by_attention
from resnet8ptq.graph.layers import find_copies, find_cuts, find_tail, weight_layers
from resnet8ptq.models.gates import onnx as gate
from tests.helpers.passes import PASSES

NODES = 20_000
# They run the network in ONNX Runtime, which takes minutes to load it.
RUN_IT = (
    *("batch_axis.fix_sizes", "branches.take_branches", "folding.fold_batch_norms"),
    "onnx_converter._to_dense_layers",
)
READERS = (attention_products, find_copies, find_cuts, find_tail, left_by_attention, weight_layers)


@pytest.fixture(scope="module")
def network() -> onnx.ModelProto:
    """A chain of Conv, Relu and Add; every second Conv shares its weights with half of them."""
    nodes, name = [], "x"
    weights = {"w": np.eye(2)[..., None, None], "b": np.zeros(2), "one": np.ones((1, 2, 1, 1))}
    for number in range(NODES // 3):
        layer = [name, "w", "b"]
        if number % 2:
            layer = [name, f"w{number}", f"b{number}"]
            weights |= {layer[1]: weights["w"] / 2, layer[2]: weights["b"]}
        steps = [("Conv", layer, "conv"), ("Relu", [f"conv{number}"], "relu")]
        steps.append(("Add", [f"relu{number}", "one"], "add"))
        for kind, inputs, output in steps:
            made = f"{output}{number}"
            nodes.append(helper.make_node(kind, inputs, [made], made))
            name = made
    tensors = [numpy_helper.from_array(v.astype(np.float32), key) for key, v in weights.items()]
    takes, gives = (
        [helper.make_tensor_value_info(key, TensorProto.FLOAT, ["N", 2, 3, 3])]
        for key in ("x", name)
    )
    graph = helper.make_graph(nodes, "chain", takes, gives, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("name", sorted(PASSES.keys() - {*RUN_IT}))
def test_pass_takes_a_large_network(network, name):
    assert len(PASSES[name](network).graph.node) >= NODES - 2


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_reader_takes_a_large_network(network, read):
    read(network.graph)


def test_gate_takes_a_large_network(network, tmp_path):
    path = tmp_path / "network.onnx"
    onnx.save(network, path)
    gate.check_layers(gate.read_onnx(path), path)
