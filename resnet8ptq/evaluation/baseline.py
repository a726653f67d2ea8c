"""The FP32 baseline of a framework: run once, and kept."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from resnet8ptq.config.schema import QuantizationConfig
from resnet8ptq.core import cache, files
from resnet8ptq.data.dataset import Split
from resnet8ptq.evaluation.evaluate import with_logits
from resnet8ptq.evaluation.trial import Bench, as_fp32
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.tasks.contract import Outputs


@dataclass(frozen=True)
class Baseline:
    """The FP32 network in one framework: its outputs with logits, and its file in the cache.

    Outputs are kept rather than scores: what is scored differently needs no new run.
    """

    outputs: Outputs
    path: Path

    @property
    def size_bytes(self) -> int:
        """Size of the file on disk."""
        return self.path.stat().st_size


def load_baseline(
    bench: Bench, config: QuantizationConfig, network: Fp32Model, scored: Split
) -> Baseline:
    """Return the FP32 baseline of the run's own backend on `scored`, cached by content."""
    key: cache.Key = {
        "model": files.sha256(network.onnx_path),
        "backend": json.dumps(asdict(config.backend), sort_keys=True),
        "images": scored.digest,
        **cache.made_with("backends", "data", "evaluation", "graph", "models"),
    }

    def make(folder: Path) -> None:
        fp32 = as_fp32(config)
        trial = bench.run(fp32, network, scored, scored, folder, label="FP32 baseline")
        outputs = with_logits(trial.evaluation, scored)
        for place, values in enumerate(outputs.values):
            np.save(folder / f"output{place}.npy", values)
        if outputs.logits is not None:
            np.save(folder / "logits.npy", outputs.logits)
        (folder / "artifact").write_text(trial.artifact.path.name)

    folder = cache.entry(bench.runtime.cache_root, "baselines", key, make)
    places = range(len(network.contract.outputs))
    values = tuple(np.load(folder / f"output{place}.npy", mmap_mode="r") for place in places)
    kept = folder / "logits.npy"
    logits = np.load(kept) if kept.exists() else None
    path = folder / (folder / "artifact").read_text()
    return Baseline(Outputs(values, logits, bench.final), path)
