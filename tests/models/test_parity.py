"""Parity: how the outputs of two frameworks are compared, and in which batches they run."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resnet8ptq.core.errors import ParityError
from resnet8ptq.models import conversion
from resnet8ptq.models.conversion import compare_outputs
from resnet8ptq.tasks.scoring.outputs import PROBABILITIES

SURE = np.array([[0.9, 0.1], [0.2, 0.8]], dtype=np.float32)


def test_the_largest_difference_is_returned():
    shifted = SURE + np.array([[0, 0], [5e-5, 0]], dtype=np.float32)
    assert compare_outputs([SURE], [SURE], PROBABILITIES, "x") == 0
    assert compare_outputs([shifted], [SURE], PROBABILITIES, "x") == pytest.approx(5e-5, rel=1e-2)


def test_a_difference_above_the_tolerance_is_refused_with_its_size():
    got = SURE + np.array([[0.01, 0], [0, 0]], dtype=np.float32)
    with pytest.raises(ParityError, match=r"^torch, folded: .* 0 of 2 top-1 .* 1\.00e-02 "):
        compare_outputs([got], [SURE], PROBABILITIES, "torch, folded")


def test_another_top_1_class_is_refused_even_if_the_difference_is_small():
    expected = np.array([[0.50001, 0.49999]], dtype=np.float32)
    with pytest.raises(ParityError, match=r"differs from the original on 1 of 1 top-1"):
        compare_outputs([expected[:, ::-1]], [expected], PROBABILITIES, "onnx")


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_nan_and_infinity_are_refused(wrong):
    got = SURE.copy()
    got[1, 0] = wrong
    with pytest.raises(ParityError):
        compare_outputs([got], [SURE], PROBABILITIES, "onnx")


def test_nan_of_the_original_is_refused():
    wrong = np.full_like(SURE, np.nan)
    with pytest.raises(ParityError, match="the original returns NaN"):
        compare_outputs([wrong], [wrong], PROBABILITIES, "onnx")


@settings(max_examples=50)
@given(scale=st.floats(1e-3, 1e6), error=st.floats(0, 1e-2))
def test_logits_and_values_are_compared_with_the_largest(scale, error):
    expected = (SURE * scale).astype(np.float32)
    got = expected + np.float32(expected.max() * error)
    for final, limit in (("logits", 1e-4), ("values", 1e-3)):
        if error < 0.9 * limit:
            assert compare_outputs([got], [expected], final, "x") == pytest.approx(error, abs=1e-6)
        elif error > 1.1 * limit:
            with pytest.raises(ParityError, match="relative to the largest"):
                compare_outputs([got], [expected], final, "x")


def test_values_have_no_top_1_class():
    swapped = SURE[:, ::-1] * np.float32(1e-6) + 1
    assert compare_outputs([swapped], [SURE * np.float32(1e-6) + 1], "values", "x") < 1e-6


@pytest.mark.parametrize(
    ("outputs", "final"),
    [
        ([SURE], "probabilities"),
        ([SURE * 3], "logits"),
        ([SURE - 0.5], "logits"),
        ([SURE, SURE], "values"),
        ([np.ones((2, 10), np.float32)], "values"),
        ([SURE[..., None]], "probabilities"),
        ([SURE[..., None, None] * 3], "logits"),
        ([SURE[:, 0]], "probabilities"),
        ([SURE.reshape(1, 2, 2)], "values"),
        ([np.array([[1, 0]])], "values"),
    ],
)
def test_the_kind_of_the_output_is_found(outputs, final):
    assert conversion.find_final(outputs, np.zeros((2, 10))) == final


def test_a_value_for_each_sample_of_several_inputs_is_a_score():
    samples = np.zeros(2, [("left", np.float32, (4,)), ("right", np.float32, (4,))])
    assert conversion.find_final([SURE[:, 0]], samples) == "probabilities"


@pytest.mark.parametrize(("batch", "expected"), [("N", [1, 1, 1, 1]), ("2", [2, 2])])
def test_the_original_runs_in_batches_whose_tensors_all_fit(batch, expected, monkeypatch):
    """Keras holds each tensor of a batch until its end; ONNX Runtime holds two of these."""
    monkeypatch.setenv("RESNET8PTQ_MEMORY_GB", "1")
    layers = "".join(f"t{i + 1} = Relu(t{i})\n" for i in range(7))
    text = (
        '<ir_version: 8, opset_import: ["" : 17]>\n'
        f"deep (float[{batch}, 1024, 1024] t0) => (float[{batch}, 1024, 1024] t7) {{\n{layers}}}"
    )
    sizes = []

    def predict(samples):
        sizes.append(len(samples))
        return [samples]

    run = conversion._run_on(
        np.zeros((4, 1024, 1024), np.float32), onnx.parser.parse_model(text), None
    )
    run(predict)
    assert sizes == expected
