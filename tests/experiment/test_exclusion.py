"""The choice of layers to leave in float: the search by itself, then with real models."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core.errors import ConfigError, QuantizationError
from resnet8ptq.data.dataset import Dataset
from resnet8ptq.experiment.layers import exclusion
from resnet8ptq.experiment.layers.exclusion import Exclusion
from resnet8ptq.experiment.layers.exclusion_search import Trial, Trials, select, to_csv
from resnet8ptq.experiment.samples import draw_to_analyse
from resnet8ptq.graph.layers import weight_layers
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.plan import Selection, find_float_nodes
from resnet8ptq.tasks import agreement, classification
from resnet8ptq.tasks.contract import Outputs, Targets, Task
from tests.helpers.calling import call
from tests.helpers.configs import make_config
from tests.helpers.factories import evaluator_of

NODES = [f"layer_{i}" for i in range(6)]
SMALL = ("data=shapes", "calib.samples_per_class=5", "held_out_images=200")

# Lists of how much accuracy each layer costs while it is quantized, and of its bytes in float.
harms = st.lists(st.integers(0, 20), min_size=2, max_size=6)
drops = st.dictionaries(st.frozensets(st.sampled_from(NODES)), st.integers(0, 9))


def trials(drop, size=len) -> Trials:
    """Return trials of `drop` and `size`, functions of the nodes in float."""
    return Trials(lambda n: Trial(n, 1 - drop(n) / 100, drop(n), 1000 + size(n), Path()))


@given(drops, st.integers(0, 9))
def test_search_keeps_the_limit_and_no_layer_in_vain(table, limit) -> None:
    tried = trials(lambda nodes: table.get(frozenset(nodes), 9))
    within = [n for n in range(len(NODES)) if tried.measure(tuple(NODES[:n])).drop <= limit]
    if not within:
        with pytest.raises(QuantizationError, match=rf"max_drop: got {limit}, takes at least"):
            select(lambda: NODES, tried, limit)
        return
    chosen = select(lambda: NODES, tried, limit)
    assert tried(chosen).drop <= limit
    assert len(chosen) <= within[0]
    assert chosen == [node for node in NODES if node in chosen]  # still in rank order
    for node in chosen:
        assert tried([other for other in chosen if other != node]).drop > limit
    assert len({frozenset(step.nodes) for step in tried.steps}) == len(tried.steps)


@given(harms, st.integers(0, 120), st.integers(0, 120))
def test_a_wider_limit_leaves_no_more_in_float(costs, one, other) -> None:
    ranked = sorted(NODES[: len(costs)], key=lambda n: -costs[NODES.index(n)])
    narrow, wide = sorted((one, other))
    found = []
    for limit in (narrow, wide):
        tried = trials(lambda n: sum(costs) - sum(costs[NODES.index(node)] for node in n))
        try:
            found.append(select(lambda: ranked, tried, limit))
        except QuantizationError:
            found.append(ranked)
    assert set(found[1]) <= set(found[0])


LEVEL = 0.0125


def with_p(p, drop=lambda nodes: 9) -> Trials:
    """Return trials with `p`, a function of the nodes in float."""
    return Trials(lambda n: Trial(n, 1.0, drop(n), 1000 + len(n), Path(), p(n)))


@given(st.integers(0, 5), st.integers(2, 6))
def test_by_a_test_as_few_layers_as_are_shown_stay_in_float(least, layers) -> None:
    """With p-values that fall with every layer in float."""
    tried = with_p(lambda nodes: 0.001 if len(nodes) >= least else 0.02)
    ranked = NODES[:layers]
    if least >= layers:
        with pytest.raises(QuantizationError):
            select(lambda: ranked, tried, 1, LEVEL)
        return
    assert len(select(lambda: ranked, tried, 1, LEVEL)) == least


def test_a_lucky_choice_of_few_layers_is_not_tried_after_one_that_is_not_shown() -> None:
    """By the measured drop one layer would do; by the test, from many to few, five are needed."""
    lucky = {1, 5}
    tried = with_p(lambda nodes: 0.001 if len(nodes) in lucky else 0.5, lambda nodes: 0)
    assert len(select(lambda: NODES, tried, 1, LEVEL)) == 5


def test_layers_are_quantized_again_until_the_first_that_is_not_shown() -> None:
    """Trying the others too would accept the luckiest of them."""
    accepted = {tuple(NODES[:5]), tuple(NODES[1:5]), (NODES[1], *NODES[3:5])}
    tried = with_p(lambda nodes: 0.001 if nodes in accepted else 0.5)
    assert select(lambda: NODES, tried, 1, LEVEL) == NODES[1:5]


def test_where_nothing_is_shown_the_measured_drop_decides() -> None:
    tried = with_p(lambda nodes: 0.2, lambda nodes: 0 if len(nodes) > 1 else 3)
    assert select(lambda: NODES, tried, 1, LEVEL) == NODES[:2]


def test_200_samples_cannot_show_a_fifth_of_a_point() -> None:
    task, labels = classification.build(("a", "b")), np.arange(2000) % 2
    scores = task.score(Outputs((np.eye(2, dtype=np.float32)[labels],)), Targets(labels))
    few = task.score(Outputs((np.eye(2, dtype=np.float32)[labels[:200]],)), Targets(labels[:200]))
    assert exclusion.can_show(task, scores, 0.01, LEVEL)
    assert not exclusion.can_show(task, few, 0.002, LEVEL)


def test_the_costliest_layer_is_quantized_again_first() -> None:
    sizes = {"a": 1, "b": 50, "c": 5}
    good = {("a", "c"), ("a", "b", "c"), ("b", "c")}
    tried = trials(lambda n: 0 if n in good else 5, lambda n: sum(sizes[node] for node in n))
    assert select(lambda: ["a", "b", "c", "d"], tried, 1) == ["a", "c"]


def test_nothing_is_ranked_where_nothing_has_to_stay_in_float() -> None:
    tried = trials(lambda nodes: 1)
    assert select(lambda: pytest.fail("ranked"), tried, 1) == []
    found = Exclusion([], tuple(tried.steps))
    assert found.to_params() == {"excluded_nodes": "[]"}
    assert found.to_metrics() == {
        **{
            "exclusion/layers": 0,
            "exclusion/bytes": 0,
            "system/exclusion_s": 0,
            "exclusion/held_out_drop": 1,
        }
    }
    assert "no layer has to stay in float" in found.summary()


def test_no_drop_has_no_sign() -> None:
    tried = trials(lambda nodes: -1e-9)
    assert select(lambda: NODES, tried, 1) == []
    assert "drop 0.00% on" in Exclusion([], tuple(tried.steps)).summary()


@pytest.mark.parametrize(
    ("task", "perfect"), [(classification.build(("a", "b", "c")), True), (agreement.build(), False)]
)
def test_held_out_images_that_fp32_knows_by_heart_are_told(
    task: Task, perfect: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Not where FP32 is its own yardstick."""
    probabilities = np.eye(3, dtype=np.float32)
    for labels, told in (([0, 1, 2], perfect), ([0, 1, 1], False)):
        caplog.clear()
        scores = task.score(Outputs((probabilities,)), Targets(np.array(labels)))
        exclusion.warn_of_perfection(task, scores)
        assert bool(caplog.messages) == told
        assert not told or "right on all 3 held-out images" in caplog.messages[0]


def test_table_has_a_row_for_each_trial() -> None:
    tried = trials(lambda nodes: 3 - len(nodes))
    assert select(lambda: NODES, tried, 1) == NODES[:2]
    rows = list(csv.DictReader(to_csv(tried.steps, "accuracy").splitlines()))
    assert [row["nodes"].split() for row in rows][:3] == [[], NODES[:1], NODES[:2]]
    assert [float(row["drop"]) for row in rows][:3] == [3, 2, 1]


def choose(config: RunConfig, dataset: Dataset, fp32: Fp32Model, folder: Path) -> Exclusion:
    samples = draw_to_analyse(config, dataset)
    return exclusion.choose(config, evaluator_of(config, fp32), samples, fp32, folder)


@pytest.mark.parametrize("backend", ["onnx", "torch"])  # TFLite quantizes all or nothing
def test_choice_on_real_artifacts(
    backend: str, shapes: Dataset, shapes_model: Fp32Model, tmp_path: Path
) -> None:
    layers = weight_layers(onnx.load(shapes_model.onnx_path).graph).values()
    names = [node.name for node in layers][:3]
    overrides = (f"backend={backend}", "dtype=u8s8", "calib=percentile", "latency.repeats=2")
    config = make_config(*SMALL, *overrides, "calib.percentile=80", "nodes_to_exclude=auto")
    config = replace(config, nodes_to_quantize=names, max_drop=0.0)
    try:
        drop = choose(config, shapes, shapes_model, tmp_path).chosen.drop
    except QuantizationError as error:
        assert str(error).startswith("max_drop: got 0.0, takes at least")
    else:
        assert drop <= 0
    rows = list(csv.DictReader((tmp_path / exclusion.FILE).read_text().splitlines()))
    found = [float(row["drop"]) for row in rows]
    assert found[0] > 0, "clipped that hard, three layers cost accuracy"
    least = min(found)
    best = min(int(row["layers"]) for row in rows if float(row["drop"]) == least)
    assert best > 0, "and leaving one in float gives some of it back"

    limit = 1.3 * least  # a trial that stopped has an estimate of its drop
    config = replace(config, max_drop=limit)
    again = choose(config, shapes, shapes_model, tmp_path)
    assert again.chosen.drop <= limit
    assert 0 < len(again.nodes) <= best
    assert set(again.nodes) < set(names)
    assert {layer.node for layer in again.ranking} == set(names)
    assert again.excluded_ms is not None
    assert again.excluded_bytes > 0


def test_a_run_tells_what_it_left_in_float(tmp_path: Path) -> None:
    run = ("backend=onnx", "dtype=u8s8", "nodes_to_exclude=auto", "max_drop=0.5")
    called = call(tmp_path, *SMALL, *run, "latency.enabled=false")
    assert called.code == 0, called.err
    assert "no layer has to stay in float" in " ".join(called.err.split())
    (logged,) = called.runs
    assert logged.data.params["nodes_to_exclude"] == "auto"
    assert logged.data.params["excluded_nodes"] == "[]"
    assert logged.data.metrics["exclusion/layers"] == 0
    assert logged.data.metrics["exclusion/held_out_drop"] < 1
    assert exclusion.FILE in called.artifacts(logged)


def test_auto_counts_as_none_until_it_is_chosen(shapes_model: Fp32Model) -> None:
    graph = onnx.load(shapes_model.onnx_path).graph
    assert find_float_nodes(graph, Selection.of(make_config("nodes_to_exclude=auto"))) == []


def test_sensitivity_with_a_choice_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nodes_to_exclude: got 'auto', takes \[\]"):
        make_config("+analysis=sensitivity", "nodes_to_exclude=auto")
