"""Measures rules that choose among real models, on other images, for `studies.decisions`.

The sweeps of each network are run once, and their predictions kept. A trial draws some images of a
network; each rule chooses a model by them. The accuracy of the choice is measured on all other
images. On the images used to choose, the model with the most hits looks better than it is.
"""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks import process
from benchmarks.setting import REPO
from resnet8ptq.config.loading import CONFIG_FILE, load_config
from resnet8ptq.core.console import track
from resnet8ptq.report.recommend import NEAR
from resnet8ptq.tasks.classification import KL_EPSILON
from resnet8ptq.tasks.scoring.distortion import raise_to
from studies.recipes import NETWORKS as OTHERS
from studies.recipes import SHARED

NETWORKS: dict[str, tuple[str, ...]] = {
    **{name: OTHERS[name] for name in ("resnet8", "ic02", "kws")},
    "vit": ("data=cifar10", "preprocess=unit", f"model.path={SHARED}/vit/vit_cifar10.onnx"),
}
EVERY = ("backend=onnx", "latency.enabled=false", "evaluate.choice=none", "threads=1")
CHANNELS = "per_channel=true"
SWEEPS = (
    ("dtype=fp32",),
    ("dtype=int8,uint8,u8s8", "per_channel=true,false", "calib=minmax,percentile"),
    ("dtype=w4a8", CHANNELS, "corrections.bias_correction=false,true"),
)
FINE_TUNED = {"resnet8": 1}  # epochs: minutes here, hours for the larger networks
SAMPLES = (200, 400, 1_000, 4_000)
RULES = ("hits", "KL within 2 errors", "KL alone", "log loss within 2 errors")

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Models:
    """The models of a network: hits, KL divergence and log loss of each sample [models, n].

    Attributes:
        agrees: whether a model and FP32 predict the same class [models, n].
        fp32: the hits of FP32 [n].
        plain: which models have 8 bits and are not fine-tuned [models].
    """

    right: Bools
    divergence: Floats
    log_loss: Floats
    agrees: Bools
    fp32: Bools
    plain: Bools

    def only(self, kept: Bools) -> "Models":
        """Return the models that `kept` selects."""
        return Models(
            *(self.right[kept], self.divergence[kept], self.log_loss[kept], self.agrees[kept]),
            *(self.fp32, self.plain[kept]),
        )

    def without_labels(self) -> "Models":
        """Return the models as task=agreement scores them: FP32's prediction is right."""
        return replace(self, right=self.agrees, fp32=np.ones_like(self.fp32))


@dataclass(frozen=True)
class Chosen:
    """The models that a rule chooses, measured on images that were not used to choose.

    Attributes:
        models: "all", "8 bits", or "others": of fewer bits or fine-tuned; "agreement": all, scored
            by task=agreement.
        samples: number of images used to choose.
        drop: mean loss of the chosen models against FP32, in points.
        gain: their accuracy minus that of the choice by hits, in points; `error`: its standard
            error, over images and trials.
    """

    network: str
    models: str
    samples: int
    rule: str
    trials: int
    drop: float
    gain: float
    error: float


def run_sweeps(name: str, folder: Path, fine_tune: bool) -> None:
    """Run the sweeps of a network in `folder`, unless it has runs."""
    if any(folder.glob("runs/sweeps/*")):
        return
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    sweeps = [*SWEEPS]
    if fine_tune and (epochs := FINE_TUNED.get(name)):
        sweeps.append(("dtype=u8s8,w4a8", CHANNELS, "method=qat", f"qat.epochs={epochs}"))
    for words in sweeps:
        asked = *NETWORKS[name], *EVERY, *words
        command: list[str | Path] = [sys.executable, REPO / "run.py", "-m", *asked]
        process.run(command, folder, environment)


def load(folder: Path) -> Models:
    """Read the predictions of the runs in a folder; one of them is FP32's."""
    baseline: Floats | None = None
    models, plain = [], []
    for path in sorted(folder.glob("runs/sweeps/*/*/*/predictions.npz")):
        config = load_config(path.parent / CONFIG_FILE)
        with np.load(path) as arrays:
            probabilities, labels = arrays["probabilities"].astype(float), arrays["labels"]
        if config.dtype.is_fp32:
            baseline = probabilities
        else:
            models.append(probabilities)
            plain.append(config.dtype.name != "w4a8" and config.method == "static")
    if baseline is None:
        raise SystemExit(f"{folder}: no run with dtype=fp32")
    p, right, rows = _raise(baseline), [], np.arange(len(labels))
    divergence, log_loss, agrees = [], [], []
    for values in models:
        q = _raise(values)
        right.append(values.argmax(axis=1) == labels)
        agrees.append(values.argmax(axis=1) == baseline.argmax(axis=1))
        divergence.append((p * np.log(p / q)).sum(axis=1))
        log_loss.append(-np.log(q[rows, labels]))
    return Models(
        *(np.array(right), np.array(divergence), np.array(log_loss), np.array(agrees)),
        *(baseline.argmax(axis=1) == labels, np.array(plain)),
    )


def _raise(probabilities: Floats) -> Floats:
    return raise_to(probabilities, min(KL_EPSILON, 0.5 / probabilities.shape[1]))


def measure(name: str, models: Models, trials: int, seed: int) -> list[Chosen]:
    """Return each rule's results among all models of a network, and among parts of them."""
    kinds = {
        **{"all": models, "8 bits": models.only(models.plain)},
        **{"others": models.only(~models.plain), "agreement": models.without_labels()},
    }
    random, rows = np.random.default_rng(seed), []
    for kind, some in kinds.items():
        fitting = [n for n in SAMPLES if 2 * n <= len(some.fp32)]
        for samples in fitting if len(some.right) > 1 else []:
            chosen, seen = _run(some, samples, trials, random)
            rows += _compare(name, kind, samples, some.fp32, chosen, seen)
    return rows


def _run(
    models: Models, samples: int, trials: int, random: np.random.Generator
) -> tuple[NDArray[np.int8], Bools]:
    """Return the hits of the models that each rule chooses [rules, trials, n].

    Also return the images used to choose in each trial [trials, n].
    """
    size = len(models.fp32)
    hits = np.empty((len(RULES), trials, size), np.int8)
    seen = np.zeros((trials, size), bool)
    for trial in track(range(trials), f"Choosing by {samples}", "trials"):
        drawn = random.choice(size, samples, replace=False)
        seen[trial, drawn] = True
        hits[:, trial] = models.right[_choose(models, drawn)]
    return hits, seen


def _compare(
    name: str, kind: str, samples: int, fp32: Bools, chosen: NDArray[np.int8], seen: Bools
) -> list[Chosen]:
    counts, trials, rows = (~seen).sum(axis=0), len(seen), []
    for rule, hits in zip(RULES, chosen, strict=True):
        losses, gains = (
            np.where(seen, 0, x) for x in (fp32.astype(np.int8) - hits, hits - chosen[0])
        )
        by_image = gains.sum(axis=0) / counts
        by_trial = gains.sum(axis=1) / (~seen).sum(axis=1)
        variance = by_image.var() / len(by_image) + by_trial.var() / trials
        drop, gain = 100 * (losses.sum(axis=0) / counts).mean(), 100 * by_image.mean()
        error = 100 * float(variance) ** 0.5
        rows.append(Chosen(name, kind, samples, rule, trials, float(drop), float(gain), error))
    return rows


def _choose(models: Models, drawn: NDArray[np.int64]) -> list[int]:
    """Return the model that each of `RULES` chooses by these samples."""
    right = models.right[:, drawn]
    best = int(right.sum(axis=1).argmax())
    lost, won = (right[best] & ~right).sum(axis=1), (right & ~right[best]).sum(axis=1)
    near = lost - won <= NEAR * np.sqrt(lost + won)
    divergence, log_loss = (
        column[:, drawn].mean(axis=1) for column in (models.divergence, models.log_loss)
    )
    within = [int(np.where(near, costs, np.inf).argmin()) for costs in (divergence, log_loss)]
    return [best, within[0], int(divergence.argmin()), within[1]]
