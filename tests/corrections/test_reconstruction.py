"""Block-wise reconstruction: which layers are one block, and what is learned of it."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from resnet8ptq.config.schema import CorrectionsConfig
from resnet8ptq.core import memory
from resnet8ptq.core.errors import ConfigError, UnsupportedError
from resnet8ptq.corrections import layers, reconstruction, sequence
from resnet8ptq.corrections.layers import CorrectionSettings
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.sampling import draw_calibration
from resnet8ptq.graph.footprint import tensor_bytes
from resnet8ptq.graph.session import expose, open_runner
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.grid import ActivationScheme, WeightScheme
from resnet8ptq.precision.plan import Plan, Selection
from resnet8ptq.simulation.fake_quantization import FakeQuantize, drop_rounding
from tests.helpers.assembling import assemble
from tests.helpers.configs import make_config
from tests.helpers.factories import quantize_network, quantizer_of, runtime_of
from tests.helpers.product_networks import split_network

ITERATIONS = 25


@pytest.fixture(scope="module")
def images(shapes: Dataset) -> Split:
    return draw_calibration(shapes, 4, 42).split


def setting_of(images: Split, weights: WeightScheme) -> CorrectionSettings:
    config = make_config("data=shapes", "per_channel=true")
    runtime, activations = runtime_of(config), ActivationScheme()
    return CorrectionSettings(
        Plan(weights), Selection(), images, config.calib, runtime, activations, True
    )


@pytest.fixture(scope="module")
def learned(
    shapes_model: Fp32Model, images: Split
) -> tuple[onnx.ModelProto, dict[str, tuple[float, float]]]:
    setting = setting_of(images, WeightScheme("int4", True))
    return reconstruction.reconstruct(shapes_model.onnx_path, setting, ITERATIONS, 1)


def test_blocks_are_those_of_the_network(shapes_model, images, monkeypatch):
    seen: list[list[str]] = []

    def record(problem: reconstruction._Problem, *_: object, **__: object) -> None:
        seen.append(list(problem.block.roundings))

    monkeypatch.setattr(reconstruction._Problem, "learn", record)
    reconstruction.reconstruct(
        shapes_model.onnx_path, setting_of(images, WeightScheme("int8")), 1, 1
    )
    # The first convolution, three residual blocks of which two have a shortcut, the dense layer.
    assert [len(block) for block in seen] == [1, 2, 3, 3, 1]


def test_large_tensors_are_kept_of_fewer_samples(shapes_model, images, monkeypatch):
    proto = onnx.load(shapes_model.onnx_path)
    largest = max(tensor_bytes(proto).values())
    setting = setting_of(images, WeightScheme("int8"))
    assert len(reconstruction._samples(proto, setting)) == len(images)
    monkeypatch.setattr(memory, "step", lambda: 6 * largest)
    assert len(reconstruction._samples(proto, setting)) == 6
    monkeypatch.setattr(memory, "budget", lambda: 2 * reconstruction.LEARNING * 2**20)
    tensors = [torch.zeros(6, 2**18)]  # of 1 MiB each
    assert reconstruction._at_once(tensors, 0) == 2
    assert reconstruction._at_once(tensors, 2 * reconstruction.LEARNING * 2**20) == 1
    monkeypatch.setattr(memory, "budget", lambda: reconstruction.LEARNING * largest - 1)
    with pytest.raises(UnsupportedError, match="try a larger memory_gb"):
        reconstruction._samples(proto, setting)


def test_a_block_that_exceeds_the_memory_budget_is_unsupported(shapes_model, images, monkeypatch):
    largest = max(tensor_bytes(onnx.load(shapes_model.onnx_path)).values())
    monkeypatch.setattr(memory, "budget", lambda: reconstruction.KEPT * largest)
    monkeypatch.setattr(reconstruction, "LEARNING", 1)  # any of its tensors fits
    setting = setting_of(images, WeightScheme("int8"))
    with pytest.raises(UnsupportedError, match="to learn from one sample"):
        reconstruction.reconstruct(shapes_model.onnx_path, setting, 1, 1)


def test_a_range_that_blocks_share_is_learned_in_the_first(shapes_model, images, monkeypatch):
    """A pool's levels are its input's: other ones there would undo what is learned before."""
    seen: list[FakeQuantize] = []

    def record(problem: reconstruction._Problem, *_: object, **__: object) -> None:
        seen.extend(problem.block.quantizers)

    monkeypatch.setattr(reconstruction._Problem, "learn", record)
    setting = setting_of(images, WeightScheme("int8"))
    shared = replace(setting, activations=ActivationScheme(level_pools=("AveragePool",)))
    counts = []
    for split in (setting, shared):
        seen.clear()
        reconstruction.reconstruct(shapes_model.onnx_path, split, 1, 1)
        counts.append(len(seen))
        assert len(set(seen)) == len(seen)
    assert counts[0] == counts[1] + 1  # that of the pool


def outputs(proto: onnx.ModelProto, images: Split, rounded: bool) -> NDArray[np.float32]:
    """Return the logits, with weights rounded to 4 bits or as they are."""
    scheme, proto = (
        WeightScheme("int4", True),
        onnx.ModelProto.FromString(proto.SerializeToString()),
    )
    nodes = layers.find_plain_layers(proto.graph, Selection())
    for node in nodes.values() if rounded else ():
        layers.round_weights(proto.graph, node, scheme)
    last = [*nodes.values()][-1].output[0]
    return np.asarray(open_runner(expose(proto, [last]))(next(iter(images.batches(100))))[0])


@pytest.mark.slow
def test_what_is_learned_is_nearer_to_fp32(shapes_model, images, learned):
    fp32 = onnx.load(shapes_model.onnx_path)
    exact = outputs(fp32, images, rounded=False)
    errors = [
        np.square(outputs(proto, images, rounded=True) - exact).mean()
        for proto in (fp32, learned[0])
    ]
    assert errors[1] < 0.7 * errors[0]


def test_every_range_is_finite_and_the_last_output_has_none(shapes_model, learned):
    graph, ranges = learned[0].graph, learned[1]
    last = [*layers.find_plain_layers(graph, Selection()).values()][-1].output[0]
    assert last not in ranges  # float_output
    assert graph.input[0].name in ranges
    assert all(low <= 0 <= high and low < high for low, high in ranges.values())


def test_a_backend_finds_the_learned_levels(shapes_model, images, tmp_path):
    overrides = ("data=shapes", "per_channel=true", "dtype=u8s8", "corrections.reconstruction=true")
    config = make_config(*overrides, "float_output=true")
    setting = setting_of(images, WeightScheme("int8", True))
    chosen = CorrectionsConfig(reconstruction=True, reconstruction_iterations=3)
    corrected, ranges = sequence.correct(shapes_model, chosen, setting, 1, tmp_path)
    assert ranges is not None
    artifact = quantize_network(quantizer_of(config), corrected, images, tmp_path, ranges)
    tensors = {t.name: numpy_helper.to_array(t) for t in onnx.load(artifact.path).graph.initializer}
    graph = onnx.load(corrected.onnx_path).graph
    for name, (low, high) in ranges.items():
        if f"{name}_scale" in tensors:
            assert tensors[f"{name}_scale"] == pytest.approx((high - low) / 255, rel=1e-5)
    for node in layers.find_plain_layers(graph, Selection()).values():
        weights = numpy_helper.to_array(
            next(t for t in graph.initializer if t.name == node.input[1])
        )
        axis = 0 if node.op_type == "Conv" else 1
        scheme = WeightScheme("int8", True)
        expected = scheme.grid(weights, axis).quantize(weights)
        np.testing.assert_array_equal(tensors[f"{node.input[1]}_quantized"], expected)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_network(shapes_model, images):
    setting = setting_of(images, WeightScheme("int4", True))
    result = [
        reconstruction.reconstruct(shapes_model.onnx_path, setting, 4, seed)[0].SerializeToString()
        for seed in (1, 1, 2)
    ]
    assert result[0] == result[1] != result[2]


@pytest.mark.parametrize("other", ["corrections.adaround=true", "method=qat"])
def test_it_goes_with_no_other_way_to_learn(other):
    with pytest.raises(ConfigError, match=r"with corrections\.reconstruction=true"):
        make_config("corrections.reconstruction=true", other)


def test_tokens_of_a_block_stay_exact():
    tokens = torch.tensor([[1, 2], [3, 4]])
    assert torch.equal(drop_rounding(tokens, tokens, 0.5), tokens)


def test_the_parts_of_a_split_stay_in_its_block(tmp_path):
    path = tmp_path / "split.onnx"
    samples = Split(split_network(path), None, "made")
    proto, ranges = reconstruction.reconstruct(
        path, setting_of(samples, WeightScheme("int4")), 9, 1
    )
    assert ranges["left"] == ranges["right"] == ranges["c"]
    exact = open_runner(str(path), 1)(samples.stored)[0]
    error = np.abs(open_runner(proto, 1)(samples.stored)[0] - exact).max()
    assert 0 < error < 0.2


def test_a_later_block_may_read_the_networks_input(tmp_path):
    """A denoiser adds its input to the last layer's output; two blocks lie between."""
    random = np.random.default_rng(0)
    names = ("a", "b", "c", "d")
    nodes = [
        helper.make_node("Conv", [before, f"w_{name}"], [name], f"conv_{name}", pads=[1] * 4)
        for name, before in zip(names, ("x", *names), strict=False)
    ]
    nodes.append(helper.make_node("Add", ["x", "d"], ["y"], "residual"))
    weights = {f"w_{name}": random.normal(size=(2, 2, 3, 3)) / 4 for name in names}
    constants = {name: value.astype(np.float32) for name, value in weights.items()}
    sizes = ["n", 2, 6, 6]
    path = tmp_path / "denoiser.onnx"
    onnx.save(assemble(nodes, {"x": sizes}, {"y": sizes}, constants), path)
    noise = Split(random.normal(size=(8, 2, 6, 6)).astype(np.float32), None, "noise")
    setting = setting_of(noise, WeightScheme("int8"))
    _, ranges = reconstruction.reconstruct(path, setting, 2, 1)
    assert {"x", "a", "b", "c"} <= {*ranges}
