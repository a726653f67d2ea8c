"""Latency: what is measured and how it is named; never how long anything took."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from resnet8ptq.config.schema import LatencyConfig
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.data.dataset import Split
from resnet8ptq.evaluation import latency
from resnet8ptq.evaluation.latency import ModelLatency, Timings
from resnet8ptq.models.model import Fp32Model
from tests.helpers.configs import make_config
from tests.helpers.factories import evaluator_of, quantizer_of
from tests.helpers.frameworks import QUANTIZING
from tests.helpers.quantized import Cell

OWN = {f"latency{size}_p{percent}_ms" for size in ("", "_batch") for percent in (50, 95)}
FEW = ("data=shapes", "latency.repeats=4", "latency.batch_repeats=2", "latency.batch_size=8")


def timings(single: list[float], batch: list[float]) -> Timings:
    return Timings(np.array(single), np.array(batch))


def test_metrics_by_hand():
    metrics = ModelLatency(timings([1, 2, 3], [10, 20]), timings([3, 4, 8], [30, 60])).to_metrics()
    expected = {
        "latency_p50_ms": 2,
        "latency_p95_ms": 2.9,
        "latency_batch_p50_ms": 15,
        "latency_batch_p95_ms": 19.5,
        "baseline/latency_p50_ms": 4,
        "baseline/latency_p95_ms": 7.6,
        "baseline/latency_batch_p50_ms": 45,
        "baseline/latency_batch_p95_ms": 58.5,
        "speedup": 2,
        "speedup_batch": 3,
    }
    assert metrics == pytest.approx(expected)


def measure(fp32: Fp32Model, cell: Cell, *overrides: str) -> dict[str, float]:
    config = make_config(*FEW, *overrides)
    few = cell.data.test.take(np.arange(5))  # fewer than a batch
    evaluator = evaluator_of(config, fp32)
    baseline = evaluator.baseline(few)
    assert baseline.path.stat().st_size == baseline.size_bytes
    loads = [partial(evaluator.quantizer.load, cell.artifact.path)]
    if not config.dtype.is_fp32:
        loads.append(partial(evaluator.fp32_quantizer.load, baseline.path))
    return ModelLatency(*latency.measure(loads, few, config.latency)).to_metrics()


@pytest.mark.slow
@pytest.mark.parametrize("backend", QUANTIZING)
def test_a_quantized_model_and_its_baseline(backend, shapes_model, quantize):
    result = measure(shapes_model, quantize(f"backend={backend}"), f"backend={backend}")
    baseline = {f"baseline/{name}" for name in OWN}
    assert set(result) == OWN | baseline | {"speedup", "speedup_batch"}
    assert all(value > 0 for value in result.values())


def test_fp32_has_a_latency_and_no_speedup(shapes_model, quantize):
    assert set(measure(shapes_model, quantize("dtype=fp32"), "dtype=fp32")) == OWN


@pytest.mark.parametrize(
    ("shape", "size"),
    [((32, 32, 3), 32), ((224, 224, 3), 16), ((640, 640, 3), 2), ((4000,) * 2, 1)],
)
def test_a_batch_of_large_samples_is_smaller(shape, size):
    split = SimpleNamespace(sample_bytes=4 * math.prod(shape), limit=lambda size: size)
    assert latency.find_batch_size(LatencyConfig(), split) == size
    assert latency.find_batch_size(LatencyConfig(batch_size=5), split) == 5


@pytest.mark.parametrize(
    ("limit", "repeats", "least", "timed"), [(math.inf, 2, 5, 2), (0, 100, 5, 5), (0, 100, 1, 1)]
)
def test_turns_alternate_and_the_warm_up_is_not_counted(limit, repeats, least, timed):
    """A time limit of 0 also ends the warm-up, whose tenth of 100 would be 10."""
    calls: list[str] = []

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def predict(self, batch):
            assert batch.shape == (4, 2, 2, 3)
            calls.append(self.name)
            return batch

    split = Split(np.zeros((3, 2, 2, 3), np.uint8), np.zeros(3, np.int64), "made up")
    result = latency.time_in_turns([Fake("a"), Fake("b")], split, 4, repeats, limit, least)
    assert calls == list("abba" * 4)[: 2 * (2 + timed)]  # 2 turns to warm up
    assert [len(times) for times in result] == [timed, timed]


def test_threads_are_pinned_while_measuring_and_restored(monkeypatch, quantize):
    import torch

    seen: list[int] = []

    def note(predictors, images, batch_size, repeats, limit, least):
        seen.append(torch.get_num_threads())
        return [np.ones(repeats) for _ in predictors]

    monkeypatch.setattr(latency, "time_in_turns", note)
    cell, config = quantize("backend=torch"), make_config(*FEW, "backend=torch")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        loads = [partial(quantizer_of(config).load, cell.artifact.path)]
        latency.measure(loads, cell.data.test, config.latency)
        assert seen == [1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("key", ["batch_size", "threads", "repeats", "batch_repeats"])
def test_a_wrong_setting_names_its_key(key):
    with pytest.raises(ConfigError, match=f"latency.{key}: got 0, expected an integer >= 1"):
        make_config(f"latency.{key}=0")


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [True, False])
def test_a_run_has_latency_metrics_unless_disabled(enabled, tmp_path):
    from resnet8ptq.experiment.pipeline import run_experiment
    from resnet8ptq.experiment.settings import resolve

    class Silent:
        """An MLflow run that records nothing."""

        def __getattr__(self, name: str):
            return lambda *args, **kwargs: None

    few = ("calib.samples_per_class=5", "evaluate.split=held_out", "held_out_images=200")
    config = make_config(*FEW, *few)
    config = replace(config, latency=replace(config.latency, enabled=enabled))
    metrics = run_experiment(resolve(config), tmp_path, Silent()).to_metrics()
    assert (metrics.keys() >= OWN) is enabled
    assert any("latency" in name or "speedup" in name for name in metrics) is enabled
    assert metrics["sqnr_db"] > 5
    assert metrics["kl_divergence"] > 0
