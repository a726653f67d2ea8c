"""Run a model over a data set; the FP32 baseline of each framework is run once and kept."""

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from resnet8ptq import cache, environment, files
from resnet8ptq.backends import BACKENDS
from resnet8ptq.config import DtypeConfig, RunConfig
from resnet8ptq.data import Dataset, Split
from resnet8ptq.interfaces import Predictor
from resnet8ptq.metrics import Scores
from resnet8ptq.model import Fp32Model
from resnet8ptq.terminal import track

LOGIT_IMAGES = 1000


@dataclass(frozen=True)
class Baseline:
    """The FP32 network in one framework: its scores with logits, and its file in the cache."""

    scores: Scores
    path: Path

    @property
    def size_bytes(self) -> int:
        """Size of the file on disk."""
        return self.path.stat().st_size


def evaluate(
    predictor: Predictor, split: Split, batch_size: int, label: str = "Evaluating"
) -> tuple[Scores, float]:
    """Run all images of `split`; return the scores and the seconds it took."""
    batches = split.batches(batch_size)
    start = time.perf_counter()
    outputs = [predictor.predict(batch) for batch in track(batches, label)]
    seconds = time.perf_counter() - start
    return Scores(np.concatenate(outputs), split.labels), seconds


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
        "holds": "artifact, probabilities, logits",
        **environment.versions(),
    }

    def make(folder: Path) -> None:
        quantizer = BACKENDS[name](replace(config, dtype=DtypeConfig("fp32")))
        artifact = quantizer.quantize(model, data.test, folder)
        predictor = quantizer.load(artifact.path)
        scores, _ = evaluate(predictor, data.test, config.evaluate.batch_size, "FP32 baseline")
        np.save(folder / "probabilities.npy", scores.probabilities)
        logits = collect_logits(predictor, data.test, config.evaluate.batch_size)
        if logits is not None:
            np.save(folder / "logits.npy", logits)
        (folder / "artifact").write_text(artifact.path.name)

    folder = cache.entry(cache_root, "baselines", key, make)
    probabilities = np.load(folder / "probabilities.npy", allow_pickle=False)
    kept = folder / "logits.npy"
    logits = np.load(kept, allow_pickle=False) if kept.exists() else None
    path = folder / (folder / "artifact").read_text()
    return Baseline(Scores(probabilities, data.test.labels, logits), path)
