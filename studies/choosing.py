"""How well rules choose among real models, for `studies.decisions`: regret on resampled images.

The sweeps of each network are run once, and their predictions kept. All images of a network are
taken as the population, so that the best of its models is known. A trial draws images from it with
replacement, and a rule chooses by them; the regret is the accuracy that the choice gives away.
"""

import os
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks import process
from benchmarks.setting import REPO
from resnet8ptq.config.loading import CONFIG_FILE, load_config
from resnet8ptq.core.console import track
from resnet8ptq.report.recommend import NEAR
from resnet8ptq.tasks.classification import KL_EPSILON
from resnet8ptq.tasks.distortion import raise_to
from studies.recipes import NETWORKS as OTHERS
from studies.recipes import SHARED

NETWORKS: dict[str, tuple[str, ...]] = {
    **{name: OTHERS[name] for name in ("resnet8", "ic02", "kws", "mnist")},
    "vit": ("data=cifar10", "preprocess=unit", f"model.path={SHARED}/vit/vit_cifar10.onnx"),
}
EVERY = ("backend=onnx", "latency.enabled=false", "evaluate.choice=none", "threads=1")
CHANNELS = "per_channel=true"
SWEEPS = (
    ("dtype=fp32",),
    ("dtype=int8,uint8,u8s8", "per_channel=true,false", "calib=minmax,percentile"),
    ("dtype=w4a8", CHANNELS, "corrections.bias_correction=false,true"),
    ("dtype=u8s8,w4a8", CHANNELS, "method=qat", "qat.epochs=1"),
    ("dtype=u8s8", CHANNELS, "calib=mse,entropy"),
)
SAMPLES = (200, 1_000, 2_000, 10_000)
RULES = ("hits", "KL within 2 errors", "KL alone", "log loss within 2 errors")

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Models:
    """The models of a network: hits, KL divergence and log loss of each sample [models, n].

    Attributes:
        fp32: the hits of FP32 [n].
        plain: which models have 8 bits and are not fine-tuned [models].
    """

    right: Bools
    divergence: Floats
    log_loss: Floats
    fp32: Bools
    plain: Bools

    @cached_property
    def accuracy(self) -> Floats:
        """The accuracy of each model on all samples [models]."""
        return self.right.mean(axis=1)

    def only(self, kept: Bools) -> "Models":
        """Return some of the models."""
        divergence, log_loss = self.divergence[kept], self.log_loss[kept]
        return Models(self.right[kept], divergence, log_loss, self.fp32, self.plain[kept])


@dataclass(frozen=True)
class Regret:
    """The accuracy that a rule gives away, in points, with its standard error over the trials.

    Attributes:
        models: "all", "8 bits", or "others": of fewer bits or fine-tuned.
        best: the share of trials that choose the best model.
    """

    network: str
    models: str
    samples: int
    rule: str
    trials: int
    points: float
    error: float
    best: float


def run_sweeps(name: str, folder: Path) -> None:
    """Run the sweeps of a network in `folder`, unless it has runs."""
    if any(folder.glob("runs/sweeps/*")):
        return
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    for words in SWEEPS:
        command = [sys.executable, REPO / "run.py", "-m", *NETWORKS[name], *EVERY, *words]
        process.run(command, folder, environment)


def load(folder: Path) -> Models:
    """Read the predictions of the runs in a folder; one of them is FP32's."""
    baseline: Floats | None = None
    models, plain = [], []
    for path in sorted(folder.glob("runs/sweeps/*/*/*/predictions.npz")):
        config = load_config(path.parent / CONFIG_FILE)
        with np.load(path) as arrays:
            probabilities, labels = arrays["probabilities"].astype(float), arrays["labels"]
        if config.dtype.name == "fp32":
            baseline = probabilities
        else:
            models.append(probabilities)
            plain.append(config.dtype.name != "w4a8" and config.method == "static")
    if baseline is None:
        raise SystemExit(f"{folder}: no run with dtype=fp32")
    p, right, rows = _raise(baseline), [], np.arange(len(labels))
    divergence, log_loss = [], []
    for values in models:
        q = _raise(values)
        right.append(values.argmax(axis=1) == labels)
        divergence.append((p * np.log(p / q)).sum(axis=1))
        log_loss.append(-np.log(q[rows, labels]))
    columns = np.array(right), np.array(divergence), np.array(log_loss)
    return Models(*columns, baseline.argmax(axis=1) == labels, np.array(plain))


def _raise(probabilities: Floats) -> Floats:
    return raise_to(probabilities, min(KL_EPSILON, 0.5 / probabilities.shape[1]))


def measure(name: str, models: Models, trials: int, seed: int) -> list[Regret]:
    """Return the regret of each rule, among all models of a network and among parts of them."""
    kinds = {"all": np.ones_like(models.plain), "8 bits": models.plain, "others": ~models.plain}
    random, rows = np.random.default_rng(seed), []
    for kind, kept in kinds.items():
        if kept.sum() < 2:
            continue
        some = models.only(kept)
        for samples in SAMPLES:
            rows += _measure(name, kind, some, samples, trials, random)
    return rows


def _measure(
    name: str, kind: str, models: Models, samples: int, trials: int, random: np.random.Generator
) -> list[Regret]:
    population, regrets = models.right.shape[1], []
    for _ in track(range(trials), f"{name}, {kind}, {samples}", "trials"):
        drawn = random.integers(0, population, samples)
        chosen = _choose(models, drawn)
        regrets.append(100 * (models.accuracy.max() - models.accuracy[chosen]))
    by_rule = np.array(regrets).T
    return [
        Regret(
            *(name, kind, samples, rule, trials),
            *(float(values.mean()), float(values.std(ddof=1)) / trials**0.5),
            float((values < 1e-9).mean()),
        )
        for rule, values in zip(RULES, by_rule, strict=True)
    ]


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
