"""`precision.placement=measured`: blocks, their times, and the choice."""

import csv
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import pytest

from resnet8ptq.core.deadline import Deadline
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.evaluation import latency, paired_latency
from resnet8ptq.evaluation.latency import Timings
from resnet8ptq.evaluation.paired_latency import PairedLatency
from resnet8ptq.experiment.layers import placement
from resnet8ptq.experiment.layers.placement import (
    ALL,
    NONE,
    PLACED,
    Placement,
    Times,
    find_blocks,
    find_fastest,
    solve,
)
from resnet8ptq.graph.layers import weight_layers
from tests.experiment.test_exclusion import prepare
from tests.helpers.configs import make_config

SMALL = ("data=shapes", "calib.samples_per_class=2")


def total(kept: Any, eight: Any, single: Any, borders: Any) -> float:
    """Return the time of a placement whose blocks and borders have these times."""
    own = sum(e if k else s for k, e, s in zip(kept, eight, single, strict=True))
    changes = [a != b for a, b in pairwise(kept)]
    return float(own + np.dot(changes, borders))


def test_files_with_one_border_give_the_time_of_each_block():
    eight, single, borders = [3.0, 1.0, 4.0], [2.0, 5.0, 4.5], [0.25, 0.5]
    up_to = [total([n < k for n in range(3)], eight, single, borders) for k in range(4)]
    from_on = [total([n >= k for n in range(3)], eight, single, borders) for k in range(4)]
    times = solve(up_to, from_on)
    np.testing.assert_allclose(times.saved, [-1, 4, 0.5])
    np.testing.assert_allclose(times.borders, [0, 0.25, 0.5])
    assert times.fp32 == 11.5


@pytest.mark.parametrize(
    ("saved", "borders", "chosen"),
    [
        ((3, -1, 3), (0, 0.2, 0.2), (True, False, True)),
        ((3, -1, 1), (0, 2, 2.5), (True, False, False)),  # the border costs more than it saves
        ((1, 1, 1), (0, 1, 0.5), (True, True, False)),  # never all: that is timed anyway
        ((-1, 0.3, -1), (0, 0.1, 0.2), (False, True, False)),  # nor none
        ((1, 0.01, 1), (0, 0, 0), (True, False, True)),  # less than 2% of its share
    ],
)
def test_the_smallest_sum_with_borders(saved, borders, chosen):
    assert tuple(find_fastest(Times(saved, borders, fp32=3.0))) == chosen


def test_each_block_has_a_quantized_layer(shapes_model):
    graph = onnx.load(shapes_model.onnx_path).graph
    layers = {node.name for node in weight_layers(graph).values()}
    blocks = find_blocks(graph, layers)
    assert [name for block in blocks for name in block.nodes] == [n.name for n in graph.node]
    assert min(block.layers for block in blocks) > 0
    assert sum(block.layers for block in blocks) == len(layers)


def choose(
    shapes: Any, shapes_model: Any, tmp_path: Any, monkeypatch: Any, **milliseconds: float
) -> Placement:
    """Choose with invented times: the first block is slow in 8 bits, all others fast."""

    def measure(loads: Any, *_: Any) -> list[Timings]:
        count = len(loads) // 2
        kept = [[False] * count, [True] * count]
        kept += [[n < k for n in range(count)] for k in range(1, count)]
        kept += [[n >= k for n in range(count)] for k in range(1, count)]
        eight = [3.0, *[0.5] * (count - 1)]
        times = [total(k, eight, [1.0] * count, [0.1] * (count - 1)) for k in kept]
        assert len(kept) == len(loads)
        return [Timings(np.array([time]), None) for time in times]

    def run(loads: Any, *_: Any) -> PairedLatency:
        names = {ALL: "whole", NONE: "fp32", PLACED: "placed"}
        return PairedLatency({name: [milliseconds[names[name]]] * 5 for name in loads}, {}, 1, 1)

    monkeypatch.setattr(latency, "measure", measure)
    monkeypatch.setattr(paired_latency, "time_in_blocks", run)
    work = prepare(make_config(*SMALL), shapes, shapes_model, tmp_path)
    return placement.choose(work, work.unprepared)


def test_slow_blocks_stay_in_float(shapes, shapes_model, tmp_path, monkeypatch):
    times = {"whole": 1.0, "fp32": 2.0, "placed": 0.9}
    chosen = choose(shapes, shapes_model, tmp_path, monkeypatch, **times)
    rows = list(csv.DictReader((tmp_path / placement.FILE).read_text().splitlines()))
    assert [row["in_8_bits"] for row in rows] == ["False", *["True"] * (len(rows) - 1)]
    assert chosen.nodes[0] == rows[0]["first"]
    assert chosen.nodes[-1] == rows[0]["last"]
    assert chosen.layers == int(rows[0]["layers"])
    assert chosen.to_metrics()["placement/fp32_ms"] == 2


def test_a_placement_that_is_no_faster_is_not_taken(shapes, shapes_model, tmp_path, monkeypatch):
    times = {"whole": 1.0, "fp32": 2.0, "placed": 0.99}
    assert choose(shapes, shapes_model, tmp_path, monkeypatch, **times).nodes == ()
    times = {"whole": 1.0, "fp32": 0.5, "placed": 0.495}
    with pytest.raises(UnsupportedError, match="faster than FP32"):
        choose(shapes, shapes_model, tmp_path, monkeypatch, **times)


def test_a_difference_within_noise_is_not_faster():
    assert placement.is_faster([1.0, 1.1, 1.0, 1.1], [2.0, 2.1, 2.0, 2.2])
    assert not placement.is_faster([1.0, 1.1, 1.0, 1.1], [1.01, 1.11, 1.01, 1.11])  # below 2%
    assert not placement.is_faster([1.0, 2.0, 1.0, 2.0], [2.0, 1.1, 2.1, 1.0])


def test_without_time_all_layers_stay_in_8_bits(shapes, shapes_model, tmp_path, monkeypatch):
    monkeypatch.setattr(Deadline, "is_over", True)
    times = {"whole": 1.0, "fp32": 2.0, "placed": 0.1}
    assert choose(shapes, shapes_model, tmp_path, monkeypatch, **times).nodes == ()


def test_simulated_kernels_are_not_timed(shapes, shapes_model, tmp_path):
    work = prepare(make_config(*SMALL, "dtype=w8a16"), shapes, shapes_model, tmp_path)
    with pytest.raises(UnsupportedError, match="w8a16"):
        placement.choose(work, work.unprepared)
