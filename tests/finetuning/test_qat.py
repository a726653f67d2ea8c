import filecmp
import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from resnet8ptq.calibration.activations import Activations
from resnet8ptq.core import figures
from resnet8ptq.core.deadline import Deadline
from resnet8ptq.core.errors import QuantizationError, UnsupportedError
from resnet8ptq.data import locate, registry
from resnet8ptq.data.dataset import CalibrationSet, Dataset, Split
from resnet8ptq.data.sampling import draw_calibration, draw_held_out
from resnet8ptq.experiment import plots
from resnet8ptq.finetuning import qat, training
from resnet8ptq.models import model
from resnet8ptq.precision.grid import ActivationScheme, WeightScheme
from resnet8ptq.precision.plan import Plan, Selection, find_float_nodes
from resnet8ptq.simulation import network
from resnet8ptq.simulation.fake_quantization import FakeQuantize, FakeQuantizeNarrowWeight, Round
from tests.helpers.configs import make_config
from tests.helpers.factories import THREADS, quantize_network, quantizer_of, runtime_of

SMALL = ("data=shapes", "held_out_images=50", "calib.samples_per_class=5", "threads=1")
QUICK = (*SMALL, "qat.epochs=2", "qat.batch_size=32", "qat.learning_rate=1e-4")


NEVER = Deadline()


class Curves:
    """Takes the points; may interrupt the training at a step."""

    def __init__(self, interrupt_at: int = -1) -> None:
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.interrupt_at = interrupt_at

    def __call__(self, point: dict[str, float]) -> None:
        step = int(point["step"])
        if step == self.interrupt_at:
            raise KeyboardInterrupt
        self.steps.append((step, {key: point[key] for key in point if key != "step"}))

    def of(self, name: str) -> list[float]:
        return [metrics[name] for _, metrics in self.steps if name in metrics]


@pytest.fixture(scope="module")
def few(shapes: Dataset) -> Dataset:
    """400 training and 100 test images of the embedded set."""
    train = shapes.train.take(np.arange(0, len(shapes.train), len(shapes.train) // 400))
    test = shapes.test.take(np.arange(0, len(shapes.test), len(shapes.test) // 100))
    return Dataset(shapes.name, shapes.class_names, train, test)


def start(config, fp32, dataset, calibration, held_out, report, deadline=NEVER):
    settings = qat.QatSettings(
        config.qat,
        config.calib,
        Plan(WeightScheme.of(config)),
        ActivationScheme(),
        Selection.of(config),
        config.float_output,
        config.seed,
    )
    runtime = replace(runtime_of(config), deadline=deadline)
    return qat.fine_tune(settings, fp32, dataset, calibration, held_out, runtime, report)


def fine_tune(
    few: Dataset,
    fp32: model.Fp32Model,
    folder: Path,
    *overrides: str,
    run: Curves,
    deadline: Deadline = NEVER,
) -> tuple[model.Fp32Model, dict[str, tuple[float, float]]]:
    config = make_config(*QUICK, f"cache_dir={folder / 'cache'}", *overrides)
    held_out = draw_held_out(few, config.held_out_images)
    calibration = draw_calibration(few, 5, config.seed, [held_out])
    return start(config, fp32, few, calibration, held_out, run, deadline)


@pytest.fixture(scope="module")
def tuned(few, shapes_model, tmp_path_factory):
    """One fine-tuning, uninterrupted: its folder, curves, network and ranges."""
    folder, run = tmp_path_factory.mktemp("tuned"), Curves()
    return folder, run, *fine_tune(few, shapes_model, folder, run=run)


ENDS = st.floats(-1000, 1000, width=32)
SCHEMES = st.builds(ActivationScheme, bits=st.sampled_from([7, 8]), symmetric=st.booleans())


@given(ENDS, ENDS, SCHEMES, st.lists(ENDS, min_size=1, max_size=50))
@example(0.0, 3.2e-44, ActivationScheme(bits=7), [0.0])  # steps that float32 does not hold
def test_fake_quantization_has_as_many_levels_as_the_bits_and_zero_is_one(one, two, scheme, found):
    quantizer = FakeQuantize((min(one, two), max(one, two)), scheme)
    low, high = quantizer.range()
    assert low <= 0 <= high and low < high
    grid = quantizer(torch.linspace(2 * low, 2 * high, 5000)).detach()
    assert len(grid.unique()) <= scheme.steps + 1 <= 2**scheme.bits
    values = torch.tensor([0.0, *found])
    rounded = quantizer(values).detach()
    step = (high - low) / scheme.steps
    assert rounded[0] == 0
    torch.testing.assert_close(quantizer(rounded).detach(), rounded, rtol=1e-5, atol=1e-6 * step)
    within = (values >= low) & (values <= high)
    assert ((rounded - values).abs()[within] <= 1.001 * step).all()


def test_gradients_are_those_of_torchs_own_learnable_quantization():
    values = torch.randn(2000, generator=torch.manual_seed(0)) * 4
    # At the ends themselves torch counts what rounds to them as within.
    near = torch.minimum((values + 3).abs(), (values - 5).abs()) < 0.05
    values = values[~near].requires_grad_()
    weights = torch.randn(len(values), generator=torch.manual_seed(1))
    low, high = torch.tensor(-3.0, requires_grad=True), torch.tensor(5.0, requires_grad=True)
    ours = torch.autograd.grad(
        (Round.apply(values, low, high, 255) * weights).sum(), (values, low, high)
    )
    scale = (high - low) / 255
    rounded = torch._fake_quantize_learnable_per_tensor_affine(
        values, scale.reshape(1), (-low / scale).reshape(1), 0, 255, 1.0
    )
    theirs = torch.autograd.grad((rounded * weights).sum(), (values, low, high))
    # torch rounds the zero point, and lets the ends move by that.
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.2)


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["int4", "int3", "int2"]),
    st.booleans(),
    st.floats(-3, 3),
    st.sampled_from([0.0, 1e-20, 1e-3, 1.0]),
)
def test_a_learned_step_is_found_again_in_its_weights(seed, dtype, per_channel, growth, size):
    scheme = WeightScheme(dtype, per_channel)
    random = np.random.default_rng(seed)
    weights = torch.from_numpy(random.standard_t(3, (3, 8)).astype(np.float32))
    weights[1] *= size
    quantizer = FakeQuantizeNarrowWeight(scheme, weights)
    with torch.no_grad():
        assert np.allclose(
            quantizer(weights), scheme.grid(weights.numpy(), 0).round(weights.numpy())
        )
        quantizer.log_growth += growth
        rounded = quantizer(weights).numpy()
    assert np.isfinite(rounded).all()
    for rows in rounded if per_channel else [rounded]:
        assert len(np.unique(rows)) <= 2 * scheme.levels[1] + 1
    assert np.allclose(scheme.grid(rounded, 0).round(rounded), rounded, rtol=1e-5, atol=0)


def test_gradients_of_weights_and_their_step_are_those_of_torch():
    weights = torch.randn((1, 200), generator=torch.manual_seed(0))
    weights = weights[:, (weights.abs()[0] - 0.7).abs() > 0.05]  # see above
    factors = torch.randn(weights.shape, generator=torch.manual_seed(1))
    quantizer = FakeQuantizeNarrowWeight(WeightScheme("int4"), weights)
    with torch.no_grad():
        quantizer.log_growth += torch.log(0.1 / quantizer.initial)
    weights.requires_grad_()
    scale = torch.tensor([0.1], requires_grad=True)
    rounded = torch._fake_quantize_learnable_per_tensor_affine(
        weights, scale, torch.zeros(1), -7, 7, 1.0
    )
    theirs = torch.autograd.grad((rounded * factors).sum(), (weights, scale))
    ours = torch.autograd.grad(
        (quantizer(weights) * factors).sum(), (weights, quantizer.log_growth)
    )
    torch.testing.assert_close(ours[0], theirs[0])
    torch.testing.assert_close(ours[1].sum(), (theirs[1] * scale).sum())


def prepare(fp32: model.Fp32Model, calibration: Split, *overrides: str):
    config = make_config(*overrides)
    skipped = find_float_nodes(onnx.load(fp32.onnx_path).graph, Selection.of(config))
    ranges = Activations(fp32.onnx_path, calibration, config.calib, runtime_of(config)).find_around(
        skipped
    )
    activations = ActivationScheme(level_pools=quantizer_of(config).level_pools)
    schemes = Plan(WeightScheme.of(config)), activations
    return config, network.build_student(
        fp32.onnx_path, skipped, ranges, *schemes, config.float_output
    )


def assert_same_as_onnx(fp32, calibration, images, folder, *overrides):
    """The student rounds what the ONNX file rounds, to the same levels, with the same result."""
    config, student = prepare(fp32, calibration, *overrides)
    quantizer = quantizer_of(config)
    artifact = quantize_network(quantizer, fp32, calibration, folder, student.ranges())
    written = onnx.load(artifact.path)
    constants = {t.name: numpy_helper.to_array(t) for t in written.graph.initializer}
    rounded = {
        node.input[0]: node.input[1]
        for node in written.graph.node
        if node.op_type == "QuantizeLinear" and not node.input[0].startswith("probabilities")
    }
    assert set(rounded) <= set(student.quantizers)
    for name, scale in rounded.items():
        low, high = student.quantizers[name].range()
        assert constants[scale] == pytest.approx((high - low) / 255, rel=1e-5)
    others = {id(student.quantizers[name]) for name in set(student.quantizers) - set(rounded)}
    assert others <= {id(student.quantizers[name]) for name in rounded}

    expected = quantizer.load(artifact.path, THREADS).logits(images)
    result = student.module(torch.from_numpy(images)).detach().numpy()
    assert (result.argmax(axis=1) == expected.argmax(axis=1)).mean() > 0.97
    # What differs are ties, and what the layers behind make of them.
    floats = network.load_logits(fp32.onnx_path)(torch.from_numpy(images)).detach().numpy()
    assert np.abs(result - expected).mean() < 0.8 * np.abs(expected - floats).mean()


@pytest.mark.parametrize(
    "overrides",
    [
        ("per_channel=true",),
        ("per_channel=true", "dtype=w4a8"),
        ("dtype=u8s8", "float_output=true", "nodes_to_exclude=[functional_1/conv2d_3_1/BiasAdd]"),
    ],
)
def test_student_computes_what_the_onnx_file_computes(few, shapes_model, tmp_path, overrides):
    images = few.test.stored.astype(np.float32)
    assert_same_as_onnx(shapes_model, few.train, images, tmp_path, *SMALL, *overrides)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("backend=onnx", "dtype=u8s8"),
        ("backend=onnx", "dtype=u8s8", "format=qoperator"),
        ("backend=tflite",),
    ],
)
def test_an_untrained_student_has_the_ranges_of_the_artifact(
    few, shapes_model, tmp_path, overrides
):
    """What the student shares between tensors, the backend shares; torch rounds once more."""
    common = (*SMALL, "per_channel=true", "calib=percentile")
    config, student = prepare(shapes_model, few.train, *common, *overrides)
    images = few.test.stored.astype(np.float32)
    result = []
    for name, ranges in (("calibrated", None), ("student", student.ranges())):
        (tmp_path / name).mkdir()
        quantizer = quantizer_of(config)
        artifact = quantize_network(quantizer, shapes_model, few.train, tmp_path / name, ranges)
        result.append(quantizer.load(artifact.path, THREADS).logits(images))
    if overrides == ("backend=tflite",):
        # Which way a value halfway between two levels goes depends on the last bit of a scale.
        assert np.mean(result[0] != result[1]) < 0.01
    else:
        np.testing.assert_array_equal(*result)


def test_student_computes_what_the_onnx_file_computes_on_the_real_model(
    real_files, tmp_path, cache_root
):
    config = make_config()
    settled = locate.find_data(config.data)
    dataset = registry.load(settled.name, settled.root)
    fp32 = model.load_network(config.model, dataset, cache_root)
    images = dataset.train.stored[:200].astype(np.float32)
    calibration = draw_calibration(dataset, 10, 42).split
    assert_same_as_onnx(fp32, calibration, images, tmp_path)


@pytest.mark.slow
def test_training_changes_every_weight_and_range_and_lowers_the_loss(tuned, few, shapes_model):
    _, run, _, ranges = tuned
    names = [[node.name for node in onnx.load(p).graph.node] for p in paths(tuned, shapes_model)]
    assert names[0] == names[1]
    before, after = (initializers(path) for path in paths(tuned, shapes_model))
    for name, values in before.items():
        assert name in after and values.shape == after[name].shape
        assert (values.dtype == np.int64) == np.array_equal(values, after[name]), name
    _, student = prepare(shapes_model, draw_calibration(few, 5, 42).split, *SMALL)
    assert set(ranges) == set(student.ranges())
    moved = [name for name, result in student.ranges().items() if ranges[name] != result]
    nodes = onnx.load(shapes_model.onnx_path).graph.node
    turned = {name for node in nodes if "input" in node.input for name in node.output}
    assert set(ranges) - set(moved) <= {"input", *turned}
    losses = run.of("qat/validation_loss")
    assert len(losses) == 3 and min(losses[1:]) < losses[0]
    assert len(run.of("qat/validation_accuracy")) == 3
    assert run.of("qat/learning_rate") == sorted(run.of("qat/learning_rate"), reverse=True)


def test_curves_are_drawn(tuned):
    points = [{"step": float(step), **metrics} for step, metrics in tuned[1].steps]
    assert len(figures.to_png(plots.fine_tuning(points))) > 10_000


def paths(tuned, shapes_model):
    return shapes_model.onnx_path, tuned[2].onnx_path


def initializers(path: Path) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def test_every_backend_quantizes_what_was_fine_tuned(tuned, few, tmp_path):
    _, _, network, ranges = tuned
    quantizer = quantizer_of(make_config(*SMALL))
    artifact = quantize_network(quantizer, network, few.train, tmp_path, ranges)
    assert artifact.quantized_layers == 10
    assert {name: artifact.ranges[name] for name in ranges} == ranges


def test_second_run_reuses_the_first_and_logs_the_same_curves(
    tuned, few, shapes_model, monkeypatch
):
    folder, run, network, ranges = tuned
    monkeypatch.setattr(training.Trainer, "run", lambda self: pytest.fail("trained again"))
    again = Curves()
    result = fine_tune(few, shapes_model, folder, "backend=torch", "dtype=int8", run=again)
    assert result == (network, ranges)
    assert again.steps == run.steps


@pytest.mark.slow
def test_interrupted_training_goes_on_to_the_same_bits(tuned, few, shapes_model, tmp_path, caplog):
    _, run, network, ranges = tuned
    last = run.steps[-2][0]  # in the second epoch
    with pytest.raises(KeyboardInterrupt):
        fine_tune(few, shapes_model, tmp_path, run=Curves(interrupt_at=last))
    (checkpoint,) = (tmp_path / "cache" / "qat").glob("*.checkpoint")
    kept = checkpoint.read_bytes()
    again = Curves()
    with caplog.at_level(logging.INFO):
        result = fine_tune(few, shapes_model, tmp_path, run=again)
    assert "continues after epoch 1 of 2" in caplog.text
    assert filecmp.cmp(result[0].onnx_path, network.onnx_path, shallow=False)
    assert result[1] == ranges
    assert again.steps == run.steps
    assert not checkpoint.exists()

    damaged = bytearray(kept)
    damaged[len(kept) // 2] ^= 1
    checkpoint.write_bytes(damaged)
    assert training._load(checkpoint) is None
    assert "is damaged; training starts again" in caplog.text


@pytest.mark.slow
def test_at_the_end_of_the_time_whole_epochs_count_and_more_time_goes_on(
    tuned, few, shapes_model, tmp_path
):
    *_, network, ranges = tuned
    deadline = Deadline()

    class Late(Curves):
        def __call__(self, point):
            super().__call__(point)
            if len(self.of("qat/validation_loss")) == 2:  # before and after the first epoch
                deadline.at = 0

    cut, ranges_cut = fine_tune(few, shapes_model, tmp_path, run=Late(), deadline=deadline)
    assert deadline.cut_short == ["fine-tuning: 1 of 2 epochs"]
    assert ranges_cut.keys() == ranges.keys() and ranges_cut != ranges
    more = fine_tune(few, shapes_model, tmp_path, run=Curves())
    assert filecmp.cmp(more[0].onnx_path, network.onnx_path, shallow=False)
    assert cut.onnx_path.read_bytes() != network.onnx_path.read_bytes()
    assert more[1] == ranges


def test_neither_held_out_nor_test_images_are_trained_on(few, shapes_model, tmp_path, monkeypatch):
    seen = []

    def look(self):
        seen.append(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(training.Trainer, "run", look)
    leaky = Dataset(few.name, few.class_names, few.train, few.train.take(np.arange(7)))
    with pytest.raises(KeyboardInterrupt):
        config = make_config(*QUICK, f"cache_dir={tmp_path}")
        calibration = CalibrationSet(few.train.take(np.arange(9)), np.arange(9))
        start(config, shapes_model, leaky, calibration, draw_held_out(leaky, 50), Curves())
    (trainer,) = seen
    assert len(trainer.held_out) == 50
    assert len(trainer.train) == len(few.train) - 50 - 7


def test_loss_that_is_not_finite_names_the_learning_rate(few, shapes_model, tmp_path):
    with pytest.raises(QuantizationError, match=r"qat\.learning_rate=1e\+20 is too large"):
        fine_tune(few, shapes_model, tmp_path, "qat.learning_rate=1e20", run=Curves())


def test_settings_that_cannot_be_fine_tuned_are_unsupported(few, shapes_model, tmp_path):
    with pytest.raises(UnsupportedError, match="calib=histogram"):
        fine_tune(few, shapes_model, tmp_path, "backend=torch", "calib=histogram", run=Curves())


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_augmentation_shifts_and_flips(seed):
    images = np.random.default_rng(seed).integers(0, 256, (3, 8, 6, 3), dtype=np.uint8)
    result = training.augment(images, np.random.default_rng(seed))
    assert result.shape == images.shape and result.dtype == np.uint8
    for before, after in zip(images, result, strict=True):
        padded = np.pad(before, ((4, 4), (4, 4), (0, 0)), mode="edge")
        shifts = [padded[y : y + 8, x : x + 6] for y in range(9) for x in range(9)]
        assert any(np.array_equal(after, s) or np.array_equal(after[:, ::-1], s) for s in shifts)


def test_pictures_with_channels_first_are_trained_on_as_the_others(few, shapes_model, tmp_path):
    """Shifted along their channels, or mirrored upside down, they would be other pictures."""

    def turn(split: Split) -> Split:
        turned = np.ascontiguousarray(np.moveaxis(split.stored[:], -1, 1))
        return replace(split, stored=turned, layout=(1, 2, 0), hashes=None)

    some = few.with_splits(lambda split: split.take(np.arange(0, len(split), 2)))
    expected, actual = Curves(), Curves()
    fine_tune(some, shapes_model, tmp_path / "last", "qat.epochs=1", run=expected)
    fine_tune(some.with_splits(turn), shapes_model, tmp_path / "first", "qat.epochs=1", run=actual)
    assert actual.of("qat/loss") == pytest.approx(expected.of("qat/loss"), rel=1e-3)


def test_curves_are_kept_as_json(tuned):
    points = json.loads((tuned[2].onnx_path.parent / qat.CURVES_FILE).read_text())
    assert [(int(p.pop("step")), p) for p in points] == tuned[1].steps
