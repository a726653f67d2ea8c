"""Inputs and outputs whose batch axis is not the first."""

import numpy as np
import onnx
import pytest
from onnx import helper

from resnet8ptq.core.errors import ModelError
from resnet8ptq.core.records import pack
from resnet8ptq.graph.session import open_runner
from resnet8ptq.models.batch_axis import in_full_batches
from tests.helpers.assembling import assemble
from tests.helpers.converted import convert

COUNT, STEPS, WIDTH, LAYERS, SIZE = 6, 5, 4, 2, 3
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(COUNT, STEPS, WIDTH)).astype(np.float32)
STATE = RANDOM.normal(size=(COUNT, LAYERS, SIZE)).astype(np.float32)
WEIGHTS = RANDOM.normal(size=(WIDTH, SIZE)).astype(np.float32)


def steps_first(batch="N") -> onnx.ModelProto:
    """Return a network from [N, steps, width] to [steps, N, size]."""
    nodes = [
        helper.make_node("MatMul", ["x", "weights"], ["rows"]),
        helper.make_node("Transpose", ["rows"], ["logits"], perm=[1, 0, 2]),
    ]
    takes, gives = {"x": [batch, STEPS, WIDTH]}, {"logits": [STEPS, batch, SIZE]}
    return assemble(nodes, takes, gives, {"weights": WEIGHTS})


def recurrent(batch="N", first=LAYERS) -> onnx.ModelProto:
    """Return a network with a state [layers, N, size] beside its input."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[1], keepdims=0),
        helper.make_node("MatMul", ["mean", "weights"], ["new"]),
        helper.make_node("Add", ["new", "state"], ["next"]),
        helper.make_node("ReduceSum", ["next", "zero"], ["out"], keepdims=0),
    ]
    takes = {"x": [batch, STEPS, WIDTH], "state": [first, batch, SIZE]}
    gives = {"out": [batch, SIZE], "next": [first, batch, SIZE]}
    return assemble(nodes, takes, gives, {"weights": WEIGHTS, "zero": np.array([0])})


def test_outputs_with_the_steps_first_get_the_samples_first(tmp_path):
    onnx.save(steps_first(), tmp_path / "a.onnx")
    record = convert(tmp_path / "a.onnx", tmp_path / "made", X)
    assert [t.shape for t in record.contract.outputs] == [(STEPS, SIZE)]
    [logits] = open_runner(str(tmp_path / "made" / "folded.onnx"))(X)
    np.testing.assert_allclose(logits, X @ WEIGHTS, rtol=1e-5)


@pytest.mark.parametrize("batch", ["N", None])
def test_a_state_is_taken_and_returned_with_the_samples_first(tmp_path, batch):
    onnx.save(recurrent(batch), tmp_path / "a.onnx")
    samples = pack({"x": X, "state": STATE})
    record = convert(tmp_path / "a.onnx", tmp_path / "made", samples)
    assert [t.shape for t in record.contract.inputs] == [(STEPS, WIDTH), (LAYERS, SIZE)]
    assert (record.contract.batch, record.moved) == (None, {"state": 1, "next": 1})
    out, state = open_runner(str(tmp_path / "made" / "folded.onnx"))(samples)
    expected = (X.mean(1) @ WEIGHTS)[:, None] + STATE
    np.testing.assert_allclose(state, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(out, expected.sum(1), rtol=1e-4, atol=1e-5)


def test_a_state_of_one_sample_is_taken(tmp_path):
    onnx.save(recurrent(1), tmp_path / "a.onnx")
    samples = pack({"x": X, "state": STATE})
    record = convert(tmp_path / "a.onnx", tmp_path / "made", samples)
    assert record.contract.inputs[1].shape == (LAYERS, SIZE)


@pytest.mark.parametrize("first", [LAYERS, 1])
def test_a_state_of_one_sample_beside_a_free_batch_is_taken(tmp_path, first):
    """Exporters free the batch of the input alone."""
    proto = recurrent(first=first)
    for value in (proto.graph.input[1], proto.graph.output[1]):
        value.type.tensor_type.shape.dim[1].dim_value = 1
    onnx.save(proto, tmp_path / "a.onnx")
    state = STATE[:, :first]
    samples = pack({"x": X, "state": state})
    record = convert(tmp_path / "a.onnx", tmp_path / "made", samples)
    assert [t.shape for t in record.contract.inputs] == [(STEPS, WIDTH), (first, SIZE)]
    run = in_full_batches(
        open_runner(str(tmp_path / "made" / "folded.onnx")), record.contract.batch
    )
    [out, *_] = run(samples)
    expected = (X.mean(1) @ WEIGHTS)[:, None] + state
    np.testing.assert_allclose(out, expected.sum(1), rtol=1e-4, atol=1e-5)


def test_an_output_without_the_samples_is_named_with_the_setting_that_drops_it(tmp_path):
    proto = steps_first()
    proto.graph.node.append(helper.make_node("ReduceMean", ["rows"], ["all"], axes=[0, 1]))
    proto.graph.output.append(helper.make_tensor_value_info("all", 1, [1, 1, SIZE]))
    onnx.save(proto, tmp_path / "a.onnx")
    with pytest.raises(ModelError, match=r"output 'all' is .*model\.outputs=\[logits\]"):
        convert(tmp_path / "a.onnx", tmp_path / "made", X)


def test_a_file_of_one_sample_returns_the_samples_first_too(tmp_path):
    """As text readers are exported: [1, steps, width] becomes [steps, 1, classes]."""
    onnx.save(steps_first(batch=1), tmp_path / "a.onnx")
    record = convert(tmp_path / "a.onnx", tmp_path / "made", X)
    assert [t.shape for t in record.contract.outputs] == [(STEPS, SIZE)]
    assert (record.contract.batch, record.moved) == (None, {"logits": 1})
    [logits] = open_runner(str(tmp_path / "made" / "folded.onnx"))(X)
    np.testing.assert_allclose(logits, X @ WEIGHTS, rtol=1e-5)


@pytest.mark.parametrize("declared", [[], ["N", SIZE]])
def test_an_output_that_loses_the_axis_of_one_sample_has_a_row_for_each(tmp_path, declared):
    """A Squeeze without axes removes every axis of size 1."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[1]),
        helper.make_node("MatMul", ["mean", "weights"], ["rows"]),
    ]
    if not declared:
        nodes.append(helper.make_node("ReduceSum", ["rows", "last"], ["value"]))
    nodes.append(helper.make_node("Squeeze", [nodes[-1].output[0]], ["out"]))
    takes = {"x": [1 if declared else "N", STEPS, WIDTH]}
    constants = {"weights": WEIGHTS, "last": np.array([2])}
    onnx.save(assemble(nodes, takes, {"out": declared}, constants), tmp_path / "a.onnx")
    record = convert(tmp_path / "a.onnx", tmp_path / "made", X)
    assert (record.contract.batch, record.why_fixed) == (None, None)
    [out] = open_runner(str(tmp_path / "made" / "folded.onnx"))(X)
    expected = X.mean(1) @ WEIGHTS
    if not declared:
        expected = expected.sum(1)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
