"""The batch sizes that a converted network takes, and the networks that are refused."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from resnet8ptq.core.errors import ModelError
from resnet8ptq.graph.session import open_runner
from resnet8ptq.models.batch_axis import in_full_batches
from tests.helpers.assembling import assemble
from tests.helpers.converted import convert

WIDTH = 4
WEIGHTS = np.random.default_rng(0).normal(size=(WIDTH, 3)).astype(np.float32)
ALIKE = np.ones((4, WIDTH), np.float32)  # freeing the batch changes nothing for these
DIFFERENT = np.random.default_rng(1).normal(size=(6, WIDTH)).astype(np.float32)
SAMPLES = np.concatenate([ALIKE, DIFFERENT])


def choosing() -> onnx.ModelProto:
    """Return a network of one sample, whose mean decides a branch."""
    branches = [
        helper.make_graph(
            [helper.make_node(op, ["rows"], ["out"])],
            op,
            [],
            [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)],
        )
        for op in ("Neg", "Abs")
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "weights"], ["rows"]),
        helper.make_node("ReduceMean", ["rows"], ["mean"], keepdims=0),
        helper.make_node("Greater", ["mean", "limit"], ["is_high"]),
        helper.make_node(
            "If", ["is_high"], ["y"], then_branch=branches[0], else_branch=branches[1]
        ),
    ]
    constants = {"weights": WEIGHTS, "limit": np.float32(0)}
    return assemble(nodes, {"x": [1, WIDTH]}, {"y": [1, 3]}, constants)


def centred() -> onnx.ModelProto:
    """Return a network of one sample that subtracts the mean of all its values."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], keepdims=0),
        helper.make_node("Sub", ["x", "mean"], ["middle"]),
        helper.make_node("MatMul", ["middle", "weights"], ["y"]),
    ]
    return assemble(nodes, {"x": [1, WIDTH]}, {"y": [1, 3]}, {"weights": WEIGHTS})


@pytest.mark.parametrize(("network", "samples"), [(choosing, ALIKE), (centred, SAMPLES)])
def test_a_network_of_one_sample_keeps_its_batch_if_samples_affect_each_other(
    tmp_path, network, samples
):
    """Even if the branch is the same for every sample that conversion sees."""
    onnx.save(network(), tmp_path / "a.onnx")
    record = convert(tmp_path / "a.onnx", tmp_path / "made", samples)
    assert record.contract.batch == 1
    assert record.why_fixed
    [expected] = in_full_batches(open_runner(network()), 1)(SAMPLES)
    run = open_runner(str(tmp_path / "made" / "folded.onnx"))
    np.testing.assert_allclose(in_full_batches(run, 1)(SAMPLES)[0], expected, atol=1e-5)


def test_batch_normalization_in_training_mode_is_named_with_the_mend(tmp_path):
    nodes = [
        helper.make_node("MatMul", ["x", "weights"], ["rows"]),
        helper.make_node(
            "BatchNormalization",
            ["rows", "ones", "zeros", "zeros", "ones"],
            ["y", "mean", "variance"],
            training_mode=1,
            name="norm",
        ),
    ]
    constants = {
        "weights": WEIGHTS,
        "ones": np.ones(3, np.float32),
        "zeros": np.zeros(3, np.float32),
    }
    proto = assemble(nodes, {"x": ["N", WIDTH]}, {"y": ["N", 3]}, constants)
    onnx.save(proto, tmp_path / "a.onnx")
    with pytest.raises(ModelError, match=r"norm is in training mode.*eval mode"):
        convert(tmp_path / "a.onnx", tmp_path / "made", SAMPLES)


def test_a_network_of_einsum_alone_has_a_product(tmp_path):
    nodes = [helper.make_node("Einsum", ["x", "weights"], ["y"], equation="ab,bc->ac")]
    proto = assemble(nodes, {"x": ["N", WIDTH]}, {"y": ["N", 3]}, {"weights": WEIGHTS})
    onnx.save(proto, tmp_path / "a.onnx")
    record = convert(tmp_path / "a.onnx", tmp_path / "made", SAMPLES)
    assert max(record.parity.values()) < 1e-5
    made = onnx.load(tmp_path / "made" / "unfolded.onnx")
    assert [node.op_type for node in made.graph.node] == ["MatMul"]


def test_an_einsum_that_is_no_product_is_refused_with_the_mend(tmp_path):
    nodes = [helper.make_node("Einsum", ["x", "weights"], ["y"], equation="ab,cb->abc")]
    proto = assemble(nodes, {"x": ["N", WIDTH]}, {"y": ["N", WIDTH, 3]}, {"weights": WEIGHTS.T})
    onnx.save(proto, tmp_path / "a.onnx")
    with pytest.raises(ModelError, match=r"Einsum.*MatMul"):
        convert(tmp_path / "a.onnx", tmp_path / "made", SAMPLES)
