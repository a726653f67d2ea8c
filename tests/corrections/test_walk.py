"""A walk through a network: the same tensors, of which few are made more than once."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from resnet8ptq.core import memory
from resnet8ptq.core.records import pack
from resnet8ptq.corrections import walk
from resnet8ptq.corrections.walk import Walk
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.fields import Field, Fields
from resnet8ptq.graph.layers import find_cuts, weight_layers
from resnet8ptq.graph.session import between, expose, open_runner
from resnet8ptq.graph.weights import read_weights, write_weights
from resnet8ptq.models.model import Fp32Model


@pytest.fixture
def images(shapes: Dataset) -> Split:
    return shapes.train.take(np.arange(20))


@pytest.fixture
def proto(shapes_model: Fp32Model) -> onnx.ModelProto:
    return onnx.load(shapes_model.onnx_path)


@pytest.mark.parametrize("budget", [2**28, 20 * 2**14, 1])
def test_it_yields_what_the_whole_network_makes(proto, images, monkeypatch, budget):
    """Also where a tensor of all images is too large to be kept, and behind weights that change."""
    walked, (whole,) = Walk(proto, images, 8, 1), images.batches(100)
    monkeypatch.setattr(memory, "step", lambda: budget)
    for node in weight_layers(proto.graph).values():
        walked.to(node, "")
        names = [node.input[0], node.output[0]]
        batches = [*walked.run(names)]
        assert [len(batch) for batch, _ in batches] == [8, 8, 4]
        expected = open_runner(expose(proto, names))(whole)
        for result, wanted in zip(zip(*batches, strict=True), expected, strict=True):
            np.testing.assert_allclose(np.concatenate(result), wanted, rtol=1e-4, atol=1e-4)
        write_weights(proto.graph, node, 0.9 * read_weights(proto.graph, node))


def test_a_network_runs_a_few_times_and_not_once_for_each_layer(proto, images, monkeypatch):
    ran = []

    def spy(proto: onnx.ModelProto, source: str, names: list[str]) -> onnx.ModelProto:
        part = between(proto, source, names)
        ran.append(len(part.graph.node))
        return part

    monkeypatch.setattr(walk, "between", spy)
    walked = Walk(proto, images, 8, 1)
    nodes = [*weight_layers(proto.graph).values()]
    for node in nodes:
        walked.to(node, "")
        [*walked.run([node.input[0]])]
    assert sum(ran) < 2 * len(proto.graph.node)


def test_inputs_are_not_read_again_behind_a_cut(proto, images, monkeypatch):
    read = []
    whole = Split.batches
    monkeypatch.setattr(
        Split, "batches", lambda *args, **named: read.append(1) or whole(*args, **named)
    )
    walked = Walk(proto, images, 8, 1)
    *_, last = weight_layers(proto.graph).values()
    walked.to(last, "")
    before = len(read)
    [*walked.run([last.input[0], last.output[0]])]
    assert len(read) == before


def test_a_cut_is_what_all_that_follows_depends_on():
    """Neither one of two branches, nor a constant, nor what nobody takes."""
    nodes = [
        helper.make_node("Constant", [], ["one"], value_float=1.0),
        helper.make_node("Add", ["x", "one"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Exp", ["a"], ["unread"]),
        helper.make_node("Add", ["b", "a"], ["c"]),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    sides = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, [1])] for n in ("x", "y")]
    graph = helper.make_graph(nodes, "branches", *sides)
    assert find_cuts(graph) == {1: "a", 4: "c", 5: "y"}


def test_a_mask_that_every_layer_takes_leaves_the_cuts(images):
    """It is computed again from its input."""
    random = np.random.default_rng(0)
    body = ["wide = Unsqueeze(mask, axis)", "bias = Cast<to = 1>(wide)", "h0 = Relu(x)"]
    for layer in range(3):
        body += [f"m{layer} = MatMul(h{layer}, w{layer})", f"h{layer + 1} = Add(m{layer}, bias)"]
    proto = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[N, 4, 2] x, int64[N, 4] mask) => (float[N, 4, 2] h3) {{ {" ".join(body)} }}"""
    )
    weights = {f"w{n}": random.normal(size=(2, 2)).astype(np.float32) for n in range(3)}
    constants = {**weights, "axis": np.array([2])}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(v, n) for n, v in constants.items())
    assert list(find_cuts(proto.graph).values()) == ["m0", "h1", "m1", "h2", "m2", "h3"]
    arrays = {"x": random.normal(size=(20, 4, 2)).astype(np.float32), "mask": np.ones((20, 4), int)}
    fields = Fields((Field("x", "float32"), Field("mask", "int64")))
    samples = replace(images, stored=pack(arrays), fields=fields)
    walked = Walk(proto, samples, 8, 1)
    for index, node in enumerate(weight_layers(proto.graph).values()):
        node.name = f"product{index}"
    for node in weight_layers(proto.graph).values():
        walked.to(node, "")
        outputs = np.concatenate([batch for [batch] in walked.run(["h3"])])
        [expected] = open_runner(proto)(samples.stored[:])
        np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)


def test_a_part_of_a_network_holds_nothing_else(proto, tmp_path):
    node = [*weight_layers(proto.graph).values()][-1]
    part = between(proto, node.input[0], [node.output[0]])
    assert [other.name for other in part.graph.node] == [node.name]
    assert {tensor.name for tensor in part.graph.initializer} == {*node.input[1:]}
