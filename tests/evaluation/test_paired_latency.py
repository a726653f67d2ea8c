"""Ratios of latencies that were measured in turns, and the race of a sweep's best models."""

import itertools
import json
import math
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.config.loading import load_config
from resnet8ptq.config.schema import LatencyConfig
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.evaluation import latency, paired_latency
from resnet8ptq.evaluation.latency import LEAST, Timings
from resnet8ptq.evaluation.paired_latency import (
    BLOCKS,
    FILE,
    PairedLatency,
    ratio,
    time_in_blocks,
    typical,
)
from resnet8ptq.report.pages import page
from tests.helpers.calling import Called, call

QUICK = (
    *("data=shapes", "latency.repeats=20", "latency.batch_repeats=3", "latency.batch_size=2"),
    *("held_out_images=200", "calib.samples_per_class=5", "threads=1", "report.max_drop=0.2"),
)


def test_a_ratio_by_hand():
    """Ratios 1 and 4: their geometric mean is 2, and t(0.975, 1) = 12.706."""
    result = ratio([1.0, 1.0], [1.0, 4.0])
    assert result.value == pytest.approx(2)
    assert result.high == pytest.approx(2 * np.exp(12.7062 * np.log(2)), rel=1e-3)
    assert result.low == pytest.approx(4 / result.high)
    assert not result.faster
    assert str(ratio([1.0, 1.0], [2.0, 2.0])).startswith("2.00 times as fast (95% interval 2.00")
    assert not ratio([1.0], [9.0]).faster  # one block says nothing of others


@given(st.lists(st.tuples(*[st.floats(0.01, 1e4)] * 2), min_size=2, max_size=BLOCKS))
def test_a_ratio_turned_round_is_its_inverse(blocks):
    model, reference = map(list, zip(*blocks, strict=True))
    there, back = ratio(model, reference), ratio(reference, model)
    assert there.value == pytest.approx(1 / back.value)
    assert there.value == pytest.approx(typical(reference) / typical(model))
    assert there.low <= there.value * (1 + 1e-9)
    assert not (there.faster and back.faster)


def test_a_race_loads_every_model_again_for_each_block(monkeypatch):
    seen: list[list[str]] = []

    def measure(
        loads: list[str], split: object, settings: LatencyConfig, least: int
    ) -> list[Timings]:
        seen.append(list(loads))
        assert least == 1
        assert (settings.repeats, settings.batch_repeats) == (20, LEAST)
        every = np.arange(3.0) + {"a": 1, "b": 11}[loads[0]] + len(seen)
        other = every + (10 if loads[0] == "a" else -10)
        return [
            Timings(times, times if name == "a" else None)
            for name, times in zip(loads, (every, other), strict=True)
        ]

    monkeypatch.setattr(latency, "measure", measure)
    settings = LatencyConfig(batch_size=64, repeats=20 * BLOCKS, batch_repeats=BLOCKS)
    race = time_in_blocks({"a": "a", "b": "b"}, None, settings)
    assert race.single["a"] == [3 + n for n in range(BLOCKS)]  # medians
    assert race.batch == {"a": race.single["a"]}
    assert race.single["b"] == [13 + n for n in range(BLOCKS)]
    assert {tuple(order) for order in seen} == {("a", "b"), ("b", "a")}
    assert PairedLatency.of(json.loads(json.dumps(asdict(race)))) == race


def test_slow_models_race_in_fewer_blocks(monkeypatch):
    now = itertools.count()  # each block takes a second
    monkeypatch.setattr(paired_latency, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    one = Timings(np.ones(3), None)
    monkeypatch.setattr(latency, "measure", lambda loads, *_, least: [one] * len(loads))
    for seconds, blocks in ((0.1, LEAST), (4.3, 7), (1000, BLOCKS)):
        settings = LatencyConfig(batch_size=64, max_seconds=seconds)
        result = time_in_blocks({"a": "a", "b": "b"}, None, settings)
        assert len(result.single["a"]) == blocks


def test_the_fastest_of_several_has_a_wider_interval():
    blocks = [1.0, 1.1, 0.9, 1.05], [2.0, 2.1, 2.2, 1.9]
    alone, of_eight = ratio(*blocks), ratio(*blocks, of=8)
    assert alone.value == of_eight.value
    assert of_eight.low < alone.low < alone.high < of_eight.high


@pytest.mark.parametrize(
    "kept",
    [
        "",
        [],
        {},
        {"single": {"a": [0]}, "batch": {}, "batch_size": 1, "threads": 1},
        {"single": {"a": [1.0, math.nan]}, "batch": {}, "batch_size": 1, "threads": 1},
    ],
)
def test_what_is_no_race_is_refused(kept):
    with pytest.raises((KeyError, TypeError, ValueError)):
        PairedLatency.of(kept)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Called:
    folder = tmp_path_factory.mktemp("race")
    return call(folder, "-m", "backend=onnx,torch", "dtype=int8", *QUICK)


@pytest.mark.slow
def test_the_best_models_of_a_sweep_race_fp32(sweep):
    assert sweep.code == 0, sweep.err
    artifacts = sweep.artifacts(sweep.parent)
    [kept] = json.loads(artifacts[FILE].read_text())
    race = PairedLatency.of(kept)
    ids = {run.info.run_id for run in sweep.children}
    assert set(race.single) == set(race.batch) == {*ids, "onnx fp32", "torch fp32"}
    report = artifacts["report.md"].read_text()
    assert "| fastest, one sample at a time | **" in report
    assert "| fastest, 2 samples at a time | **" in report
    assert "measured in different runs" not in report
    assert "which the reported figures do not use" in report


@pytest.mark.slow
def test_runs_of_a_sweep_score_what_it_chooses_by(sweep):
    for child in sweep.children:
        result = sweep.result(child)
        assert result["params"]["chosen_by"].endswith("training samples")
        metrics = result["metrics"]
        assert 190 < metrics["choice/counts/total"] <= 200
        drop = metrics["choice/baseline/accuracy"] - metrics["choice/accuracy"]
        assert metrics["choice/drop"] == pytest.approx(drop)
        with np.load(sweep.artifacts(child)["choice.npz"]) as kept:
            assert len(kept["labels"]) == metrics["choice/counts/total"]
            mean = (kept["labels"] == kept["predictions"]).mean()
        assert metrics["choice/accuracy"] == pytest.approx(mean)


@pytest.mark.slow
def test_the_report_made_again_takes_the_same_race(sweep, tmp_path):
    words = [f"root={sweep.folder / 'mlruns'}", f"folder={tmp_path}", "max_drop=0.2"]
    page.main(words)
    before = sweep.artifacts(sweep.parent)["report.md"].read_text()
    assert (tmp_path / "report.md").read_text() == before


@pytest.mark.slow
def test_one_run_chooses_nothing(tmp_path):
    done = call(tmp_path, *QUICK, "latency.enabled=false")
    [run] = done.runs
    assert "chosen_by" not in done.result(run)["params"]
    assert "pass" in done.table[-1]["limit"]


@pytest.mark.slow
def test_the_config_of_a_run_reads_back(sweep, tmp_path):
    for child in sweep.children:
        config = load_config(sweep.artifacts(child)["config.yaml"])
        assert config.backend.name == child.data.params["backend"]
        assert config.held_out_images == 200
    (tmp_path / "config.yaml").write_text("[1, 2]")
    with pytest.raises(ConfigError, match=r"config\.yaml: not the config of a run"):
        load_config(tmp_path / "config.yaml")
