"""SQNR and KL divergence by hand, and the logits that SQNR is computed from."""

import io
import math
import pickle
import tracemalloc

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from resnet8ptq.evaluation import inference
from resnet8ptq.tasks.classification import KL_EPSILON, ClassScores
from resnet8ptq.tasks.detection.scores import DetectionScores
from resnet8ptq.tasks.scoring import distortion
from resnet8ptq.tasks.scoring.comparison import Comparison
from resnet8ptq.tasks.scoring.metric import Metric
from resnet8ptq.tasks.scoring.outputs import Outputs
from tests.helpers.configs import make_config
from tests.helpers.factories import THREADS, evaluator_of, quantizer_of
from tests.helpers.frameworks import QUANTIZING

CASES = [
    ("onnx", "int8"),
    ("onnx", "u8s8"),
    ("torch", "int8"),
    ("tflite", "int8"),
    ("torch_fbgemm", "int8"),
]  # the last is not saved frozen


def with_logits(rows):
    logits = None if rows is None else np.array(rows, dtype=np.float32)
    return ClassScores(np.eye(2, dtype=np.float32), np.array([0, 1]), logits)


def with_probabilities(rows):
    return ClassScores(np.array(rows, dtype=np.float32), np.zeros(len(rows), dtype=np.int64))


# By hand


def test_sqnr_by_hand():
    # Centred: signal (3, -3), (3, -3), power 36; noise (1, -1), (0, 0), power 2.
    baseline, model = with_logits([[6, 0], [3, -3]]), with_logits([[4, 0], [3, -3]])
    assert model.sqnr_db(baseline) == pytest.approx(10 * math.log10(36 / 2))


def test_sqnr_ignores_what_a_softmax_ignores():
    baseline, model = [[6, 0], [1, -1]], [[4, 0], [1, -1]]
    shifted = np.add(model, [[7], [-3]]).tolist()
    reference = with_logits(baseline)
    plain = with_logits(model).sqnr_db(reference)
    assert with_logits(shifted).sqnr_db(reference) == pytest.approx(plain)


@pytest.mark.parametrize(
    ("model", "baseline"),
    [
        ([[6, 0], [1, -1]], [[6, 0], [1, -1]]),  # equal: infinite
        ([[6, 0], [1, -1]], [[2, 2], [0, 0]]),  # no signal
        (None, [[6, 0], [1, -1]]),
        ([[6, 0], [1, -1]], None),
    ],
)
def test_sqnr_that_is_no_number_is_none(model, baseline):
    assert with_logits(model).sqnr_db(with_logits(baseline)) is None


signals = arrays.arrays(np.float32, (9, 3), elements=st.floats(-2, 2, width=32)).filter(
    lambda values: np.abs(values).max() > 1e-3 and distortion.has_fractions(values)
)
levels = st.lists(st.floats(0.01, 1), min_size=1, max_size=4)


@given(signal=signals, noise=st.floats(0.01, 1))
@settings(max_examples=30)
def test_sqnr_of_one_output_is_that_of_its_noise(signal, noise):
    """By hand: noise that is a fraction f of every value has f**2 of the signal's power."""
    values = signal.astype(np.float64)
    sqnr_db = distortion.sqnr_db([values], [values * (1 + noise)])
    assert sqnr_db == pytest.approx(-20 * math.log10(noise), abs=1e-6)
    assert sqnr_db == distortion.to_db(distortion.noise_ratio(values, values * (1 + noise)))


@given(signal=signals, noises=levels, scale=st.sampled_from([1e-3, 0.5, 2.0, 1e4]), data=st.data())
@settings(max_examples=50)
def test_sqnr_is_that_of_the_worst_output_with_fractions(signal, noises, scale, data):
    """An output may be exact, hold whole numbers, have another scale, and any position."""
    wide = signal.astype(np.float64)
    outputs = [(wide, wide * (1 + noise)) for noise in noises]
    expected = min(distortion.sqnr_db([exact], [noisy]) for exact, noisy in outputs)
    classes = np.arange(27).reshape(9, 3)
    others = [(wide + 1, wide + 1), (classes, classes[::-1]), (0.0 * wide, 0.0 * wide)]
    others += [(classes.astype(np.float32), classes[::-1].astype(np.float32))]
    scaled = data.draw(st.integers(0, len(outputs) - 1))
    outputs[scaled] = tuple(scale * values for values in outputs[scaled])
    every = data.draw(st.permutations([*outputs, *others]))
    assert distortion.sqnr_db(*zip(*every, strict=True)) == pytest.approx(expected, abs=1e-6)


def test_only_outputs_with_whole_numbers_are_judged_by_these():
    classes, changed = np.array([[0], [3], [4]]), np.array([[0], [3], [3]])
    expected = 10 * math.log10(25 / 1)
    judged = distortion.sqnr_db([classes, classes], [changed, classes])
    assert judged == pytest.approx(expected)


def test_an_output_that_is_not_finite_is_not_hidden_by_the_others():
    signal = np.array([[0.5], [1.5]])
    broken = np.array([[0.5], [np.nan]])
    assert distortion.sqnr_db([signal, signal], [0.9 * signal, broken]) is None


def test_the_noise_of_large_outputs_takes_little_memory():
    signal = np.ones((64, 2**17), np.float32)
    tracemalloc.start()
    assert distortion.noise_ratio(signal, signal) == 0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * signal.nbytes


def test_raw_outputs_do_not_go_to_the_process_that_draws():
    raw = [np.full((4, 3), value, np.float32) for value in (10.0, 9.0)]
    scores = (
        DetectionScores(Outputs((np.zeros((4, 0, 6)),), raw=(values,)), np.arange(4), (), 0)
        for values in raw
    )
    comparison = Comparison(*scores, Metric("ap", "AP"))
    assert comparison.sqnr_db == pytest.approx(-20 * math.log10(1 / 9))
    sent = pickle.loads(pickle.dumps(comparison))
    assert sent.model.outputs.raw == sent.baseline.outputs.raw == ()
    assert sent.sqnr_db == comparison.sqnr_db


def test_kl_divergence_by_hand():
    baseline = with_probabilities([[0.5, 0.5], [0.25, 0.75], [0.25, 0.75]])
    model = with_probabilities([[0.25, 0.75], [0.25, 0.75], [0.25, 0.75]])
    first = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert model.kl_divergence(baseline) == pytest.approx(first / 3)


def test_kl_divergence_takes_zeros():
    whole = 1 + KL_EPSILON
    p = [1 / whole, KL_EPSILON / whole]
    expected = p[0] * math.log(p[0] / p[1]) + p[1] * math.log(p[1] / p[0])
    model, baseline = with_probabilities([[0, 1]]), with_probabilities([[1, 0]])
    assert model.kl_divergence(baseline) == pytest.approx(expected)


def test_kl_divergence_is_zero_for_equals_and_has_a_direction():
    ours, theirs = with_probabilities([[0.9, 0.1]]), with_probabilities([[0.4, 0.6]])
    assert ours.kl_divergence(ours) == 0
    forth, back = ours.kl_divergence(theirs), theirs.kl_divergence(ours)
    assert forth > 0
    assert back > 0
    assert forth != pytest.approx(back)


# Logits


@pytest.mark.slow
@pytest.mark.parametrize("backend", [b for b in QUANTIZING if b != "executorch"])
def test_softmax_of_the_logits_is_the_probabilities(backend, fitted, shapes_model):
    config = make_config("data=shapes", f"backend={backend}")
    images = fitted.test.take(np.arange(inference.LOGIT_SAMPLES + 50))
    baseline = evaluator_of(config, shapes_model).baseline(images)
    logits = baseline.outputs.logits
    assert logits is not None, f"backend={backend}: open_logits of its Predictor returned None"
    assert logits.shape == (inference.LOGIT_SAMPLES, 10)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    softmax = powers / powers.sum(axis=1, keepdims=True)
    expected = baseline.outputs.values[0][: len(logits)]
    np.testing.assert_allclose(softmax, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "dtype"), CASES)
def test_sqnr_of_a_quantized_model(backend, dtype, shapes, shapes_model, quantize):
    cell = quantize(f"backend={backend}", f"dtype={dtype}")
    config, path = cell.config, cell.artifact.path
    predictor = quantizer_of(config).load(path, THREADS)
    images = shapes.test.take(np.arange(200))
    before = predictor.predict(next(iter(images.batches(200))))[0]
    logits = inference.collect_logits([predictor], images, batch_size=64)
    evaluator = evaluator_of(config, shapes_model)
    [probabilities] = evaluator.run(path, images).outputs.values
    assert logits is not None
    assert logits.dtype == np.float32
    np.testing.assert_array_equal(probabilities, before)  # the cut copy left the model alone
    kept = evaluator.baseline(images).outputs
    assert kept.logits is not None
    baseline = ClassScores(kept.values[0], images.labels, kept.logits)
    model = ClassScores(probabilities, images.labels, logits)
    sqnr_db = model.sqnr_db(baseline)
    assert sqnr_db is not None
    assert 5 < sqnr_db < 60
    assert model.kl_divergence(baseline) > 0
    # An 8-bit softmax is its logits' softmax to about one step.
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    softmax = powers / powers.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(softmax, probabilities, atol=1.5 / 255)


def test_an_onnx_model_without_a_softmax_has_no_logits(shapes_model, tmp_path):
    proto = onnx.load(shapes_model.onnx_path)
    last = proto.graph.node[-1]
    assert last.op_type == "Softmax"
    last.CopyFrom(onnx.helper.make_node("Sigmoid", last.input, last.output))
    onnx.save(proto, tmp_path / "model.onnx")
    predictor = quantizer_of(make_config("data=shapes")).load(tmp_path / "model.onnx", THREADS)
    assert predictor.logits(np.zeros((1, 32, 32, 3), np.float32)) is None


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_torch_model_without_a_softmax_has_no_logits(tmp_path):
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 10), torch.nn.Sigmoid())
    saved = io.BytesIO()  # as torchscript.save does: a file's name would be in the archive
    torch.jit.save(torch.jit.trace(module.eval(), torch.zeros(1, 2, 2, 3)), saved)
    (tmp_path / "model.pt").write_bytes(saved.getvalue())
    config = make_config("data=shapes", "backend=torch", "dtype=fp32")
    predictor = quantizer_of(config).load(tmp_path / "model.pt", THREADS)
    assert predictor.logits(np.zeros((1, 2, 2, 3), np.float32)) is None


@pytest.mark.parametrize(
    ("values", "silent"), [((np.nan, np.nan), True), ((np.nan, 1), False), ((2, 2), True)]
)
def test_an_output_of_nan_for_every_sample_is_silent(values, silent):
    """Its metrics are NaN, so that no test decides."""
    signal = np.array([[1.0], [2.0]], np.float32)
    assert distortion.is_silent(signal, np.array(values, np.float32)[:, np.newaxis]) == silent
