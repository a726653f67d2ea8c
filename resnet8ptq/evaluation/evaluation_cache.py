"""Keeps evaluations with small outputs, so that equal evaluations run only once."""

import json
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np

from resnet8ptq.core import cache
from resnet8ptq.evaluation.batching import Batching
from resnet8ptq.evaluation.inference import Evaluation
from resnet8ptq.tasks.scoring.outputs import Array, Outputs

KIND = "evaluations"
MAX_BYTES = 2**26  # largest outputs that are cached, so that the cache stays small


def find(root: Path, key: cache.Key, final: str) -> Evaluation | None:
    """Return the evaluation under `key`; None if the cache lacks it."""
    folder = cache.find(root, KIND, key)
    if folder is None:
        return None
    return replace(load(folder, final), cached=True)


def keep(root: Path, key: cache.Key, evaluation: Evaluation) -> None:
    """Keep an evaluation under `key`, unless its outputs are large."""
    outputs = evaluation.outputs
    arrays = [*outputs.values, *outputs.raw]
    if sum(values.nbytes for values in arrays) <= MAX_BYTES:
        cache.entry(root, KIND, key, lambda folder: save(evaluation, folder))


def save(evaluation: Evaluation, folder: Path) -> None:
    """Write an evaluation into files of a folder."""
    outputs = evaluation.outputs
    for name, arrays in (("output", outputs.values), ("raw", outputs.raw)):
        for number, values in enumerate(arrays):
            np.save(folder / f"{name}{number}.npy", values)
    if outputs.logits is not None:
        np.save(folder / "logits.npy", outputs.logits)
    run = {
        "seconds": evaluation.seconds,
        "batching": astuple(evaluation.batching),
        "batch_sqnr_db": evaluation.batch_sqnr_db,
    }
    (folder / "evaluation.json").write_text(json.dumps(run))


def load(folder: Path, final: str) -> Evaluation:
    """Return the evaluation that `save` wrote; outputs other than logits are mapped from their
    files.

    Args:
        final: the kind of the outputs, see `Outputs.final`.
    """
    path = folder / "logits.npy"
    logits = None
    if path.exists():
        logits = np.load(path)
    outputs = Outputs(
        values=_map_arrays(folder, "output"),
        logits=logits,
        final=final,
        raw=_map_arrays(folder, "raw"),
    )
    run = json.loads((folder / "evaluation.json").read_text())
    batching = Batching(*run["batching"])
    return Evaluation(outputs, run["seconds"], batching, run["batch_sqnr_db"])


def _map_arrays(folder: Path, name: str) -> tuple[Array, ...]:
    """Map the arrays `name0`, `name1`, ... in a folder."""
    arrays = []
    for number in range(len(list(folder.glob(f"{name}*.npy")))):
        arrays.append(np.load(folder / f"{name}{number}.npy", mmap_mode="r"))
    return tuple(arrays)
