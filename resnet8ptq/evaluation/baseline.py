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
from resnet8ptq.tasks.contract import Array, Outputs


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
        "reduction": f"{bench.reduction} {cache.code('tasks')}" if bench.reduction else "",
        **cache.made_with("backends", "data", "evaluation", "graph", "models"),
    }

    def make(folder: Path) -> None:
        fp32 = as_fp32(config)
        trial = bench.run(fp32, network, scored, scored, folder, label="FP32 baseline")
        outputs = with_logits(trial.evaluation, scored)
        for name, arrays in (("output", outputs.values), ("raw", outputs.raw)):
            for place, values in enumerate(arrays):
                np.save(folder / f"{name}{place}.npy", values)
        if outputs.logits is not None:
            np.save(folder / "logits.npy", outputs.logits)
        (folder / "artifact").write_text(trial.artifact.path.name)

    folder = cache.entry(bench.runtime.cache_root, "baselines", key, make)
    values, raw = (_load_all(folder, name) for name in ("output", "raw"))
    kept = folder / "logits.npy"
    logits = np.load(kept) if kept.exists() else None
    path = folder / (folder / "artifact").read_text()
    return Baseline(Outputs(values, logits, bench.final, raw), path)


def _load_all(folder: Path, name: str) -> tuple[Array, ...]:
    """Map the arrays `name0`, `name1`, ... in a folder."""
    count = len(list(folder.glob(f"{name}*.npy")))
    return tuple(np.load(folder / f"{name}{place}.npy", mmap_mode="r") for place in range(count))
