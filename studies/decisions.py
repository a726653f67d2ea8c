"""`python -m studies.decisions`: how well a sweep chooses, and how often its verdicts are wrong.

Real predictions of several networks are resampled. First, the accuracy of the models that rules
choose is measured, see `studies.choosing`. Second, verdicts on models with a known loss are
simulated. The share of a network's models that lose an image (FP32 is right, the model is not), or
win it, is the image's probability to be lost or won. Scaled to a given loss, these probabilities
give models that err on the same images as real ones. A recommended model is chosen on other
samples: its errors at the limit are those of a single test, and computed exactly. SHARED names the
folder of networks and data.

By default a few minutes: three networks, 8 and 4 bits, 200 simulations of each kind; tables and
figure go to RUNS. `--full` is the published study: four networks, fine-tuned models, 1,000
simulations. It writes `studies/decisions.csv`, `decisions_choice.csv` and `decisions.png`.
"""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, fields
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.special import gammaln, xlogy

from benchmarks.tables import table
from resnet8ptq.core import figures, files
from resnet8ptq.core.console import track
from resnet8ptq.report.verdicts import FAIL, MARGIN, PASS, decide
from resnet8ptq.tasks.scoring.statistics import SIGNIFICANCE, Margin, holm, mcnemar, tango
from studies import choosing
from studies.choosing import NETWORKS, Chosen, Models

TABLE, CHOICES, FIGURE = "decisions.csv", "decisions_choice.csv", "decisions.png"
FEW = ("kws", "vit", "resnet8")  # networks of the default
FAR = 8.0  # standard deviations of the flips that are enumerated
LIMIT = 0.01
# The true loss, and the limit of the test. A model within `MARGIN` of the limit from the best
# counts as equal to it.
CASES = {
    "equal to FP32": (0.0, LIMIT),
    "at the limit": (LIMIT, LIMIT),
    "at the margin": (MARGIN * LIMIT, MARGIN * LIMIT),
}
MODELS = (6, 30)
SAMPLES = (200, 1_000, 10_000)
CHOICE_SAMPLES = 2_000

Probabilities = NDArray[np.float64]  # [images]


@dataclass(frozen=True)
class Images:
    """Each image's probability that a model loses it, and that it wins it."""

    lost: Probabilities
    won: Probabilities

    @classmethod
    def of(cls, models: Models) -> "Images":
        """Return the probabilities of the 8-bit models."""
        right = models.right[models.plain]
        lost, won = (models.fp32 & ~right).mean(axis=0), (right & ~models.fp32).mean(axis=0)
        return cls(lost, won)

    def scaled(self, loss: float) -> "Images":
        """Return the probabilities for models with this loss and at least as many flips."""
        flips = max(float(self.lost.mean() + self.won.mean()), loss)
        return Images(_scale(self.lost, (flips + loss) / 2), _scale(self.won, (flips - loss) / 2))


def _scale(chances: Probabilities, mean: float) -> Probabilities:
    """Return the chances, scaled to another mean and limited to 1."""
    if mean == 0:
        return np.zeros_like(chances)
    for _ in range(100):
        chances = np.minimum(chances * mean / chances.mean(), 1)
    return chances


@dataclass(frozen=True)
class Wrong:
    """Shares of simulated sweeps that make a claim; all models of a sweep have the same loss.

    Each share has the standard error sqrt(share * (1 - share) / sweeps).

    Attributes:
        case: see `CASES`.
        passed, failed: some model passes, or fails, in the table of all models.
        chosen_passed, chosen_failed: the recommended model passes, or fails; it is chosen on other
            samples and judged alone (exact, see `judge_alone`).
        point_passed: some model passes by its point estimate.
        not_worse: some model "is as good": its difference from FP32 is not significant.
        claimed: some model is significantly different from FP32.
        bias, bias_apart: how much better, in points, the best model looks than it is, if it is
            chosen on the reported samples, and if on others.
    """

    network: str
    case: str
    models: int
    samples: int
    sweeps: int
    passed: float
    failed: float
    chosen_passed: float
    chosen_failed: float
    point_passed: float
    not_worse: float
    claimed: float
    bias: float
    bias_apart: float


def draw(
    images: Images, models: int, samples: int, random: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return how many samples each model loses and wins [models], of those drawn for all."""
    count = random.multinomial(samples, np.full(len(images.lost), 1 / len(images.lost)))
    counts = []
    for chances in (images.lost, images.won):
        seen = (chances > 0) & (count > 0)
        flips = random.binomial(count[seen], chances[seen], size=(models, seen.sum()))
        counts.append(flips.sum(axis=1))
    return counts[0], counts[1]


@cache
def margin(lost: int, won: int, samples: int, limit: float) -> Margin:
    """Return the margin of a model; cached, since many models have equal counts."""
    return tango(lost, won, samples, limit)


@cache
def judge_alone(lost: float, won: float, samples: int, limit: float) -> tuple[float, float]:
    """Return the probabilities that a model passes and that it fails, judged alone.

    Sums over all outcomes of `samples` independent samples.

    Args:
        lost, won: the probability that a sample is lost, or won.
    """
    counts = [_around(samples * chance, samples) for chance in (lost, won)]
    x, y = np.meshgrid(*counts, indexing="ij")
    kept = x + y <= samples
    x, y = x[kept], y[kept]
    rest = samples - x - y
    ways = gammaln(samples + 1) - gammaln(x + 1) - gammaln(y + 1) - gammaln(rest + 1)
    chances = np.exp(ways + xlogy(x, lost) + xlogy(y, won) + xlogy(rest, 1 - lost - won))
    margins = [margin(*pair, samples, limit) for pair in zip(x.tolist(), y.tolist(), strict=True)]
    passed, failed = (
        float(chances[np.array([getattr(m, side) <= SIGNIFICANCE for m in margins])].sum())
        for side in ("p_within", "p_beyond")
    )
    return passed, failed


def _around(mean: float, most: int) -> NDArray[np.int64]:
    far = FAR * max(mean, 1.0) ** 0.5
    return np.arange(max(0, int(mean - far)), min(most, int(mean + far) + 1) + 1)


def simulate(
    cell: tuple[str, str, int, int], images: dict[str, Images], sweeps: int, seed: int
) -> Wrong:
    """Simulate sweeps of models that all have the same loss.

    Args:
        cell: network, case, number of models, number of samples.
    """
    network, case, models, samples = cell
    loss, limit = CASES[case]
    scaled = images[network].scaled(loss)
    random = np.random.default_rng([seed, models, samples, round(1e6 * loss), len(network)])
    p_of = cache(mcnemar)
    alone = judge_alone(float(scaled.lost.mean()), float(scaled.won.mean()), samples, limit)
    counts, biases = np.zeros(5), np.zeros(2)
    for _ in range(sweeps):
        lost, won = draw(scaled, models, samples, random)
        flips = list(zip(lost.tolist(), won.tolist(), strict=True))
        margins = [margin(*pair, samples, limit) for pair in flips]
        outcomes = {
            verdict.outcome for verdict in decide([(margin, samples) for margin in margins])
        }
        drops = (lost - won) / samples
        apart = int(np.subtract(*draw(scaled, models, CHOICE_SAMPLES, random)).argmin())
        p_values = [p_of(*pair) for pair in flips]
        counts += (
            PASS in outcomes,
            FAIL in outcomes,
            drops.min() <= limit,
            max(p_values) >= SIGNIFICANCE,
            min(holm(p_values)) < SIGNIFICANCE,
        )
        biases += [100 * (loss - drops[chosen]) for chosen in (drops.argmin(), apart)]
    passed, failed, *others = counts / sweeps
    return Wrong(*cell, sweeps, passed, failed, *alone, *others, *(biases / sweeps))


def figure(trials: Sequence[Chosen]) -> Figure:
    """Draw the loss of the models that two rules choose, by the number of samples."""
    names = list(dict.fromkeys(row.network for row in trials))
    drawn = Figure(figsize=(3.2 * len(names), 3.4), layout="constrained")
    for axes, name in zip(drawn.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for rule, colour in zip(choosing.RULES[:2], ("C3", "C0"), strict=True):
            rows = [r for r in trials if (r.network, r.models, r.rule) == (name, "all", rule)]
            x, y, errors = zip(*((r.samples, r.drop, 2 * r.error) for r in rows), strict=True)
            axes.errorbar(x, y, errors, color=colour, marker="o", markersize=4, label=rule)
        axes.set(xscale="log", xlabel="images that choose", title=name)
        axes.grid(alpha=0.3)
    drawn.axes[0].set_ylabel("loss of the choice on other images, points")
    drawn.axes[0].legend(fontsize=8)
    return drawn


def main() -> int:
    """Simulate, and write the tables and the figure; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m studies.decisions", description=__doc__)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs, kept")
    parser.add_argument("--full", action="store_true", help="the published study: an hour")
    parser.add_argument("--networks", help="with commas, of " + ", ".join(NETWORKS))
    parser.add_argument("--sweeps", type=int, help="of each kind (default: 200; full: 1000)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sweeps = arguments.sweeps or (1000 if arguments.full else 200)
    names = (
        arguments.networks.split(",") if arguments.networks else NETWORKS if arguments.full else FEW
    )
    folder, models = Path(__file__).parent if arguments.full else arguments.runs, {}
    for name in names:
        choosing.run_sweeps(name, arguments.runs / name, arguments.full)
        models[name] = choosing.load(arguments.runs / name)
    choices = [r for n, m in models.items() for r in choosing.measure(n, m, sweeps, arguments.seed)]
    _write(folder / CHOICES, Chosen, choices)
    figures.save(figure(choices), folder / FIGURE)
    images = {name: Images.of(runs) for name, runs in models.items()}
    cells = list(product(models, CASES, MODELS, SAMPLES))
    work = partial(simulate, images=images, sweeps=sweeps, seed=arguments.seed)
    with ProcessPoolExecutor() as pool:
        waiting = [pool.submit(work, cell) for cell in cells]
        wrong = [future.result() for future in track(waiting, "Simulating")]
    _write(folder / TABLE, Wrong, wrong)
    print(render(choices, wrong))
    return 0


def render(choices: Sequence[Chosen], wrong: Sequence[Wrong]) -> str:
    """Return the gain of KL, and the errors at the limit, with their standard errors."""
    gains = [
        [r.network, r.models, f"{r.samples:,}", f"{r.drop:.2f}", f"{r.gain:+.2f} ± {r.error:.2f}"]
        for r in choices
        if r.rule == choosing.RULES[1] and r.models in ("all", "agreement")
    ]
    errors = [
        [r.network, str(r.models), f"{r.samples:,}", _share(r.passed, r), _share(r.failed, r)]
        + [f"{share:.2%}" for share in (r.chosen_passed, r.chosen_failed)]
        for r in wrong
        if r.case == "at the limit"
    ]
    heads = ["network", "models", "samples", "some passes", "some fails"]
    return "\n\n".join(
        [
            table(["network", "models", "images that choose", "loss, KL", "gain over hits"], gains),
            table([*heads, "recommended passes", "recommended fails"], errors),
        ]
    )


def _share(share: float, simulated: Wrong) -> str:
    return f"{share:.1%} ± {(share * (1 - share) / simulated.sweeps) ** 0.5:.1%}"


def _write(path: Path, kind: type, rows: Sequence[Chosen] | Sequence[Wrong]) -> None:
    names = [field.name for field in fields(kind)]
    shown = [[round(v, 5) if isinstance(v, float) else v for v in astuple(row)] for row in rows]
    files.write_text(path, files.to_csv([names, *shown]))


if __name__ == "__main__":
    sys.exit(main())
