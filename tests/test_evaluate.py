"""How an evaluation finds its pace: with a clock that only a counted number of images moves."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import make_config, quantizer_of, runtime_of_all_cores

from resnet8ptq.core import machine
from resnet8ptq.data.dataset import Split
from resnet8ptq.evaluation import evaluate, pace, trial
from resnet8ptq.evaluation.pace import BATCH_SIZES, Pace
from resnet8ptq.evaluation.trial import Bench

Cost = Callable[[int, int], float]  # batch size, threads -> seconds for each image


class Counting:
    """A backend whose model says which image it saw, and whose time is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cost: Cost) -> None:
        self.now, self.cost, self.batches = 0.0, cost, []
        monkeypatch.setattr(trial, "make_quantizer", lambda config, runtime: self)
        monkeypatch.setattr(pace.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(pace, "TRIAL_IMAGES", 256)
        monkeypatch.setattr(machine, "threads", lambda setting: setting or 4)

    def load(self, path: Path, threads: int) -> "Counting":
        def predict(batch: np.ndarray) -> tuple[np.ndarray]:
            self.batches.append((len(batch), threads))
            self.now += len(batch) * self.cost(len(batch), threads) / 1000
            numbers = batch.reshape(len(batch), -1)[:, 0]
            return (np.stack([numbers, 1 - numbers], axis=1),)

        self.predict = predict
        return self


def images(count: int) -> Split:
    pixels = (np.arange(count) % 251).astype(np.uint8)
    return Split(pixels.reshape(-1, 1, 1, 1), np.zeros(count, np.int64), "made up")


def run(count: int, cache: Path, *overrides: str, network: str = "a") -> evaluate.Evaluation:
    config = make_config("data=shapes", f"cache_dir={cache}", *overrides)
    runtime = runtime_of_all_cores(config.cache_dir, config.threads)
    bench = Bench(network, runtime, config.evaluate.batch_size)
    return bench.evaluate(config, Path("nowhere"), images(count))


@pytest.mark.parametrize("best", BATCH_SIZES)
@pytest.mark.parametrize("threads", [2, 4])
def test_the_fastest_batches_and_threads_are_found_once(monkeypatch, tmp_path, best, threads):
    def cost(size: int, used: int) -> float:
        return (1.0 if size == best else 1.5) * (1.0 if used == threads else 1.5)

    backend = Counting(monkeypatch, cost)
    found = run(9_984, tmp_path)
    assert found.pace == Pace(best, threads)
    backend.batches.clear()
    again = run(9_984, tmp_path)
    assert again.pace == Pace(best, threads)
    assert again.seconds == pytest.approx(9.984)  # nothing is tried any more
    assert {used for _, used in backend.batches} == {threads}


@pytest.mark.parametrize(
    ("overrides", "network"),
    [(["backend=torch"], "a"), (["dtype=uint8"], "a"), ([], "b"), (["format=qoperator"], "a")],
)
def test_another_kind_of_artifact_is_measured_by_itself(monkeypatch, tmp_path, overrides, network):
    fast = {"size": 32}
    backend = Counting(monkeypatch, lambda size, threads: 1.0 + (size != fast["size"]))
    assert run(1000, tmp_path).pace.batch_size == 32
    fast["size"] = 128
    assert run(1000, tmp_path, *overrides, network=network).pace.batch_size == 128
    assert run(1000, tmp_path).pace.batch_size == 32
    assert backend.batches


@pytest.mark.parametrize("count", [1, 31, 100, 500, 1234])
def test_every_image_is_run_in_order(monkeypatch, tmp_path, count):
    Counting(monkeypatch, lambda size, threads: 1.0)
    found = run(count, tmp_path)
    np.testing.assert_array_equal(found.outputs.values[0][:, 0], np.arange(count) % 251)


def test_what_is_set_is_not_tried(monkeypatch, tmp_path):
    backend = Counting(monkeypatch, lambda size, threads: size / threads)
    found = run(1000, tmp_path, "evaluate.batch_size=300", "threads=3")
    assert found.pace == Pace(300, 3)
    assert backend.batches == [(300, 3), (300, 3), (300, 3), (100, 3)]


def test_batches_of_dynamic_quantization_are_a_setting(monkeypatch, tmp_path):
    """They change what it predicts."""
    backend = Counting(monkeypatch, lambda size, threads: size / threads)
    assert run(1000, tmp_path, "method=dynamic").pace.batch_size == 256
    assert [size for size, _ in backend.batches[-4:]] == [256, 256, 256, 232]


def test_batch_and_threads_do_not_change_predictions(quantize, shapes):
    for backend in ("onnx", "torch"):
        cell = quantize(f"backend={backend}")
        split = shapes.test.take(np.arange(130))
        quantizer = quantizer_of(cell.config)
        found = [
            evaluate.evaluate(
                partial(quantizer.load, cell.artifact.path), split, Pace(size, threads)
            ).outputs.values[0]
            for size in (1, 7, 32, 128)
            for threads in (1, 2)
        ]
        for other in found[1:]:
            np.testing.assert_array_equal(other, found[0])
