"""Every pass that rewrites a graph keeps it valid and its results, whatever else reads a tensor."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings

from resnet8ptq.core.errors import ModelError
from resnet8ptq.graph.passes import rename, rewrite
from resnet8ptq.graph.session import expose, open_runner
from tests.helpers.passes import PARTS, PASSES, RAW, SAMPLES, TRAITS, build, normalize

FEW = settings(max_examples=10)


def check(before: onnx.ModelProto, after: onnx.ModelProto, is_file: bool = True) -> None:
    """Compare the outputs that both models compute, by name."""
    if is_file:
        onnx.checker.check_model(after, full_check=True)
    known = {name for node in before.graph.node for name in node.output}
    known |= {tensor.name for tensor in before.graph.initializer}
    names = [value.name for value in after.graph.output]
    common = [name for name in names if name in known]
    assert common
    single = after.graph.input[0].type.tensor_type.shape.dim[0].dim_value
    samples = SAMPLES[: single or len(SAMPLES)]
    expected = dict(zip(common, open_runner(expose(before, common))(samples), strict=True))
    got = dict(zip(names, open_runner(after)(samples), strict=True))
    for name in common:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", RAW)
@FEW
@given(traits=TRAITS)
def test_pass_before_normalization_keeps_the_results(name, traits):
    raw = build(traits)
    check(raw, RAW[name](raw))


@pytest.mark.parametrize("name", PASSES)
@FEW
@given(traits=TRAITS)
def test_pass_keeps_the_results(name, traits):
    raw = build(traits)
    try:
        after = PASSES[name](normalize(raw))
    except ModelError:  # an output without a row for each sample is refused
        assert traits.constant_output
        return
    check(raw, after)


@pytest.mark.parametrize("name", PARTS)
@FEW
@given(traits=TRAITS)
def test_part_computes_the_same(name, traits):
    raw = build(traits)
    check(raw, PARTS[name](normalize(raw)), is_file=False)


def test_two_constants_may_exchange_their_names():
    nodes = [onnx.helper.make_node("Sub", ["a", "b"], ["y"], "sub")]
    values = {"a": np.float32([3]), "b": np.float32([1])}
    constants = [onnx.numpy_helper.from_array(array, name) for name, array in values.items()]
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph(nodes, "g", [], [output], constants)
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    written = rewrite(proto, [rename({"a": "b", "b": "a"})])
    assert list(written.graph.node[0].input) == ["b", "a"]
    stored = {c.name: float(onnx.numpy_helper.to_array(c)[0]) for c in written.graph.initializer}
    assert stored == {"b": 3, "a": 1}
