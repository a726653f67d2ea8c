"""How an evaluation finds its batching, with times that are told; and that it changes no output."""

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from resnet8ptq.backends.onnx.quantizer import OnnxQuantizer
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import machine
from resnet8ptq.core.errors import ModelError
from resnet8ptq.core.machine import Runtime
from resnet8ptq.data.dataset import Split
from resnet8ptq.evaluation import batching, evaluator, inference
from resnet8ptq.evaluation.batching import BATCH_SIZES, Batching
from resnet8ptq.evaluation.inference import ALONE
from resnet8ptq.tasks import classification
from resnet8ptq.tasks.scoring.outputs import PROBABILITIES
from tests.helpers.configs import make_config
from tests.helpers.factories import quantizer_of
from tests.helpers.originals import runtime_of_all_cores

Cost = Callable[[Batching], float]  # seconds for each image


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try the sizes that a user's run tries; `conftest` leaves one."""
    monkeypatch.setattr(batching, "BATCH_SIZES", BATCH_SIZES)


class Counting:
    """A backend whose model says which image it saw, and whose time is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cost: Cost) -> None:
        self.batches: list[tuple[int, int]] = []  # with the threads of each
        self.measured: list[Batching] = []
        self.cost = cost
        monkeypatch.setattr(OnnxQuantizer, "load", staticmethod(self.load))
        monkeypatch.setattr(batching, "measure_pace", self.measure)
        monkeypatch.setattr(machine, "threads", lambda setting: setting or 4)

    def measure(self, load: batching.Load, split: Split, tried: Batching) -> float:
        self.measured.append(tried)
        return self.cost(tried)

    def load(self, path: Path, threads: int) -> "Counting":
        def predict(batch: np.ndarray) -> tuple[np.ndarray]:
            self.batches.append((len(batch), threads))
            numbers = batch.reshape(len(batch), -1)[:, 0]
            return (np.stack([numbers, 1 - numbers], axis=1),)

        self.predict = predict
        return self


def images(count: int) -> Split:
    pixels = (np.arange(count) % 251).astype(np.uint8)
    return Split(pixels.reshape(-1, 1, 1, 1), np.zeros(count, np.int64), "made up")


def evaluator_of(
    config: RunConfig, network: str, runtime: Runtime, batch_size: int | None = None
) -> evaluator.Evaluator:
    fp32 = SimpleNamespace(sha256=network, final=PROBABILITIES)
    task, quantizer = classification.build(("a", "b")), OnnxQuantizer(config, runtime)
    return evaluator.Evaluator(quantizer, fp32, task, batch_size)


def run(count: int, cache: Path, *overrides: str, network: str = "a") -> inference.Evaluation:
    config = make_config("data=shapes", f"cache_dir={cache}", *overrides)
    runtime = runtime_of_all_cores(config.cache_dir, config.threads)
    measuring = evaluator_of(config, network, runtime, config.evaluate.batch_size)
    return measuring.run(another_file(cache), images(count))


def another_file(folder: Path) -> Path:
    """Return a file unlike all others, because an equal one is not run again."""
    artifact = Path(tempfile.mkstemp(dir=folder)[1])
    artifact.write_text(artifact.name)
    return artifact


@pytest.mark.parametrize("best", BATCH_SIZES)
@pytest.mark.parametrize("way", [(1, 4), (4, 1), (1, 2)])
def test_the_fastest_way_is_found_once(monkeypatch, tmp_path, best, way):
    fastest = Batching(best, *way)

    def cost(tried: Batching) -> float:
        wrong = (tried.batch_size != best) + ((tried.threads, tried.at_once) != way)
        return (1 + wrong) / 10_000

    backend = Counting(monkeypatch, cost)
    assert run(9_984, tmp_path).batching == fastest
    tried = list(backend.measured)
    assert len({*tried}) == len(BATCH_SIZES) + 2
    assert run(9_984, tmp_path).batching == fastest
    assert backend.measured == tried  # nothing is tried any more
    assert {threads for _, threads in backend.batches} == {way[0]}


def test_with_one_thread_each_size_is_tried_once(monkeypatch, tmp_path):
    backend = Counting(monkeypatch, lambda tried: 1 / tried.batch_size / 1000)
    assert run(1000, tmp_path, "threads=1").batching == Batching(64, 1)
    assert backend.measured == [Batching(16, 1), Batching(64, 1)]


def test_few_samples_are_run_without_a_search_for_the_fastest_way(monkeypatch, tmp_path):
    backend = Counting(monkeypatch, lambda tried: 1.0)
    run(BATCH_SIZES[-1], tmp_path)
    assert not backend.measured


@pytest.mark.parametrize("odd", [1, 2])  # the first turn, or the second
def test_a_way_that_is_fast_or_slow_once_is_no_other(monkeypatch, tmp_path, odd):
    turns: Counter[Batching] = Counter()

    def cost(tried: Batching) -> float:
        turns[tried] += 1
        usual, once = (1, 5) if tried.at_once > 1 else (2, 0.5)
        return (once if turns[tried] % 3 == odd else usual) / 10_000

    Counting(monkeypatch, cost)
    assert run(1000, tmp_path, "threads=4").batching.at_once == 4


@pytest.mark.parametrize(("share", "threads"), [(0.9, 1), (0.7, 4)])
def test_several_threads_for_a_batch_must_be_clearly_faster(monkeypatch, tmp_path, share, threads):
    """They wait for each other while another process runs."""
    Counting(monkeypatch, lambda tried: (1 if tried.threads == 1 else share) / 10_000)
    assert run(1000, tmp_path, "threads=4").batching.threads == threads


def test_no_larger_batch_is_tried_after_one_that_takes_long(monkeypatch, tmp_path):
    backend = Counting(monkeypatch, lambda tried: 0.01)
    assert run(1000, tmp_path).batching.batch_size == 16
    assert {tried.batch_size for tried in backend.measured} == {16}


@pytest.mark.parametrize(
    ("within", "sizes", "copies"), [(400, {16, 64}, 4), (100, {16, 25}, 4), (3, {1, 3}, 2)]
)
def test_a_way_that_exceeds_the_memory_is_not_tried(monkeypatch, tmp_path, within, sizes, copies):
    """All copies together run no more samples at once than memory takes."""
    backend = Counting(monkeypatch, lambda tried: 1 / tried.at_once / 10_000)
    split = replace(images(1000), within_memory=within)
    runtime = runtime_of_all_cores(tmp_path, 4)
    config = make_config("data=shapes", f"cache_dir={tmp_path}")
    measuring = evaluator_of(config, "a", replace(runtime, threads_fixed=False))
    result = measuring.run(another_file(tmp_path), split)
    assert result.batching.at_once == copies
    assert {tried.batch_size for tried in backend.measured} <= sizes
    assert all(tried.batch_size * tried.at_once <= within for tried in backend.measured)
    assert len(result.outputs.values[0]) == 1000


@pytest.mark.parametrize(
    ("overrides", "network"),
    [(["backend=torch"], "a"), (["dtype=uint8"], "a"), ([], "b"), (["format=qoperator"], "a")],
)
def test_another_kind_of_artifact_is_measured_by_itself(monkeypatch, tmp_path, overrides, network):
    fast = {"size": 16}
    Counting(monkeypatch, lambda tried: (1 + (tried.batch_size != fast["size"])) / 10_000)
    assert run(1000, tmp_path).batching.batch_size == 16
    fast["size"] = 64
    assert run(1000, tmp_path, *overrides, network=network).batching.batch_size == 64
    assert run(1000, tmp_path).batching.batch_size == 16


@pytest.mark.parametrize("count", [1, 31, 100, 500, 1234])
def test_every_image_is_run_in_order(monkeypatch, tmp_path, count):
    Counting(monkeypatch, lambda tried: 1 / tried.at_once)
    result = run(count, tmp_path)
    assert result.batching.at_once == (4 if count > BATCH_SIZES[-1] else 1)
    np.testing.assert_array_equal(result.outputs.values[0][:, 0], np.arange(count) % 251)


def test_what_is_set_is_not_tried(monkeypatch, tmp_path):
    backend = Counting(monkeypatch, lambda tried: 1.0)
    assert run(1000, tmp_path, "evaluate.batch_size=300", "threads=1").batching == Batching(300, 1)
    assert backend.batches == [(300, 1), (300, 1), (300, 1), (100, 1), (ALONE, 1)]
    assert not backend.measured
    run(1000, tmp_path, "evaluate.batch_size=300", "threads=3")
    assert {*backend.measured} == {Batching(300, 3, 1), Batching(300, 1, 3)}


def test_dynamic_quantization_runs_one_by_one(monkeypatch, tmp_path):
    """A batch sets its ranges."""
    backend = Counting(monkeypatch, lambda tried: 1.0)
    assert run(1000, tmp_path, "method=dynamic").batching.batch_size == 1
    assert {size for size, _ in backend.batches} == {1}


def test_what_a_copy_raises_ends_the_run():
    def fail(batch: np.ndarray) -> np.ndarray:
        if batch[0] == 3:
            raise ValueError("image 3")
        return batch

    batches = [np.array([number]) for number in range(100)]
    result = batching.run_all([fail, fail], batches)
    assert [int(next(result)[0]) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="image 3"):
        next(result)


def test_a_pace_is_the_seconds_of_one_image(monkeypatch):
    """Each batch takes a second of a clock that is told; warm-up batches are not counted."""
    now = [0.0]

    def predict(batch: np.ndarray) -> list[np.ndarray]:
        now[0] += 1.0
        return [batch]

    monkeypatch.setattr(batching, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(batching, "TRIAL_SECONDS", 2.5)
    copy = SimpleNamespace(predict=predict)
    seconds = batching.measure_pace(lambda threads: copy, images(64), Batching(16, 1))
    assert seconds == pytest.approx(3 / 48)


@pytest.mark.slow
def test_batch_and_threads_do_not_change_predictions(quantize, shapes):
    for backend in ("onnx", "torch", "tflite"):
        cell = quantize(f"backend={backend}")
        split = shapes.test.take(np.arange(130))
        quantizer = quantizer_of(cell.config)
        result = [
            inference.infer(
                [
                    quantizer.load(cell.artifact.path, batching.threads)
                    for _ in range(batching.at_once)
                ],
                split,
                batching,
            ).outputs.values[0]
            for size in (1, 7, 32, 128)
            for batching in (Batching(size, *way) for way in ((1, 1), (2, 1), (1, 2)))
        ]
        for other in result[1:]:
            np.testing.assert_array_equal(other, result[0])


@pytest.mark.parametrize("kept", [[1, 1, 2, 0], [1, 2, 1, 2]])
def test_an_output_without_one_row_for_each_sample_is_refused(kept):
    counts = iter(kept)
    copy = SimpleNamespace(predict=lambda batch: [np.ones((next(counts), 4), np.float32)])
    with pytest.raises(ModelError, match=r"task=detection.*model\.outputs"):
        inference.infer([copy], images(4), Batching(1, 1))


@pytest.mark.parametrize("wrong", [0.5, np.nan])
def test_a_kernel_that_is_wrong_in_large_batches_is_named(monkeypatch, tmp_path, caplog, wrong):
    backend = Counting(monkeypatch, lambda tried: 1.0)
    exact = backend.load

    def load(path: Path, threads: int) -> Counting:
        loaded = exact(path, threads)
        predict = loaded.predict

        def fail_after_four(batch: np.ndarray) -> tuple[np.ndarray]:
            [values] = predict(batch)
            values[4:] = wrong
            return (values,)

        loaded.predict = fail_after_four
        return loaded

    run(100, tmp_path, "evaluate.batch_size=16", "threads=1")
    assert not caplog.messages
    monkeypatch.setattr(OnnxQuantizer, "load", staticmethod(load))
    run(100, tmp_path, "evaluate.batch_size=16", "threads=1")
    [message] = caplog.messages
    assert "in a batch of 16" in message and "evaluate.batch_size=1" in message
    run(100, tmp_path, "evaluate.batch_size=4", "threads=1")
    assert [message] == caplog.messages
