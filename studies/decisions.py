"""`python -m studies.decisions`: how often the verdicts of sweeps with a known truth are wrong.

Real predictions are resampled. A sweep of a dozen configurations is run, on CIFAR-10 where
`CIFAR10_DIR` and `RESNET8_H5` name it, else on the embedded data; how often its models lose an
image that FP32 gets right, or win one, is taken as that image's probability. Scaled so that the
expected loss is the one wanted, they make models whose loss is known, and which err on the same
images, as real ones do. Written: `studies/decisions.csv` and `studies/decisions.png`.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, fields
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from benchmarks import process
from benchmarks.setting import REPO
from resnet8ptq.core import figures, files
from resnet8ptq.core.console import track
from resnet8ptq.report.verdicts import FAIL, PASS, decide
from resnet8ptq.tasks.hits import Hits
from resnet8ptq.tasks.statistics import SIGNIFICANCE, Margin, holm, mcnemar_of, tango

FIGURE = Path(__file__).with_name("decisions.png")
TABLE = Path(__file__).with_name("decisions.csv")
SWEEP = (
    *("backend=onnx", "dtype=int8,uint8,u8s8", "per_channel=true,false"),
    *("calib=minmax,percentile", "latency.enabled=false", "evaluate.choice=none"),
)
LIMIT = 0.01
LOSSES = {"as good as FP32": 0.0, "0.5 points worse": 0.005, "1 point worse: the limit": LIMIT}
MODELS = (6, 30, 300)
SAMPLES = (200, 1_000, 10_000, 50_000)
CHOICE_SAMPLES = 2_000

Probabilities = NDArray[np.float64]  # [images]


@dataclass(frozen=True)
class Images:
    """Each image's probability that a model loses it, and that it wins it."""

    lost: Probabilities
    won: Probabilities

    def scaled(self, loss: float) -> "Images":
        """Return those of models with this expected loss, and as many flips as before or more."""
        flips = max(float(self.lost.mean() + self.won.mean()), loss)
        return Images(_scale(self.lost, (flips + loss) / 2), _scale(self.won, (flips - loss) / 2))


def _scale(chances: Probabilities, mean: float) -> Probabilities:
    """Return the chances with another mean; what would be above 1 is shared by the others."""
    for _ in range(100):
        chances = np.minimum(chances * mean / chances.mean(), 1)
    return chances


@dataclass(frozen=True)
class Wrong:
    """Of many sweeps, the share with a wrong claim of a kind; and what the winner is said to lose.

    Attributes:
        loss: of every model.
        passed, failed: some model passes, or fails, by this project's rule.
        point_passed: some model passes by its point estimate.
        not_worse: some model "is as good", its difference from FP32 not being significant.
        claimed: some model is significantly different from FP32.
        bias, bias_apart: how much better, in points, the model with the best result is said to be
            than it is: chosen on the samples it is reported on, and on others.
    """

    loss: float
    models: int
    samples: int
    sweeps: int
    passed: float
    failed: float
    point_passed: float
    not_worse: float
    claimed: float
    bias: float
    bias_apart: float


def load_images(folder: Path) -> Images:
    """Run the sweep in `folder`, and return what its models lose and win."""
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    command: list[str | Path] = [sys.executable, REPO / "run.py", "-m", *SWEEP]
    process.run(command, folder, environment)
    pairs = []
    for path in sorted(folder.glob("runs/sweeps/*/*/*/predictions.npz")):
        with np.load(path) as arrays:
            pairs.append([Hits.read(arrays, prefix).right for prefix in ("", "baseline_")])
    lost = np.mean([baseline & ~model for model, baseline in pairs], axis=0)
    won = np.mean([model & ~baseline for model, baseline in pairs], axis=0)
    print(
        f"{len(pairs)} models on {len(lost):,} images: {lost.mean():.2%} lost, {won.mean():.2%} won"
    )
    return Images(lost, won)


def draw(
    images: Images, models: int, samples: int, random: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return how many samples each model [models] loses and wins, of those drawn for all."""
    count = random.multinomial(samples, np.full(len(images.lost), 1 / len(images.lost)))
    found = []
    for chances in (images.lost, images.won):
        seen = (chances > 0) & (count > 0)
        flips = random.binomial(count[seen], chances[seen], size=(models, seen.sum()))
        found.append(flips.sum(axis=1))
    return found[0], found[1]


@cache
def margin(lost: int, won: int, samples: int) -> Margin:
    """Return the margin of a model; many have the same."""
    return tango(lost, won, samples, LIMIT)


def simulate(cell: tuple[float, int, int], images: Images, sweeps: int, seed: int) -> Wrong:
    """Simulate sweeps of models that all lose the same.

    Args:
        cell: loss, number of models, number of samples.
    """
    loss, models, samples = cell
    scaled = images.scaled(loss)
    random = np.random.default_rng([seed, models, samples, round(1e6 * loss)])
    p_of = cache(mcnemar_of)
    counts = np.zeros(5)
    biases = np.zeros(2)
    for _ in range(sweeps):
        lost, won = draw(scaled, models, samples, random)
        flips = list(zip(lost.tolist(), won.tolist(), strict=True))
        verdicts = decide([margin(*each, samples) for each in flips], [samples] * models)
        outcomes = {verdict.outcome for verdict in verdicts}
        p_values = [p_of(*each) for each in flips]
        drops = (lost - won) / samples
        counts += (
            PASS in outcomes,
            FAIL in outcomes,
            drops.min() <= LIMIT,
            max(p_values) >= SIGNIFICANCE,
            min(holm(p_values)) < SIGNIFICANCE,
        )
        apart = np.subtract(*draw(scaled, models, CHOICE_SAMPLES, random))
        chosen = drops.argmin(), apart.argmin()
        biases += [100 * (loss - drops[place]) for place in chosen]
    return Wrong(loss, models, samples, sweeps, *(counts / sweeps), *(biases / sweeps))


def figure(found: Sequence[Wrong]) -> Figure:
    """Draw the share of sweeps with a wrong claim, by the number of samples."""
    wrong = {
        "a model at the limit passes": (LIMIT, ("passed", "point_passed", "not_worse")),
        "a model at the limit fails": (LIMIT, ("failed",)),
        "a difference where there is none": (0.0, ("claimed",)),
    }
    labels = {
        **{"passed": "this project: pass", "failed": "this project: fail"},
        "point_passed": "by the point estimate",
        **{"not_worse": "not significantly worse", "claimed": "McNemar's test with Holm"},
    }
    drawn = Figure(figsize=(13, 4.4), layout="constrained")
    for axes, (title, (loss, names)) in zip(drawn.subplots(1, 3), wrong.items(), strict=True):
        for name, (place, models) in product(names, enumerate(MODELS)):
            rows = [each for each in found if (each.loss, each.models) == (loss, models)]
            own = name in ("passed", "failed", "claimed")
            axes.plot(
                [row.samples for row in rows],
                [100 * getattr(row, name) for row in rows],
                color="C0" if own else {"point_passed": "C3", "not_worse": "C1"}[name],
                linestyle=("-", "--", ":")[place],
                marker="o",
                markersize=4,
                label=f"{labels[name]}, {models} models",
            )
        axes.axhline(100 * SIGNIFICANCE, color="0.5", lw=1)
        axes.set(
            xscale="log", xlabel="test samples", ylabel="sweeps with that claim, %", title=title
        )
        axes.set_ylim(-2, 102 if len(names) > 1 else 12)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="center left" if len(names) > 1 else "upper right")
    return drawn


def main() -> int:
    """Simulate, and write the table and the figure; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m studies.decisions", description=__doc__)
    parser.add_argument("--sweeps", type=int, default=1000, help="of each kind (default: 1000)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        images = load_images(Path(folder))
    cells = sorted(product(LOSSES.values(), MODELS, SAMPLES), key=lambda cell: -cell[1] * cell[2])
    work = partial(simulate, images=images, sweeps=given.sweeps, seed=given.seed)
    with ProcessPoolExecutor() as pool:
        waiting = [pool.submit(work, cell) for cell in cells]
        rows = [each.result() for each in track(waiting, "Simulating")]
    found = sorted(rows, key=lambda row: (row.loss, row.models, row.samples))
    names = [each.name for each in fields(Wrong)]
    files.write_text(TABLE, files.to_csv([names, *map(astuple, found)]))
    figures.save(figure(found), FIGURE)
    for row in found:
        print(
            " ".join(f"{name}={value:g}" for name, value in zip(names, astuple(row), strict=True))
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
