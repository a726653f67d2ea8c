"""Run a model over a data set; the FP32 baseline of each framework is run once and kept."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from resnet8ptq import cache, environment, files, terminal
from resnet8ptq.backends import BACKENDS
from resnet8ptq.config import DtypeConfig, RunConfig
from resnet8ptq.data import Dataset, Split
from resnet8ptq.interfaces import Predictor
from resnet8ptq.metrics import Scores
from resnet8ptq.model import Fp32Model

LOGIT_IMAGES = 1000
BATCH_SIZES = (32, 64, 128)  # tried where `evaluate.batch_size` is not set
TRIAL_IMAGES = 128
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
    """Load the artifact at `path` and run all images of `split`.

    Where `evaluate.batch_size` is not set, the first images are run in batches of several sizes,
    and the others in those that were fastest; likewise with half of the threads where `threads` is
    not set. The trials are a part of the evaluation: no image is run twice. Dynamic quantization
    depends on the batch, so that its size is never a matter of speed.
    """
    threads, size = environment.threads(config.threads), config.evaluate.batch_size
    if size is None and config.method == "dynamic":
        size = DYNAMIC_BATCH_SIZE
    with terminal.bar(label, len(split), "images") as advance:
        runner = _Runner(config, path, split, advance)
        runner.load(threads)
        best = size or runner.fastest(BATCH_SIZES)
        if config.threads is None and threads > 1:
            whole = min(runner.run(best, best) for _ in range(2))
            runner.load(threads // 2)
            if min(runner.run(best, best) for _ in range(2)) >= whole:
                runner.load(threads)
        runner.run(best, len(split))
    scores = Scores(np.concatenate(runner.outputs), split.labels)
    return Evaluation(scores, runner.seconds, best, runner.threads, runner.predictor)


def one_by_one(config: RunConfig, path: Path, split: Split) -> Scores:
    """Return the scores at batch 1."""
    single = replace(config, evaluate=replace(config.evaluate, batch_size=1))
    return evaluate(single, path, split, "Evaluating one by one").scores


class _Runner:
    """Runs a split piece by piece, and may change its batches and threads on the way."""

    def __init__(
        self, config: RunConfig, path: Path, split: Split, advance: Callable[[int], None]
    ) -> None:
        self.config = config
        self.path = path
        self.split = split
        self.advance = advance
        self.position = 0
        self.seconds = 0.0
        self.outputs: list[NDArray[np.float32]] = []  # [n, classes] each

    def load(self, threads: int) -> None:
        config = replace(self.config, threads=threads)
        self.threads = threads
        self.predictor = BACKENDS[config.backend.name](config).load(self.path)

    def fastest(self, batch_sizes: Sequence[int]) -> int:
        """Run trials of each, and return the fastest; of two turns, as the first warms up."""
        times = dict.fromkeys(batch_sizes, np.inf)
        for size in (*batch_sizes, *batch_sizes):
            times[size] = min(times[size], self.run(size, TRIAL_IMAGES))
        return min(batch_sizes, key=lambda size: times[size])

    def run(self, batch_size: int, images: int) -> float:
        """Run the next `images`, as far as there are any; return the seconds for each."""
        stop = min(self.position + images, len(self.split))
        count = stop - self.position
        start = time.perf_counter()
        while self.position < stop:
            end = min(self.position + batch_size, stop)
            batch = self.split.images[self.position : end].astype(np.float32)
            self.outputs.append(self.predictor.predict(batch))
            self.advance(end - self.position)
            self.position = end
        seconds = time.perf_counter() - start
        self.seconds += seconds
        return seconds / count if count else np.inf


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
        "code": cache.code(),
        "cpu": environment.cpu()[0],  # float sums differ by CPU in their last bits
        **environment.versions(),
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
    path = folder / (folder / "artifact").read_text()
    return Baseline(Scores(probabilities, data.test.labels, logits), path)
