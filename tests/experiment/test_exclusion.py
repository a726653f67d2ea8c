"""The choice of layers to leave in float: the search by itself, then with real models."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core.deadline import Deadline
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.experiment import preparation
from resnet8ptq.experiment.layers import exclusion, noise
from resnet8ptq.experiment.layers.exclusion import Exclusion
from resnet8ptq.experiment.layers.exclusion_search import Trial, Trials, select, to_csv
from resnet8ptq.experiment.layers.noise import NoiseSource
from resnet8ptq.experiment.samples import draw_to_analyse
from resnet8ptq.experiment.workspace import Prepared, Workspace
from resnet8ptq.graph.layers import weight_layers
from resnet8ptq.graph.weights import read_bias, read_weights, write_weights
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.tasks import agreement, classification
from resnet8ptq.tasks.scoring.outputs import Outputs, Targets
from tests.helpers.arrays import TENSORS
from tests.helpers.calling import call
from tests.helpers.configs import make_config
from tests.helpers.factories import evaluator_of, settings_of

NODES = [f"layer_{i}" for i in range(6)]
GROUPS = [[node] for node in NODES]  # the one that adds most noise first
SMALL = ("data=shapes", "calib.samples_per_class=5", "held_out_images=200")
LEVEL = 0.005

drops = st.dictionaries(st.frozensets(st.sampled_from(NODES)), st.integers(1, 9))


def search(tried, max_drop, level=None, deadline=None, groups=GROUPS):
    return select(lambda: groups, tried, max_drop, level, deadline or Deadline())


def trials(drop, size=len) -> Trials:
    """Return trials of `drop` and `size`, functions of the nodes in float."""
    return Trials(lambda n: Trial(n, 1 - drop(n) / 100, drop(n), 1000 + size(n), Path()))


def with_p(p, drop=lambda nodes: 9) -> Trials:
    """Return trials with `p`, a function of the nodes in float."""
    return Trials(lambda n: Trial(n, 1.0, drop(n), 1000 + len(n), Path(), p(n)))


@given(drops, st.integers(1, 9))
def test_the_search_keeps_the_limit_in_few_trials(table, limit):
    tried = trials(lambda nodes: table.get(frozenset(nodes), 9))
    within = [n for n in (0, 1, 2, 4, 6) if tried.measure(tuple(NODES[:n])).drop <= limit]
    if not within:
        least = min(tried.measure(tuple(NODES[:n])).drop for n in (0, 1, 2, 4, 6))
        assert tried(search(tried, limit)).drop == least
        return
    chosen = search(tried, limit)
    assert tried(chosen).drop <= limit
    assert len(chosen) <= within[0]
    assert chosen == [node for node in NODES if node in chosen]  # still in order
    assert len({frozenset(step.nodes) for step in tried.steps}) == len(tried.steps) <= 13


@pytest.mark.parametrize("least", range(7))
def test_by_a_test_a_number_that_is_shown_stays_in_float(least):
    """With p-values that fall with every layer in float: 1, 2, 4, then half of the rest."""
    tried = with_p(lambda nodes: 0.001 if len(nodes) >= least else 0.02)
    assert len(search(tried, 1, LEVEL)) == {5: 5, 6: 6}.get(least, least)


def test_where_nothing_is_lost_no_more_layers_are_tried():
    """The samples are too few for the test, and more layers in float gain nothing."""
    tried = with_p(lambda nodes: 0.2, lambda nodes: 0 if len(nodes) > 1 else 3)
    assert search(tried, 1, LEVEL) == NODES[:2]
    assert max(len(step.nodes) for step in tried.steps) == 2


def test_groups_are_quantized_again_until_the_first_that_is_not_shown():
    """Trying the others too would accept the luckiest of them."""
    accepted = {tuple(NODES[:4]), (*NODES[:2], NODES[2]), (NODES[0], NODES[2])}
    tried = with_p(lambda nodes: 0.001 if nodes in accepted else 0.5)
    assert search(tried, 1, LEVEL) == NODES[:3]


def test_at_the_end_of_the_time_the_best_so_far_is_taken():
    deadline = Deadline()

    def drop(nodes):
        if len(nodes) == 2:
            deadline.at = 0
        return 9 - len(nodes)

    tried = trials(drop)
    assert search(tried, 1, deadline=deadline) == NODES[:2]
    assert len(tried.steps) == 3
    assert deadline.cut_short == ["search for layers in float: 3 trials, none is within max_drop"]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40))
def test_halving_finds_the_source_that_adds_most(added):
    """Noise adds up: few runs find the largest, whatever the number of sources."""
    sources, runs = [NoiseSource((str(i),)) for i in range(len(added))], []

    def measure(group):
        runs.append(group)
        return float(sum(added[int(source.nodes[0])] for source in group))

    groups = noise.halve(sources, measure)
    assert sorted(s.nodes for _, group in groups for s in group) == sorted(s.nodes for s in sources)
    assert len(runs) <= 1 + noise.RUNS
    if max(added) > sum(added) / 3:
        assert added[int(groups[0][1][0].nodes[0])] == max(added)


@pytest.mark.parametrize(
    "second",
    ["z = MatMul(x, w)", "q = MatMul(x, w) p = Relu(q) i = NonZero(p) z = Cast <to = 1> (i)"],
    ids=["values", "as many as are positive"],
)
def test_the_noise_of_every_output_counts(second):
    """The second layer, which the second output shows alone, is rounded most coarsely."""
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        network (float[N, 4] x) => (float[N, 4] y, float[K, L] z)
        { y = MatMul(x, v)  SECOND }""".replace("SECOND", second)
    )
    random = np.random.default_rng(0)
    for node, name in zip(proto.graph.node[:2], "vw", strict=True):
        node.name = f"layer_{name}"
        weights = random.normal(size=(4, 4)).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weights, name))
    quantized = onnx.ModelProto.FromString(proto.SerializeToString())
    for (name, steps), node in zip(
        {"v": 40, "w": 1}.items(), quantized.graph.node[:2], strict=True
    ):
        scale = np.float32(1 / steps)
        (weights,) = (t for t in quantized.graph.initializer if t.name == name)
        levels = np.rint(onnx.numpy_helper.to_array(weights) / scale).astype(np.int8)
        weights.CopyFrom(onnx.numpy_helper.from_array(levels, name))
        quantized.graph.initializer.extend(
            onnx.numpy_helper.from_array(value, f"{name}_{part}")
            for part, value in (("scale", scale), ("zero", np.int8(0)))
        )
        node.input[1] = f"{name}_float"
    for name in "vw":
        rounding = onnx.helper.make_node(
            "DequantizeLinear", [name, f"{name}_scale", f"{name}_zero"], [f"{name}_float"]
        )
        quantized.graph.node.insert(0, rounding)
    samples = Split(random.normal(size=(4, 4)).astype(np.float32), None, "made")
    first, second = noise.rank(proto, quantized, (), samples, 1)
    assert (first.nodes, second.nodes) == (("layer_w",), ("layer_v",))
    assert first.noise > 100 * second.noise > 0


@given(TENSORS, TENSORS)
def test_values_that_one_output_has_alone_count_whole(one, other):
    longer = np.concatenate([one, other])
    square = np.square(other, dtype=np.float64).sum()
    assert noise.square_distance(longer, one) == pytest.approx(square)
    assert noise.square_distance(one, longer) == pytest.approx(square)
    assert noise.square_distance(one, one) == 0
    assert noise.square_distance(one, one[np.newaxis]) > 0 or not one.any()


def test_tensors_with_the_same_levels_share_a_source():
    """A Transpose of a Reshape has the levels of the Reshape's input."""
    nodes = [
        onnx.helper.make_node("Relu", ["x"], ["a"], "relu"),
        onnx.helper.make_node("Reshape", ["a", "shape"], ["b"], "reshape"),
        onnx.helper.make_node("Transpose", ["b"], ["c"], "transpose"),
        onnx.helper.make_node("Sigmoid", ["c"], ["y"], "sigmoid"),
    ]
    fp32 = onnx.helper.make_graph(nodes, "network", [], [])
    rounded = [*nodes]
    for name in "abc":
        rounded += [
            onnx.helper.make_node("QuantizeLinear", [name, "scale", "zero"], [f"{name}_q"]),
            onnx.helper.make_node(
                "DequantizeLinear", [f"{name}_q", "scale", "zero"], [f"{name}_d"]
            ),
        ]
    scale = onnx.numpy_helper.from_array(np.float32(0.1), "scale")
    zero = onnx.numpy_helper.from_array(np.int8(0), "zero")
    quantized = onnx.helper.make_graph(rounded, "network", [], [], [scale, zero])
    [source] = noise.find_sources(fp32, quantized, [])
    assert [tensor.name for tensor in source.activations] == ["a", "b", "c"]
    assert source.nodes == ("relu", "reshape", "transpose", "sigmoid")


def test_200_samples_cannot_show_a_fifth_of_a_point():
    task, labels = classification.build(("a", "b")), np.arange(2000) % 2
    scores = task.score(Outputs((np.eye(2, dtype=np.float32)[labels],)), Targets(labels))
    few = task.score(Outputs((np.eye(2, dtype=np.float32)[labels[:200]],)), Targets(labels[:200]))
    assert exclusion.can_show(task, scores, 0.01, LEVEL)
    assert not exclusion.can_show(task, few, 0.002, LEVEL)


def test_nothing_is_ranked_where_nothing_has_to_stay_in_float():
    tried = trials(lambda nodes: 1)
    assert select(lambda: pytest.fail("ranked"), tried, 1, None, Deadline()) == []
    result = Exclusion([], tuple(tried.steps))
    assert result.to_params() == {"excluded_nodes": "[]"}
    assert result.to_metrics() == {
        **dict.fromkeys(("exclusion/layers", "exclusion/bytes", "system/exclusion_s"), 0),
        "exclusion/held_out_drop": 1,
    }
    assert "no layer stays in float" in result.summary()


def test_no_drop_has_no_sign():
    tried = trials(lambda nodes: -1e-9)
    assert search(tried, 1) == []
    assert "drop 0.00% on" in Exclusion([], tuple(tried.steps)).summary()


@pytest.mark.parametrize(
    ("task", "perfect"), [(classification.build(("a", "b", "c")), True), (agreement.build(), False)]
)
def test_held_out_images_that_fp32_knows_by_heart_are_reported(task, perfect, caplog):
    """Not where FP32 is its own yardstick."""
    probabilities = np.eye(3, dtype=np.float32)
    for labels, messages in (([0, 1, 2], perfect), ([0, 1, 1], False)):
        caplog.clear()
        scores = task.score(Outputs((probabilities,)), Targets(np.array(labels)))
        exclusion.warn_of_perfection(task, scores)
        assert bool(caplog.messages) == messages
        assert not messages or "right on all 3 held-out samples" in caplog.messages[0]


def test_table_has_a_row_for_each_trial():
    tried = trials(lambda nodes: 3 - len(nodes))
    assert search(tried, 1) == NODES[:2]
    rows = list(csv.DictReader(to_csv(tried.steps, "accuracy").splitlines()))
    assert [row["nodes"].split() for row in rows][:3] == [[], NODES[:1], NODES[:2]]
    assert [float(row["drop"]) for row in rows][:3] == [3, 2, 1]


def choose(config: RunConfig, dataset: Dataset, fp32: Fp32Model, folder: Path) -> Exclusion:
    work = prepare(config, dataset, fp32, folder)
    return exclusion.choose(work, work.unprepared)


def prepare(config: RunConfig, dataset: Dataset, fp32: Fp32Model, folder: Path) -> Workspace:
    nowhere: Any = None
    evaluator, samples = evaluator_of(config, fp32), draw_to_analyse(config, dataset)
    return Workspace(settings_of(config), evaluator, samples, folder, folder, nowhere)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnx", "torch"])  # TFLite quantizes all or nothing
def test_choice_on_real_artifacts(backend, shapes, shapes_model, tmp_path):
    layers = weight_layers(onnx.load(shapes_model.onnx_path).graph).values()
    names = [node.name for node in layers][:3]
    overrides = (f"backend={backend}", "dtype=u8s8", "calib=percentile", "latency.repeats=2")
    config = make_config(*SMALL, *overrides, "calib.percentile=80", "nodes_to_exclude=auto")
    config = replace(config, nodes_to_quantize=names, max_drop=0.0)
    drop = choose(config, shapes, shapes_model, tmp_path).chosen.drop
    rows = list(csv.DictReader((tmp_path / exclusion.FILE).read_text().splitlines()))
    result = [float(row["drop"]) for row in rows]
    assert result[0] > 0, "clipped that hard, three layers cost accuracy"
    least = min(result)
    assert drop == pytest.approx(least), "no choice loses nothing: the best is taken"
    best = min(int(row["nodes_in_float"]) for row in rows if float(row["drop"]) == least)
    assert best > 0, "and leaving one in float gives some of it back"

    limit = 1.3 * least  # a trial that stopped has an estimate of its drop
    config = replace(config, max_drop=limit)
    again = choose(config, shapes, shapes_model, tmp_path)
    assert again.chosen.drop <= limit
    assert 0 < len(again.nodes) <= best
    assert not set(names) <= set(again.nodes)
    assert again.excluded_ms is not None
    assert again.excluded_bytes > 0


@pytest.mark.slow
def test_a_layer_in_float_has_its_own_weights_in_every_trial(shapes, shapes_model, tmp_path):
    """Corrected weights of a layer in float would lose what the final file does not lose."""
    spoilt = onnx.load(shapes_model.onnx_path)
    layer = next(iter(weight_layers(spoilt.graph).values()))
    weights = read_weights(spoilt.graph, layer).copy()
    weights.flat[0] = 100 * np.abs(weights).max()
    write_weights(spoilt.graph, layer, weights)
    onnx.save(spoilt, tmp_path / "spoilt.onnx")
    network = shapes_model.with_weights_of(tmp_path / "spoilt.onnx")
    config = make_config(*SMALL, "backend=onnx", "dtype=int8", "nodes_to_exclude=auto")
    config = replace(config, max_drop=0.05)

    def correct(work: Workspace, prepared: Prepared) -> Prepared:
        own = layer.name in prepared.decisions.in_float
        return replace(prepared, network=shapes_model if own else network)

    work = prepare(config, shapes, shapes_model, tmp_path)
    own = exclusion.choose(work, replace(work.unprepared, network=network), correct)
    assert own.steps[0].drop > 0.05 >= own.chosen.drop
    assert layer.name in own.nodes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "again"),
    [
        ("corrections.bias_correction=true", True),
        ("corrections.smooth_quant=true", False),
        ("corrections.adaround=true corrections.smooth_quant=true", False),
    ],
)
def test_a_run_corrects_the_network_of_each_trial_again(
    words, again, shapes, shapes_model, tmp_path, monkeypatch
):
    class EndError(Exception):
        pass

    def choose(work: Workspace, prepared: Prepared, correct: Any) -> None:
        seen.append((prepared, correct))
        raise EndError

    monkeypatch.setattr(exclusion, "choose", choose)
    seen: list[Any] = []
    quick = ("corrections.adaround_iterations=1",) if "adaround" in words else ()
    config = make_config(*SMALL, *words.split(), *quick, "nodes_to_exclude=auto")
    work = prepare(config, shapes, shapes_model, tmp_path)
    with pytest.raises(EndError):
        preparation.prepare(work)
    [(prepared, correct)] = seen
    assert (correct is not None) == again
    if again:
        graph = onnx.load(shapes_model.onnx_path).graph
        first, second, *_ = weight_layers(graph).values()
        network = correct(work, prepared.decide(in_float=[first.name])).network
        corrected = onnx.load(network.onnx_path).graph
        same = [
            np.array_equal(read_bias(graph, layer), read_bias(corrected, layer))
            for layer in (first, second)
        ]
        assert same == [True, False]


@pytest.mark.slow
def test_a_run_tells_what_it_left_in_float(tmp_path):
    run = ("backend=onnx", "dtype=u8s8", "nodes_to_exclude=auto", "max_drop=0.5")
    called = call(tmp_path, *SMALL, *run, "latency.enabled=false")
    assert called.code == 0, called.err
    assert "no layer stays in float" in " ".join(called.err.split())
    (logged,) = called.runs
    assert logged.data.params["nodes_to_exclude"] == "auto"
    assert logged.data.params["excluded_nodes"] == "[]"
    assert logged.data.metrics["exclusion/layers"] == 0
    assert logged.data.metrics["exclusion/held_out_drop"] < 1
    assert exclusion.FILE in called.artifacts(logged)
