"""The FP32 baseline of a framework: run once, and kept."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from resnet8ptq.backends.registry import BACKENDS
from resnet8ptq.config.schema import DtypeConfig, RunConfig
from resnet8ptq.core import cache, files
from resnet8ptq.core.text import safe_name
from resnet8ptq.data.dataset import Dataset
from resnet8ptq.evaluation.evaluate import collect_logits, evaluate
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.tasks.classification import Scores


@dataclass(frozen=True)
class Baseline:
    """The FP32 network in one framework: its scores with logits, and its file in the cache."""

    scores: Scores
    path: Path

    @property
    def size_bytes(self) -> int:
        """Size of the file on disk."""
        return self.path.stat().st_size


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
