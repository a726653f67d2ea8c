"""Run a model over a data set; the FP32 baseline of each framework is run once and kept."""

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.backends.contract import Predictor
from resnet8ptq.backends.registry import BACKENDS
from resnet8ptq.config.schema import DtypeConfig, RunConfig
from resnet8ptq.core import cache, files, machine
from resnet8ptq.core.console import track
from resnet8ptq.core.text import safe_name
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.tasks.classification import Scores

LOGIT_IMAGES = 1000
BATCH_SIZES = (16, 32, 64, 128)  # tried where `evaluate.batch_size` is not set
TRIAL_IMAGES = 256
DYNAMIC_BATCH_SIZE = 256


@dataclass(frozen=True)
class Evaluation:
    """An artifact, loaded from disk and run over a split.

    Attributes:
        seconds: for all images, loading left out.
        batch_size, threads: as set, or as found to be fastest.
        predictor: the loaded artifact, with that many threads.
    """

    scores: Scores
    seconds: float
    batch_size: int
    threads: int
    predictor: Predictor


@dataclass(frozen=True)
class Baseline:
    """The FP32 network in one framework: its scores with logits, and its file in the cache."""

    scores: Scores
    path: Path

    @property
    def size_bytes(self) -> int:
        """Size of the file on disk."""
        return self.path.stat().st_size


def evaluate(config: RunConfig, path: Path, split: Split, label: str = "Evaluating") -> Evaluation:
    """Load the artifact at `path` and run all images of `split`, as fast as `find_pace` knows."""
    batch_size, threads = find_pace(config, path, split)
    predictor = _load(config, path, threads)
    start = time.perf_counter()
    outputs = [predictor.predict(batch) for batch in track(split.batches(batch_size), label)]
    seconds = time.perf_counter() - start
    scores = Scores(np.concatenate(outputs), split.labels)
    return Evaluation(scores, seconds, batch_size, threads, predictor)


def find_pace(config: RunConfig, path: Path, split: Split) -> tuple[int, int]:
    """Return batch size and threads: as set, or as a short measurement has found them fastest.

    What is measured is kept in the cache for all runs of that network, framework and dtype on that
    CPU. Dynamic quantization depends on the batch, whose size is then no matter of speed.
    """
    threads, size = machine.threads(config.threads), config.evaluate.batch_size
    if size is None and config.method == "dynamic":
        size = DYNAMIC_BATCH_SIZE
    sizes = [size] if size else list(BATCH_SIZES)
    fewer = threads // 2 if config.threads is None else 0
    if len(sizes) == 1 and not fewer:
        return sizes[0], threads
    key: cache.Key = {
        **{name: json.dumps(asdict(getattr(config, name)), sort_keys=True) for name in _PACE_OF},
        "method": config.method,
        "format": config.format or "",
        "image_shape": str(split.images.shape[1:]),
        "sizes": str(sizes),
        "threads": f"{threads}, {fewer}",
        **cache.made_with("evaluation"),
    }

    def make(folder: Path) -> None:
        times = {(size, threads): _time(config, path, split, size, threads) for size in sizes}
        best = min(times, key=lambda pace: times[pace])
        if fewer:
            pace = best[0], fewer
            times[pace] = _time(config, path, split, *pace)
            best = min(times, key=lambda pace: times[pace])
        (folder / "pace.json").write_text(json.dumps(best))

    folder = cache.entry(cache.folder(config.cache_dir), "paces", key, make)
    batch_size, threads = json.loads((folder / "pace.json").read_text())
    return batch_size, threads


_PACE_OF = ("backend", "dtype", "model", "data")


def _load(config: RunConfig, path: Path, threads: int) -> Predictor:
    return BACKENDS[config.backend.name](replace(config, threads=threads)).load(path)


def _time(config: RunConfig, path: Path, split: Split, batch_size: int, threads: int) -> float:
    """Return the seconds for each of the first images: the best of three turns, as it warms up."""
    predictor = _load(config, path, threads)
    images = split.take(np.arange(min(TRIAL_IMAGES, len(split))))
    batches = list(images.batches(batch_size))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        for batch in batches:
            predictor.predict(batch)
        seconds.append(time.perf_counter() - start)
    return min(seconds) / len(images)


def one_by_one(config: RunConfig, path: Path, split: Split) -> Scores:
    """Return the scores at batch 1."""
    single = replace(config, evaluate=replace(config.evaluate, batch_size=1))
    return evaluate(single, path, split, "Evaluating one by one").scores


def collect_logits(
    predictor: Predictor, split: Split, batch_size: int
) -> NDArray[np.float32] | None:
    """Return the logits [m, classes] of the first m = `LOGIT_IMAGES` images.

    None where the model does not end in a softmax. Not of all images: a second pass would double
    the time of an evaluation, and the SQNR sums over every class of each image, enough of them.
    """
    images = split.take(np.arange(min(LOGIT_IMAGES, len(split))))
    found = [predictor.logits(batch) for batch in images.batches(batch_size)]
    arrays = [logits for logits in found if logits is not None]
    return np.concatenate(arrays) if arrays else None


def load_baseline(config: RunConfig, model: Fp32Model, data: Dataset, cache_root: Path) -> Baseline:
    """Return the FP32 baseline of the run's own backend on the test images, cached by content."""
    name = config.backend.name
    key: cache.Key = {
        "model": files.sha256(model.onnx_path),
        "backend": json.dumps(asdict(config.backend), sort_keys=True),
        "images": data.test.digest,
        **cache.made_with("backends", "data", "evaluation", "graph", "models"),
    }

    def make(folder: Path) -> None:
        fp32 = replace(config, dtype=DtypeConfig("fp32"), method="static")
        artifact = BACKENDS[name](fp32).quantize(model, data.test, folder)
        found = evaluate(fp32, artifact.path, data.test, "FP32 baseline")
        np.save(folder / "probabilities.npy", found.scores.probabilities)
        logits = collect_logits(found.predictor, data.test, found.batch_size)
        if logits is not None:
            np.save(folder / "logits.npy", logits)
        (folder / "artifact").write_text(artifact.path.name)

    folder = cache.entry(cache_root, "baselines", key, make)
    probabilities = np.load(folder / "probabilities.npy", allow_pickle=False)
    kept = folder / "logits.npy"
    logits = np.load(kept, allow_pickle=False) if kept.exists() else None
    path = folder / safe_name((folder / "artifact").read_text())
    return Baseline(Scores(probabilities, data.test.labels, logits), path)
