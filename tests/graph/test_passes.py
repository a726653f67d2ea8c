"""Every pass that rewrites a graph keeps it valid and its results, whatever else reads a tensor."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings

from resnet8ptq.graph.session import expose, open_runner
from tests.helpers.passes import PASSES, RAW, SAMPLES, TRAITS, build, normalize


def check(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    """Compare the outputs of two models that both have, by name."""
    onnx.checker.check_model(after, full_check=True)
    known = {name for node in before.graph.node for name in node.output}
    known |= {tensor.name for tensor in before.graph.initializer}
    names = [value.name for value in after.graph.output]
    common = [name for name in names if name in known]
    assert common
    expected = dict(zip(common, open_runner(expose(before, common))(SAMPLES), strict=True))
    got = dict(zip(names, open_runner(after)(SAMPLES), strict=True))
    for name in common:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", RAW)
@settings(max_examples=15)
@given(traits=TRAITS)
def test_a_pass_before_normalization_keeps_the_results(name, traits):
    raw = build(traits)
    check(raw, RAW[name](raw))


@pytest.mark.parametrize("name", PASSES)
@settings(max_examples=15)
@given(traits=TRAITS)
def test_a_pass_keeps_the_results(name, traits):
    raw = build(traits)
    check(raw, PASSES[name](normalize(raw)))
