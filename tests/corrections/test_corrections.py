"""Corrections of the FP32 network: what they keep, what they lower, and the levels they settle."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from resnet8ptq.config import schema
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import cache, memory
from resnet8ptq.core.deadline import Deadline
from resnet8ptq.core.machine import Runtime
from resnet8ptq.corrections import adaround, bias_correction, equalization, layers, sequence
from resnet8ptq.corrections.layers import CorrectionSettings
from resnet8ptq.data import locate, registry
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.sampling import draw_calibration
from resnet8ptq.graph.layers import channel_axis, float_tensors
from resnet8ptq.graph.weights import read_bias, read_initializer, read_weights, write_weights
from resnet8ptq.models import model
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.grid import ActivationScheme, WeightScheme
from resnet8ptq.precision.plan import Plan, Selection
from tests.helpers.assembling import assemble
from tests.helpers.configs import make_config
from tests.helpers.factories import THREADS, quantize_network, quantizer_of

SCHEMES = [("int8", "false"), ("int8", "true"), ("uint8", "false"), ("uint8", "true")]
PLAIN = ("equalization", "adaround", "bias_correction")  # these keep the nodes of a CNN


@pytest.fixture(scope="session")
def images(shapes: Dataset) -> Split:
    return draw_calibration(shapes, 5, 42).split


@pytest.fixture
def proto(shapes_model: Fp32Model) -> onnx.ModelProto:
    return onnx.load(shapes_model.onnx_path)


@pytest.fixture(autouse=True)
def fewer_rows(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any) -> None:
    monkeypatch.setenv("RESNET8PTQ_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(adaround, "SAMPLES", 250)
    monkeypatch.setattr(adaround, "BATCH", 50)


def configure(*overrides: str) -> RunConfig:
    short = ("corrections.adaround_iterations=30", "threads=1")
    return make_config("data=shapes", "latency.enabled=false", *short, *overrides)


def setting_of(config: RunConfig, images: Split) -> CorrectionSettings:
    weights = WeightScheme.of(config, quantizer_of(config).resolve().weight_bits == 7)
    selection = Selection.of(config)
    runtime = Runtime(cache.folder(None), THREADS)
    return CorrectionSettings(
        Plan(weights), selection, images, config.calib, runtime, ActivationScheme(), False
    )


def correct(config: RunConfig, fp32: Fp32Model, images: Split, folder: Path) -> Fp32Model:
    setting = setting_of(config, images)
    return sequence.correct(fp32, config.corrections, setting, config.seed, folder)[0]


def switch_on(*names: str) -> list[str]:
    return [f"corrections.{name}=true" for name in names]


def predict(proto: onnx.ModelProto, batch: NDArray[np.float32]) -> NDArray[np.float32]:
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    return np.asarray(session.run(None, {session.get_inputs()[0].name: batch})[0])


def make_network(
    nodes: list[onnx.NodeProto], shape: tuple[int, ...], **tensors: NDArray[np.float32]
) -> onnx.ModelProto:
    return assemble(nodes, {"input": [None, *shape]}, {"output": ["n", "c", "h", "w"]}, tensors)


def normal(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("bias", ["computed", "by_row"])
def test_a_layer_without_a_bias_by_channel_is_not_corrected(bias):
    inputs = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [4, 5])]
    outputs = [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [4, 5])]
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["computed"], name="first"),
        helper.make_node("Gemm", ["computed", "w", bias], ["y"], name="second"),
    ]
    shapes = {"w": (5, 5), "b": (5,), "by_row": (4, 5)}
    constants = [
        numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in shapes.items()
    ]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, constants)
    assert list(layers.find_plain_layers(graph, Selection())) == ["first"]
    proto = helper.make_model(graph)
    assert equalization.equalize(proto, Selection()) == proto


def test_nothing_to_correct(shapes_model, images, tmp_path):
    assert correct(configure("dtype=int8"), shapes_model, images, tmp_path) is shapes_model
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", schema.CORRECTIONS)
def test_every_switch_has_a_place_in_the_sequence(name, shapes_model, images, tmp_path, caplog):
    """Without one, the switch would have no effect, and no message would say so."""
    caplog.set_level("INFO")
    config = configure(*switch_on(name), "corrections.reconstruction_iterations=5")
    correct(config, shapes_model, images, tmp_path)
    assert f"corrections.{name}: " in caplog.text


def test_equalization_keeps_the_function(proto, images):
    equalized = equalization.equalize(proto, Selection())
    pairs = equalization.find_pairs(equalized.graph, Selection())
    assert len(pairs) == 3  # one in each residual block
    for first, second in pairs:
        ranges = np.abs(read_weights(equalized.graph, first)).max(axis=(1, 2, 3))
        behind = np.abs(read_weights(equalized.graph, second)).max(axis=(0, 2, 3))
        np.testing.assert_allclose(ranges, behind, rtol=1e-3)
    batch = images.stored.astype(np.float32)
    np.testing.assert_allclose(predict(equalized, batch), predict(proto, batch), atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("activation", ["Relu", "LeakyRelu"])
def test_equalization_of_grouped_convolutions(groups, activation):
    network = make_network(
        [
            helper.make_node("Conv", ["input", "w0"], ["a"], name="first"),
            helper.make_node(activation, ["a"], ["b"], name="relu"),
            helper.make_node("Conv", ["b", "w1"], ["c"], name="second", group=groups),
            helper.make_node("Conv", ["c", "w2"], ["output"], name="third"),
        ],
        (3, 8, 8),
        w0=normal(8, 3, 3, 3) * np.geomspace(0.01, 10, 8, dtype=np.float32)[:, None, None, None],
        w1=normal(8, 8 // groups, 3, 3),
        w2=normal(4, 8, 1, 1),
    )
    equalized = equalization.equalize(network, Selection())
    weights = read_initializer(equalized.graph, "w0")
    spread = np.abs(weights).max(axis=(1, 2, 3))
    assert spread.max() / spread.min() < 300  # it was 1000
    batch = normal(2, 3, 8, 8)
    expected = predict(network, batch)
    np.testing.assert_allclose(predict(equalized, batch), expected, atol=1e-4 * expected.max())


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        ({}, 1),
        ({"pads": [1, 0, 2, 1], "strides": [2, 1]}, 1),
        ({"dilations": [2, 1], "pads": [1, 1, 1, 1]}, 2),
    ],
)
def test_windows_are_what_the_convolution_multiplies(attributes, groups):
    weights = normal(8, 4 // groups, 3, 2)
    node = helper.make_node("Conv", ["input", "w"], ["output"], group=groups, **attributes)
    batch = normal(2, 4, 9, 10)
    expected = predict(make_network([node], (4, 9, 10), w=weights), batch)
    count = adaround.count_positions(batch, node, weights)
    assert count == expected[0, 0].size
    positions = np.tile(np.arange(count), (2, 1))
    rows = adaround.sample_windows(batch, node, weights, positions)
    outputs = np.einsum("ngk,gok->ngo", rows, weights.reshape(groups, 8 // groups, -1))
    outputs = outputs.reshape(2, count, 8).transpose(0, 2, 1).reshape(expected.shape)
    np.testing.assert_allclose(outputs, expected, atol=1e-5)


@given(
    scheme=st.builds(
        WeightScheme,
        st.sampled_from(["int8", "uint8"]),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    ),
    shift=st.floats(-3, 3),
    size=st.floats(1e-6, 1e3),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_grid_is_found_again(scheme, shift, size, seed):
    random = np.random.default_rng(seed)
    weights = (size * (random.normal(size=(4, 3, 3, 3)) + shift)).astype(np.float32)
    grid, kept = scheme.grid(weights, 0), adaround.find_kept(weights, scheme)
    levels = np.floor(weights / grid.scale).astype(np.int64) + grid.zero_point
    levels = np.clip(levels + random.integers(2, size=levels.shape), grid.lowest, grid.highest)
    levels = np.clip(levels, grid.lowest + 1, grid.highest - 1)
    levels = np.where(kept, grid.quantize(weights), levels)

    placed = adaround.on_levels(weights, levels, scheme)
    again = scheme.grid(placed, 0)
    np.testing.assert_array_equal(again.scale, grid.scale)
    np.testing.assert_array_equal(again.zero_point, grid.zero_point)
    np.testing.assert_array_equal(again.quantize(placed), levels)


def make_problem(
    weights: NDArray[np.float32], inputs: NDArray[np.float32], relu: bool = False
) -> adaround.Problem:
    """Return the problem of a layer [output channels, ...] with inputs [n, groups, inputs]."""
    groups = inputs.shape[1]
    matrices = weights.reshape(groups, len(weights) // groups, -1)
    targets = torch.from_numpy(np.einsum("ngk,gok->ngo", inputs, matrices))
    bias = torch.zeros(groups, 1, matrices.shape[1])
    return adaround.Problem(
        torch.from_numpy(inputs), targets.relu() if relu else targets, bias, relu
    )


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_a_quadratic_error_is_that_of_the_rows(groups):
    """Also with inputs that differ from those of the targets, as behind rounded layers."""
    weights, inputs = normal(8, 12), normal(300, groups, 12)
    exact, fp32 = make_problem(weights, inputs), torch.from_numpy(weights)
    problem = replace(exact, inputs=exact.inputs + 0.1 * torch.from_numpy(normal(groups, 12)))
    for size in (0.0, 0.01, 1.0):
        tried = fp32 + size * torch.from_numpy(normal(12, 8).T.copy())
        rise = problem.quadratic(fp32).rise(tried.reshape(groups, 8 // groups, 12)).sum()
        expected = problem.error(tried) - problem.error(fp32)
        torch.testing.assert_close(rise, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("groups", [1, 4])
def test_after_descent_no_single_move_lowers_the_error(groups):
    weights = torch.from_numpy(normal(8, 6))
    problem = make_problem(weights.numpy(), 1 + normal(200, groups, 6))
    lower, step = (4 * weights).floor() / 4, torch.full_like(weights, 0.25)
    step[0, 0] = 0  # a weight that keeps its level
    starts = torch.stack([torch.zeros_like(lower), torch.ones_like(lower)])

    def error(up: torch.Tensor) -> float:
        return float(problem.error(lower + step * up))

    def descend(*indices: int) -> torch.Tensor:
        return problem.quadratic(weights).descend(lower, step, starts[[*indices]])

    up = descend(0, 1)
    assert error(up) < 0.9 * min(map(error, starts))
    assert error(up) < min(error(descend(0)), error(descend(1)))  # the best of each channel
    for index in np.ndindex(*up.shape):
        moved = up.clone()
        moved[index] = 1 - moved[index]
        assert error(moved) >= error(up) * (1 - 1e-5)


@pytest.mark.parametrize(
    ("dtype", "per_channel", "relu", "groups"),
    [
        (*scheme, relu, groups)
        for groups in (1, 4)
        for scheme, relu in zip(SCHEMES, (False, True, True, False), strict=True)
    ],
)
def test_adaround_beats_nearest_rounding(dtype, per_channel, relu, groups):
    config = configure(f"dtype={dtype}", f"per_channel={per_channel}")
    scheme = WeightScheme.of(config)
    weights = normal(32, 4 // groups, 3, 3)
    # Inputs with a mean, as behind a ReLU: errors of a channel's weights then add up.
    problem = make_problem(weights, 1 + np.abs(normal(500, groups, 36 // groups)), relu)

    def error(values: NDArray[np.float32]) -> float:
        return float(problem.error(torch.from_numpy(values)))

    drawn = np.random.default_rng(0), ""
    levels = adaround.learn_levels(problem, weights, scheme, 300, *drawn, Deadline())
    grid = scheme.grid(weights, 0)
    learned, nearest = error(grid.dequantize(levels)), error(grid.round(weights))
    assert learned < 0.6 * nearest
    assert np.abs(grid.dequantize(levels) - weights).max() <= 1.01 * grid.scale.max()


@pytest.mark.slow
def test_learned_layers_are_kept_and_the_rest_ends_in_time(proto, images, caplog):
    """With the time up after some layers, a second run has these, and no more."""
    setting = setting_of(configure(), images)
    known = len(layers.find_plain_layers(proto.graph, setting.selection))
    deadline = setting.runtime.deadline

    class After(Deadline):
        asked = 0

        @property
        def is_over(self) -> bool:
            self.asked += 1
            return self.asked > 70  # 30 iterations for each layer, and one before

    short = replace(setting, runtime=replace(setting.runtime, deadline=After()))
    over = replace(setting, runtime=replace(setting.runtime, deadline=Deadline(at=0)))
    made = [adaround.learn_rounding(proto, split, 30, 0) for split in (short, over)]
    assert made[0] == made[1] != proto
    for split in (short, over):
        assert split.runtime.deadline.cut_short == [f"learned rounding: 2 of {known} layers"]
    assert "max_seconds: the time is up: learned rounding" in caplog.text
    assert adaround.learn_rounding(proto, setting, 30, 0) != made[0]
    assert deadline.cut_short == []


def test_memory_of_large_networks_is_limited(proto, images, monkeypatch):
    """Of samples that run at once, and of rows that a layer learns from."""
    setting = setting_of(configure(), images)
    posed: list[adaround.Problem] = []

    def spy(
        problem: adaround.Problem, weights: NDArray[np.float32], *rest: object, **named: object
    ) -> object:
        posed.append(problem)
        return setting.weights.scheme("").grid(weights, 0).quantize(weights)

    monkeypatch.setattr(adaround, "learn_levels", spy)
    monkeypatch.setattr(adaround, "SAMPLES", 16_000)
    monkeypatch.setattr(memory, "step", lambda: 2**18)
    adaround.learn_rounding(proto, setting, 1, 0)
    parts = [part for problem in posed for part in (problem.inputs, problem.targets)]
    assert all(part.nbytes <= 2**18 + part[0].nbytes * len(images) for part in parts)
    assert len({len(problem.inputs) for problem in posed}) > 1  # fewer of wide ones
    monkeypatch.setattr(memory, "step", lambda: 1)
    name = proto.graph.node[-1].input[0]
    assert [len(one) for [one] in setting.walk(proto).run([name])] == [1] * len(images)


def test_means_and_errors_in_parts_are_those_of_the_whole(proto, images, monkeypatch):
    """Where one sample's tensors together exceed the budget, they are made some at once."""
    setting = setting_of(configure(), images)
    errors = layers.errors(proto, proto, setting)
    corrected = bias_correction.correct_biases(proto, proto, setting)
    monkeypatch.setattr(memory, "step", lambda: 2**15)
    assert len(setting.walk(proto).parts(float_tensors(proto))) > 1
    assert layers.errors(proto, proto, setting) == pytest.approx(errors, rel=1e-4)
    again = bias_correction.correct_biases(proto, proto, setting)
    for node in layers.find_plain_layers(proto.graph, setting.selection).values():
        result, wanted = (read_bias(made.graph, node) for made in (again, corrected))
        np.testing.assert_allclose(result, wanted, rtol=1e-3, atol=1e-4)


def test_weights_are_replaced_in_their_place(proto):
    """What is taken out of a graph's list stays in memory with the graph."""
    names = [tensor.name for tensor in proto.graph.initializer]
    node = next(node for node in proto.graph.node if node.op_type == "Conv")
    weights = read_weights(proto.graph, node) + 1
    write_weights(proto.graph, node, weights)
    np.testing.assert_array_equal(read_weights(proto.graph, node), weights)
    assert [tensor.name for tensor in proto.graph.initializer] == names


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "per_channel"), SCHEMES)
def test_the_artifact_holds_the_learned_levels(
    dtype, per_channel, shapes_model, images, tmp_path, monkeypatch
):
    learned: list[NDArray[np.int64]] = []
    learn = adaround.learn_levels

    def note(*args: object, **named: object) -> NDArray[np.int64]:
        learned.append(learn(*args, **named))
        return learned[-1]

    monkeypatch.setattr(adaround, "learn_levels", note)
    config = configure(f"dtype={dtype}", f"per_channel={per_channel}", *switch_on("adaround"))
    corrected = correct(config, shapes_model, images, tmp_path)
    artifact = quantize_network(quantizer_of(config), corrected, images, tmp_path)

    quantized = onnx.load(artifact.path).graph
    tensors = {item.name: numpy_helper.to_array(item) for item in quantized.initializer}
    nodes = layers.find_plain_layers(onnx.load(corrected.onnx_path).graph, Selection.of(config))
    assert len(learned) == len(nodes)
    moved = 0
    for levels, node in zip(learned, nodes.values(), strict=True):
        stored = tensors[f"{node.input[1]}_quantized"]
        np.testing.assert_array_equal(np.moveaxis(stored, channel_axis(node), 0), levels)
        weights = read_weights(onnx.load(shapes_model.onnx_path).graph, node)
        moved += (WeightScheme.of(config).grid(weights, 0).quantize(weights) != levels).sum()
    assert moved > 100  # from the nearest level


def test_bias_correction_removes_the_mean_error(proto, images):
    setting = setting_of(configure(), images)
    corrected = bias_correction.correct_biases(proto, proto, setting)
    simulated = copy.deepcopy(corrected)
    nodes = layers.find_plain_layers(simulated.graph, setting.selection)
    for name, node in nodes.items():
        layers.round_weights(simulated.graph, node, setting.weights.scheme(name))
    names = [node.output[0] for node in nodes.values()]
    walk = setting.walk(proto)
    [targets], [outputs] = walk.run(names), walk.through(simulated).run(names)
    for target, output in zip(targets, outputs, strict=True):
        axes = (0, 2, 3) if target.ndim == 4 else (0,)
        error = (output - target).mean(axis=axes, dtype=np.float64)
        assert np.abs(error).max() < 1e-4 * np.abs(target).max()


def test_adaround_corrects_each_bias_before_the_next_layer(proto, images, monkeypatch):
    """With nearest levels instead of learned ones, the biases are those of bias correction."""

    def nearest(problem: object, weights: NDArray[np.float32], scheme: WeightScheme, **_: object):
        return scheme.grid(weights, 0).quantize(weights)

    monkeypatch.setattr(adaround, "learn_levels", nearest)
    setting = setting_of(configure(), images)
    made = adaround.learn_rounding(proto, setting, 1, 0, correct_biases=True)
    expected = bias_correction.correct_biases(proto, proto, setting)
    nodes = layers.find_plain_layers(proto.graph, setting.selection)
    for node in nodes.values():
        bias = read_bias(made.graph, node)
        assert bias == pytest.approx(read_bias(expected.graph, node), abs=1e-5)
        assert not np.array_equal(bias, read_bias(proto.graph, node))


@pytest.mark.parametrize("first", [False, True])
def test_the_bias_of_a_matmul_is_in_the_add_after_it(images, first):
    """As exporters write the layers of transformers; the second MatMul has no bias to correct."""
    shape, inputs = images.stored.shape[1:], ["b", "product"] if first else ["product", "b"]
    network = make_network(
        [
            helper.make_node("Flatten", ["input"], ["flat"], name="flat"),
            helper.make_node("MatMul", ["flat", "w"], ["product"], name="layer"),
            helper.make_node("Add", inputs, ["hidden"], name="bias"),
            helper.make_node("MatMul", ["hidden", "v"], ["output"], name="last"),
        ],
        shape,
        w=normal(int(np.prod(shape)), 8),
        b=normal(8),
        v=normal(8, 3),
    )
    setting = setting_of(configure(), images)
    corrected = bias_correction.correct_biases(network, network, setting)
    simulated = copy.deepcopy(corrected)
    for node in layers.find_plain_layers(simulated.graph, setting.selection).values():
        layers.round_weights(simulated.graph, node, setting.weights.scheme(node.name))
    walk = setting.walk(network)
    [[target]], [[output]] = walk.run(["hidden"]), walk.through(simulated).run(["hidden"])
    error = np.abs((output - target).mean(axis=0, dtype=np.float64))
    assert error.max() < 1e-4 * np.abs(target).max()
    assert not np.array_equal(
        read_initializer(corrected.graph, "b"), read_initializer(network.graph, "b")
    )
    again = bias_correction.correct_biases(network, corrected, setting)  # as after AdaRound
    assert read_initializer(again.graph, "b") == pytest.approx(
        read_initializer(corrected.graph, "b"), rel=1e-4
    )
    before, after = (layers.errors(network, made, setting) for made in (network, corrected))
    assert after["layer"] < before["layer"]


def test_bias_correction_adds_a_bias(images):
    network = make_network(
        [
            helper.make_node("Transpose", ["input"], ["image"], name="nchw", perm=[0, 3, 1, 2]),
            helper.make_node("Conv", ["image", "w"], ["output"], name="layer"),
        ],
        images.stored.shape[1:],
        w=normal(8, 3, 3, 3),
    )
    corrected = bias_correction.correct_biases(network, network, setting_of(configure(), images))
    onnx.checker.check_model(corrected)
    bias = read_bias(corrected.graph, corrected.graph.node[1])
    assert np.abs(bias).min() > 0


@pytest.mark.parametrize("name", PLAIN)
def test_layers_in_float_are_left_alone(name, proto, shapes_model, images, tmp_path):
    config = configure(*switch_on(name))
    *others, first, last = layers.find_plain_layers(proto.graph, Selection.of(config)).values()
    first, last = others[1], last  # the first of a pair, and the dense layer
    config.nodes_to_exclude = [first.name, last.name]
    corrected = onnx.load(correct(config, shapes_model, images, tmp_path).onnx_path)
    assert [node.name for node in corrected.graph.node] == [n.name for n in proto.graph.node]
    tensors = {item.name: numpy_helper.to_array(item) for item in proto.graph.initializer}
    changed = {
        item.name
        for item in corrected.graph.initializer
        if not np.array_equal(numpy_helper.to_array(item), tensors[item.name])
    }
    assert changed
    assert not changed & {*first.input, *last.input}


def test_rounding_is_learned_beside_the_layers_in_float(images):
    """8 bits would destroy the first layer: its largest weights are those of no sample."""
    weights = normal(3, 8)
    weights[0] = 200
    network = make_network(
        [
            helper.make_node("ReduceMean", ["input"], ["mean"], name="mean", axes=[1, 2]),
            helper.make_node("Flatten", ["mean"], ["flat"], name="flat"),
            helper.make_node("Mul", ["flat", "mask"], ["masked"], name="mask"),
            helper.make_node("MatMul", ["masked", "w"], ["hidden"], name="first"),
            helper.make_node("MatMul", ["hidden", "v"], ["output"], name="last"),
        ],
        images.stored.shape[1:],
        mask=np.array([0, 1, 1], np.float32),
        w=weights,
        v=normal(8, 3),
    )
    setting = setting_of(configure("nodes_to_exclude=[first]"), images)
    nearest = layers.errors(network, network, setting)["last"]
    learned = adaround.learn_rounding(network, setting, 100, 0)
    assert layers.errors(network, learned, setting)["last"] <= nearest


def test_a_pair_without_its_layer_is_reported(proto, caplog):
    firsts = [node.name for node, _ in equalization.find_pairs(proto.graph, Selection())]
    assert equalization.equalize(proto, Selection(nodes_to_exclude=firsts)) == proto
    assert "corrections.equalization: changes nothing" in caplog.text


@pytest.mark.slow
def test_same_seed_same_file(shapes_model, images, tmp_path):
    def write(folder: str, *overrides: str) -> bytes:
        config = configure(*switch_on(*PLAIN), *overrides)
        (tmp_path / folder).mkdir()
        corrected = correct(config, shapes_model, images, tmp_path / folder)
        return corrected.onnx_path.read_bytes()

    one = write("one")
    assert write("two") == one
    assert write("three", "seed=1") != one


@pytest.mark.slow
@pytest.mark.usefixtures("real_files")
def test_real_network(cache_root, tmp_path, caplog):
    config = make_config("threads=1", "corrections.adaround_iterations=50")
    config = replace(config, data=locate.find_data(config.data))
    dataset = registry.load(config.data.name, config.data.root)
    fp32 = model.load_network(config.model, dataset, cache_root)
    images = draw_calibration(dataset, 10, config.seed).split
    proto = onnx.load(fp32.onnx_path)
    setting = setting_of(config, images)
    before = layers.errors(proto, proto, setting)
    config.corrections = replace(config.corrections, adaround=True, bias_correction=True)
    with caplog.at_level("INFO"):
        corrected = correct(config, fp32, images, tmp_path)
    after = layers.errors(proto, onnx.load(corrected.onnx_path), setting)
    assert all(after[name] < 0.5 * before[name] for name in before)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "corrections.adaround",
        "corrections.bias_correction",
    ]
