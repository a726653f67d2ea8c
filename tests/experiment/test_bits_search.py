"""Bits for each layer: the plans by themselves, then in files of ONNX Runtime."""

import itertools
from dataclasses import replace

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from resnet8ptq.core.errors import ConfigError, UnsupportedError
from resnet8ptq.corrections import adaround
from resnet8ptq.corrections.layers import CorrectionSettings
from resnet8ptq.data.sampling import draw_calibration
from resnet8ptq.experiment.layers.bits_search import (
    Option,
    TriedPlan,
    choose,
    find_plans,
    measure_options,
)
from resnet8ptq.graph.layers import channel_axis, weight_layers
from resnet8ptq.graph.weights import read_weights
from resnet8ptq.precision.decisions import Decisions
from resnet8ptq.precision.grid import ActivationScheme, WeightScheme
from resnet8ptq.precision.plan import Plan, Selection, find_float_nodes
from tests.helpers.calling import call
from tests.helpers.configs import make_config
from tests.helpers.factories import quantize_network, quantizer_of, runtime_of

WIDTHS = (2, 4, 8)
# Of each layer: its weights, and what its error in 4 bits and in 2 is more than in 8.
networks = st.lists(
    st.tuples(st.integers(8, 999), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=6
)


def options_of(network: list[tuple[int, float, float]]) -> list[Option]:
    return [
        Option(f"layer_{i}", bits, error, weights * (8 - bits) // 8)
        for i, (weights, four, two) in enumerate(network)
        for bits, error in ((8, 0.0), (4, four), (2, four + two))
    ]


def size_of(plan, network) -> int:
    return 100 + sum(weights * plan[f"layer_{i}"] // 8 for i, (weights, *_) in enumerate(network))


def totals(plan, network) -> tuple[int, float]:
    options = {(option.layer, option.bits): option for option in options_of(network)}
    chosen = [options[item] for item in plan.items()]
    return sum(o.saved_bytes for o in chosen), sum(o.error for o in chosen)


@given(networks)
def test_plans_save_more_with_more_error(network):
    result = [totals(plan, network) for plan in find_plans(options_of(network))]
    for before, after in itertools.pairwise(result):
        assert before[0] < after[0]
        assert before[1] < after[1]
    assert result[-1][0] == sum(weights * 6 // 8 for weights, *_ in network)


@pytest.mark.slow
@given(networks, st.floats(0, 1))
def test_no_plan_saves_as_much_with_less_error(network, share):
    every = [
        totals({f"layer_{i}": bits for i, bits in enumerate(chosen)}, network)
        for chosen in itertools.product(WIDTHS, repeat=len(network))
    ]
    most = max(saved for saved, _ in every)
    wanted = share * most
    best = min(error for saved, error in every if saved >= wanted)
    plans = [totals(plan, network) for plan in find_plans(options_of(network))]
    # Plans that save nearly the same, by a thousandth for each layer, are not told apart.
    width = max(1, most // 1000) * len(network)
    assert min(error for saved, error in plans if saved >= wanted - width) <= best + 1e-9


@given(networks, st.integers(100, 9000))
def test_the_largest_plan_within_the_bytes_is_chosen(network, max_bytes):
    plans = find_plans(options_of(network))
    sizes = [size_of(plan, network) for plan in plans]

    def attempt(bits) -> TriedPlan:
        return TriedPlan(bits, size_of(bits, network))

    within = [plan for plan, size in zip(plans, sizes, strict=True) if size <= max_bytes]
    if not within:
        with pytest.raises(ConfigError, match=f"expected at least {sizes[-1]} here"):
            choose(plans, attempt, max_bytes, None)
    else:
        assert choose(plans, attempt, max_bytes, None).bits == within[0]


@given(networks, st.floats(0, 3))
def test_the_smallest_plan_within_the_drop_is_chosen(network, max_drop):
    options = {(option.layer, option.bits): option.error for option in options_of(network)}
    plans = find_plans(options_of(network))

    def attempt(bits) -> TriedPlan:
        return TriedPlan(bits, size_of(bits, network), sum(options[item] for item in bits.items()))

    chosen = choose(plans, attempt, None, max_drop)
    within = [plan for plan in plans if attempt(plan).drop <= max_drop]
    assert chosen.bits == within[-1]
    with pytest.raises(ConfigError, match=r"max_drop: got -1, expected at least 0\.00000"):
        choose(plans, attempt, None, -1)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_file_holds_the_levels_of_its_plan(bits, shapes_model, shapes, tmp_path):
    graph = onnx.load(shapes_model.onnx_path).graph
    name, layer = list(weight_layers(graph).items())[3]
    config = make_config("data=shapes", "per_channel=true", f"precision.plan={{{name}: {bits}}}")
    images = draw_calibration(shapes, 2, 42).split
    artifact = quantize_network(quantizer_of(config), shapes_model, images, tmp_path)
    written = onnx.load(artifact.path).graph
    tensors = {tensor.name: tensor for tensor in written.initializer}
    stored = tensors[f"{layer.input[1]}_quantized"]
    assert onnx.TensorProto.DataType.Name(stored.data_type) == f"INT{2 if bits == 2 else 4}"
    grid = WeightScheme(f"int{bits}", True).grid(read_weights(graph, layer), 0)
    expected = grid.quantize(read_weights(graph, layer))
    result = np.moveaxis(numpy_helper.to_array(stored).astype(int), channel_axis(layer), 0)
    np.testing.assert_array_equal(result, expected)
    assert np.abs(expected).max() == 2 ** (bits - 1) - 1
    scale = numpy_helper.to_array(tensors[f"{layer.input[1]}_scale"])
    np.testing.assert_array_equal(scale, grid.scale.ravel())
    predictor = quantizer_of(config).load(artifact.path, 1)
    assert np.isfinite(predictor.predict(next(iter(images.batches(4))))[0]).all()
    assert artifact.quantized_layers == len(weight_layers(graph))


@given(networks)
def test_a_plan_may_leave_layers_in_float_but_not_all(network):
    wide = [Option(f"layer_{i}", 32, 0.0, -3 * weights) for i, (weights, *_) in enumerate(network)]
    eight = [replace(o, error=o.error + 0.1) for o in options_of(network)]
    plans = find_plans([*eight, *wide])
    result = [[*plan.values()].count(32) for plan in plans]
    assert result[0] == max(result) == len(network) - 1
    assert result[-1] == 0


@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_a_layer_of_32_bits_stays_in_float(backend, shapes_model, shapes, tmp_path):
    layers = weight_layers(onnx.load(shapes_model.onnx_path).graph)
    name, layer = list(layers.items())[3]
    plan = f"precision.plan={{{name}: 32}}"
    config = make_config("data=shapes", f"backend={backend}", "per_channel=true", plan)
    named = make_config(
        *("data=shapes", f"backend={backend}", "per_channel=true"),
        f"nodes_to_exclude=[{layer.name}]",
    )
    images = draw_calibration(shapes, 2, 42).split
    result = []
    for folder, options in (("plan", config), ("named", named)):
        (tmp_path / folder).mkdir()
        artifact = quantize_network(quantizer_of(options), shapes_model, images, tmp_path / folder)
        assert artifact.quantized_layers == len(layers) - 1
        run = quantizer_of(options).load(artifact.path, 1).predict
        result.append(run(next(iter(images.batches(20))))[0])
    np.testing.assert_array_equal(*result)


def test_a_float_layer_that_cannot_be_is_reported(shapes_model):
    with pytest.raises(UnsupportedError, match=r"precision\.plan: got 32 bits; the converter"):
        quantizer_of(make_config("backend=tflite", "precision.plan={dense: 32}")).resolve()
    graph = onnx.load(shapes_model.onnx_path).graph
    selection = Selection.of(make_config("precision.plan={dens: 32, conv2d: 8}"))
    with pytest.raises(
        ConfigError, match=r"precision\.plan: got 'dens', expected layers; nearest:"
    ):
        find_float_nodes(graph, selection)


@pytest.mark.slow
def test_learned_rounding_tells_what_a_layer_costs(shapes, shapes_model):
    config = make_config("data=shapes", "per_channel=true", "dtype=w4a8")
    images = draw_calibration(shapes, 5, 42).split
    setting = CorrectionSettings(
        *(Plan(WeightScheme("int8", True)), Selection(), images, config.calib),
        *(runtime_of(config), ActivationScheme(), True),
    )
    path = shapes_model.onnx_path
    learned = adaround.learn_apart(onnx.load(path), setting, [4], 50, 0)
    nearest, result = (measure_options(path, setting, (4, 8), option) for option in ({}, learned))
    assert [(option.layer, option.bits, option.saved_bytes) for option in nearest] == [
        (option.layer, option.bits, option.saved_bytes) for option in result
    ]
    errors = np.array([[option.error for option in options] for options in (nearest, result)])
    four = np.array([option.bits == 4 for option in nearest])
    assert np.median(errors[1, four] / errors[0, four]) < 0.7
    np.testing.assert_array_equal(errors[0, ~four], errors[1, ~four])


def test_resolved_is_simulated_and_says_all_types():
    resolved = quantizer_of(make_config("dtype=w4a8", "precision.plan={conv2d_1: 8}")).resolve()
    assert (resolved.weight_dtype, resolved.execution) == ("int4, int8", "simulated")
    with pytest.raises(UnsupportedError, match="weights below 8 bits"):
        quantizer_of(make_config("backend=torch", "dtype=w4a8")).resolve()
    with pytest.raises(UnsupportedError, match="take format=qdq"):
        quantizer_of(make_config("dtype=w4a8", "format=qoperator")).resolve()


def test_a_plan_says_what_its_file_holds():
    bits = {"conv1": 4, "conv2": 2, "conv3": 32, "dense": 8}
    plan = Plan.of(Decisions(bits), WeightScheme("int8", reduce_range=True))
    assert plan.to_params(["conv1", "conv2", "dense"], bits) == {
        "planned_bits": "{conv1: 4, conv2: 2, conv3: 32}",
        "weight_dtype": "int2, int4, int8",
        "weight_bits": "2, 4, 7",
    }
    assert plan.to_params(["conv1", "conv2"], bits)["weight_dtype"] == "int2, int4"
    narrow = Plan.of(Decisions(bits), WeightScheme("int4")).to_params(["conv1", "dense"], bits)
    assert narrow["planned_bits"] == "{conv2: 2, conv3: 32, dense: 8}"
    assert narrow["weight_bits"] == "4, 8"


def test_a_layer_that_is_not_there_is_named():
    plan = Plan(WeightScheme("int8"), {"conv9": 4})
    with pytest.raises(ConfigError, match=r"precision\.plan: got 'conv9', .* nearest: conv1"):
        plan.narrow(["conv1", "dense"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("precision.plan=auto", "precision.plan: got 'auto', expected precision.max_bytes or"),
        ("precision.max_bytes=9", "have no effect without plan=auto"),
        ("precision.plan={a: 5}", r"precision.plan: got \{'a': 5\}, expected null \| auto \| bits"),
        ("precision.plan=some", r"precision.plan: got 'some', expected null \| auto"),
    ],
)
def test_what_does_not_fit_together_is_reported(given, message):
    with pytest.raises(ConfigError, match=message):
        make_config(given)


@pytest.mark.parametrize("reduced", [False, True])
def test_an_undecided_plan_rounds_as_the_one_that_is_decided(reduced):
    """Else rounding is learned for levels that the file then does not have."""
    default = WeightScheme("int4", reduce_range=reduced)
    decided = Plan(default, {"a": 8})
    assert Plan(default, undecided=True).most_bits == decided.most_bits == 8 - reduced


@pytest.mark.slow
def test_a_run_within_a_drop_that_8_bits_exceed(tmp_path):
    """Weights of 7 bits, with one scale for a tensor, lose 3 points; with a layer in float none."""
    settings = ("data=shapes", "calib.samples_per_class=1", "reduce_range=true")
    scored = ("evaluate.split=held_out", "held_out_images=300", "latency.enabled=false")
    result = call(tmp_path, *settings, *scored, "precision.plan=auto", "precision.max_drop=0.01")
    assert result.code == 0, result.err
    [table] = tmp_path.glob("runs/**/plan.csv")
    first, *tried = [line.split(",") for line in table.read_text().splitlines()[1:]]
    assert {*first[3:]} == {"8"}
    assert float(first[1]) > 0.01
    within = [line for line in tried if float(line[1]) <= 0.01]
    assert all("32" in line[3:] for line in within)
    assert within


@pytest.mark.slow
def test_a_run_within_a_budget(tmp_path):
    settings = ("data=shapes", "calib.samples_per_class=2", "slim=true")
    scored = ("evaluate.split=held_out", "held_out_images=50")
    plan = ("dtype=w4a8", "per_channel=true", "precision.plan=auto", "precision.max_bytes=50000")
    result = call(tmp_path, *settings, *scored, *plan, "latency.enabled=false")
    assert result.code == 0, result.err
    [table] = tmp_path.glob("runs/**/plan.csv")
    [file] = tmp_path.glob("runs/**/model.onnx")
    assert 26_000 < file.stat().st_size <= 50_000
    sizes = [int(line.split(",")[0]) for line in table.read_text().splitlines()[1:]]
    assert file.stat().st_size in sizes
