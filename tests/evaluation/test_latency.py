"""Latency: what is measured and how it is named; never how long anything took."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from resnet8ptq.backends.registry import BACKENDS
from resnet8ptq.config.schema import LatencyConfig
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.sampling import draw_calibration
from resnet8ptq.evaluation import latency
from resnet8ptq.evaluation.evaluator import as_fp32, loader
from resnet8ptq.evaluation.latency import Latency, Timings
from resnet8ptq.models.model import Fp32Model
from tests.helpers.configs import make_config
from tests.helpers.factories import evaluator_of, quantizer_of, runtime_of

OWN = {f"latency{size}_p{percent}_ms" for size in ("", "_batch") for percent in (50, 95)}
FEW = ("data=shapes", "latency.repeats=4", "latency.batch_repeats=2", "latency.batch_size=8")


def timings(single: list[float], batch: list[float]) -> Timings:
    return Timings(np.array(single), np.array(batch))


def test_metrics_by_hand():
    found = Latency(timings([1, 2, 3], [10, 20]), timings([3, 4, 8], [30, 60])).to_metrics()
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
    assert found == pytest.approx(expected)


def measure(
    overrides: tuple[str, ...], shapes: Dataset, fp32: Fp32Model, cache_root: Path, into: Path
) -> dict[str, float]:
    config = make_config(*FEW, *overrides)
    calibration = draw_calibration(shapes, 5, config.seed).split
    artifact = quantizer_of(config).quantize(fp32, calibration, into)
    few = shapes.test.take(np.arange(5))  # fewer than a batch
    baseline = evaluator_of(config, fp32).baseline(config, few)
    assert baseline.path.stat().st_size == baseline.size_bytes
    loads = [loader(config, runtime_of(config), artifact.path)]
    if config.dtype.name != "fp32":
        loads.append(loader(as_fp32(config), runtime_of(config), baseline.path))
    return Latency(*latency.measure(loads, few, config.latency)).to_metrics()


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "file"])  # it needs one
def test_a_quantized_model_and_its_baseline(backend, shapes, shapes_model, cache_root, tmp_path):
    found = measure((f"backend={backend}",), shapes, shapes_model, cache_root, tmp_path)
    baseline = {f"baseline/{name}" for name in OWN}
    assert set(found) == OWN | baseline | {"speedup", "speedup_batch"}
    assert all(value > 0 for value in found.values())
    for name in OWN | baseline:
        assert found[name] <= found[name.replace("p50", "p95")]


def test_fp32_has_a_latency_and_no_speedup(shapes, shapes_model, cache_root, tmp_path):
    assert set(measure(("dtype=fp32",), shapes, shapes_model, cache_root, tmp_path)) == OWN


@pytest.mark.parametrize(
    ("shape", "size"),
    [((32, 32, 3), 32), ((224, 224, 3), 16), ((640, 640, 3), 2), ((4000,) * 2, 1)],
)
def test_a_batch_of_large_samples_is_smaller(shape, size):
    split = SimpleNamespace(sample_bytes=4 * math.prod(shape), limit=lambda size: size)
    assert latency.find_batch_size(LatencyConfig(), split) == size
    assert latency.find_batch_size(LatencyConfig(batch_size=5), split) == 5


def test_turns_alternate_and_the_warm_up_is_not_counted():
    calls: list[str] = []

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def predict(self, batch):
            assert batch.shape == (4, 2, 2, 3)
            calls.append(self.name)
            return batch

    split = Split(np.zeros((3, 2, 2, 3), np.uint8), np.zeros(3, np.int64), "made up")
    found = latency.time_in_turns([Fake("a"), Fake("b")], split, 4, repeats=2)
    assert calls == ["a", "b", "b", "a"] * 2  # 2 to warm up, then 2
    assert [len(times) for times in found] == [2, 2]


def test_threads_are_pinned_while_measuring_and_restored(
    monkeypatch, shapes, shapes_model, cache_root, tmp_path
):
    import torch

    seen: list[int] = []

    def note(predictors, images, batch_size, repeats, limit):
        seen.append(torch.get_num_threads())
        return [np.ones(repeats) for _ in predictors]

    monkeypatch.setattr(latency, "time_in_turns", note)
    before = torch.get_num_threads()
    try:
        measure(("backend=torch", "threads=2"), shapes, shapes_model, cache_root, tmp_path)
        assert seen == [1, 1]
        assert torch.get_num_threads() == 2  # as evaluating left it
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("key", ["batch_size", "threads", "repeats", "batch_repeats"])
def test_a_wrong_setting_names_its_key(key):
    with pytest.raises(ConfigError, match=f"latency.{key}: got 0, takes an integer >= 1"):
        make_config(f"latency.{key}=0")


@pytest.mark.parametrize("enabled", [True, False])
def test_a_run_has_latency_metrics_unless_disabled(enabled, tmp_path):
    from resnet8ptq.experiment.pipeline import run_experiment
    from resnet8ptq.experiment.settings import settle

    class Silent:
        """An MLflow run that records nothing."""

        def __getattr__(self, name: str):
            return lambda *args, **kwargs: None

    few = ("calib.samples_per_class=5", "evaluate.split=held_out", "held_out_images=200")
    config = make_config(*FEW, *few)
    config = replace(config, latency=replace(config.latency, enabled=enabled))
    metrics = run_experiment(settle(config), tmp_path, Silent()).to_metrics()
    assert (metrics.keys() >= OWN) is enabled
    assert any("latency" in name or "speedup" in name for name in metrics) is enabled
    assert metrics["sqnr_db"] > 5
    assert metrics["kl_divergence"] > 0
