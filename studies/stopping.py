"""`python -m studies.stopping`: how often a run that stops when decided is wrong, and how soon.

A sweep of eight configurations of each network is run. The shares of samples that its models lose
and win, scaled to a given loss, define models with a known loss. The samples of a simulated run are
drawn independently, so that only these shares count; `StoppingPlan.outcome` ends the run. SHARED
names the folder of networks and data, as for `studies.recipes`. Writes `studies/stopping.csv`.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks import process
from benchmarks.setting import REPO
from resnet8ptq.core import files
from resnet8ptq.core.console import track
from resnet8ptq.evaluation.sequential import ANALYSES, FAIL, FUTILE, PASS, StoppingPlan
from resnet8ptq.tasks.scoring.hits import Hits
from resnet8ptq.tasks.scoring.statistics import PART, SIGNIFICANCE, flips, tango
from studies.decisions import Images, draw
from studies.recipes import NETWORKS, SHARED

TABLE = Path(__file__).with_name("stopping.csv")
NAMES = ("resnet8", "vit", "ic02", "mnist", "kws")
VIT = ("data=cifar10", f"model.path={SHARED}/vit/vit_cifar10.onnx", "preprocess=unit")
SWEEP = (
    *("backend=onnx", "dtype=int8,u8s8", "calib=minmax,percentile", "per_channel=true,false"),
    *("latency.enabled=false", "evaluate.choice=none"),
)
LIMIT = 0.01
LOSSES = (0.0, 0.002, 0.005, LIMIT, 0.02, 0.05)
TOTALS = (200, 1_000, 10_000)
MODELS = (1, 12)  # judged together
RUNS = 30  # single runs on the same samples


@dataclass(frozen=True)
class Rates:
    """Shares of simulated runs of a kind, and of the samples that they score.

    Attributes:
        flips: share of the samples that a model loses or wins.
        models: number of models that share the level of 5%.
        covered: share of runs whose 95% interval holds the loss.
        all_passed, all_failed: by the test of all samples, without looks.
        rate_error, scored_error: standard errors of `passed` (at the limit: of the larger of
            `passed` and `failed`), and of `scored`.
    """

    network: str
    flips: float
    loss: float
    models: int
    total: int
    runs: int
    passed: float
    failed: float
    scored: float
    covered: float
    all_passed: float
    all_failed: float
    rate_error: float
    scored_error: float


Right = NDArray[np.bool_]  # [samples]


def load_pairs(folder: Path, name: str) -> list[tuple[Right, Right]]:
    """Return the hits of each model of a network, and of FP32; run the sweep if it is missing."""
    folder.mkdir(exist_ok=True)
    pattern = "runs/sweeps/*/*/*/predictions.npz"
    if not any(folder.glob(pattern)):
        words = VIT if name == "vit" else NETWORKS[name]
        environment = {**os.environ, "PYTHONPATH": str(REPO)}
        process.run([sys.executable, REPO / "run.py", "-m", *words, *SWEEP], folder, environment)
    pairs = []
    for path in sorted(folder.glob(pattern)):
        with np.load(path) as arrays:
            model, baseline = (Hits.read(arrays, prefix).right for prefix in ("", "baseline_"))
            pairs.append((model, baseline))
    return pairs


def to_images(pairs: Sequence[tuple[Right, Right]]) -> Images:
    """Return each image's shares of models that lose it and that win it."""
    lost = np.mean([baseline & ~model for model, baseline in pairs], axis=0)
    won = np.mean([model & ~baseline for model, baseline in pairs], axis=0)
    return Images(lost, won)


def simulate(
    name: str, flips: float, loss: float, plan: StoppingPlan, runs: int, random: np.random.Generator
) -> Rates:
    """Simulate runs of models with this loss, and this share of flips or more."""
    flips = max(flips, loss)
    shares = (flips + loss) / 2, (flips - loss) / 2
    blocks = np.diff([0, *plan.ends])
    drawn = random.multinomial(blocks, [*shares, 1 - flips], size=(runs, len(blocks)))
    counts = drawn.cumsum(axis=1)[:, :, :2]
    rows = [_run(plan, changes, loss) for changes in counts.tolist()]
    passed, failed, scored, covered, *of_all = np.mean(rows, axis=0).tolist()
    rate = max(passed, failed) if loss == LIMIT else passed
    errors = np.sqrt(rate * (1 - rate) / runs), np.std([row[2] for row in rows]) / np.sqrt(runs)
    models = round(SIGNIFICANCE / plan.level)
    kind = (name, flips, loss, models, plan.total, runs)
    return Rates(*kind, passed, failed, scored, covered, *of_all, *map(float, errors))


def _run(plan: StoppingPlan, changes: list[list[int]], loss: float) -> tuple[float, ...]:
    """Return the outcomes of a run, from `passed` to `all_failed` of `Rates`.

    Args:
        changes: lost and won samples at each look.
    """
    for (lost, won), seen in zip(changes, plan.ends, strict=True):
        if outcome := plan.outcome(lost, won, seen):
            break
    at_loss = plan.margin(lost, won, seen, loss)
    lost, won = changes[-1]
    everything = tango(lost, won, plan.total, plan.limit)
    return (
        outcome == PASS,
        outcome == FAIL,
        seen / plan.total,
        min(at_loss.p_within, at_loss.p_beyond) > PART,
        everything.p_within <= plan.level,
        everything.p_beyond <= plan.level,
    )


def replay(name: str, pairs: Sequence[tuple[Right, Right]], orders: int, seed: int) -> str:
    """Stop the real models on their own samples, in random orders; return the results as text."""
    random, shares, equal, opposite = np.random.default_rng(seed), [], [], []
    for model, baseline in pairs:
        plan = StoppingPlan(len(model), LIMIT, SIGNIFICANCE)
        gained, dropped = flips(model, baseline)
        whole = tango(dropped, gained, len(model), LIMIT)
        verdict = PASS if whole.p_within <= SIGNIFICANCE else FUTILE
        verdict = FAIL if whole.p_beyond <= SIGNIFICANCE else verdict
        for _ in range(orders):
            order = random.permutation(len(model))
            lost, won = (
                changed[order].cumsum() for changed in (baseline & ~model, model & ~baseline)
            )
            for seen in plan.ends:
                if outcome := plan.outcome(int(lost[seen - 1]), int(won[seen - 1]), seen):
                    break
            shares.append(seen / plan.total)
            equal.append(outcome == verdict)
            opposite.append({outcome, verdict} == {PASS, FAIL})
    error = np.std(shares) / np.sqrt(len(shares))
    return (
        f"{name}: {len(pairs)} models, {orders} orders of {plan.total:,} samples: "
        f"{np.mean(shares):.1%} (standard error {error:.1%}) scored, the verdict of all samples in "
        f"{np.mean(equal):.1%}, the opposite in {np.mean(opposite):.1%}"
    )


def simulate_single_runs(images: Images, total: int, trials: int, seed: int) -> float:
    """Return how often some of `RUNS` models at the limit passes, each judged alone.

    All are scored on the same samples, where real models flip the same ones.
    """
    scaled, random = images.scaled(LIMIT), np.random.default_rng([seed, total])
    some = 0
    for _ in range(trials):
        lost, won = draw(scaled, RUNS, total, random)
        margins = (tango(*pair, total, LIMIT) for pair in zip(lost, won, strict=True))
        some += any(margin.p_within <= SIGNIFICANCE for margin in margins)
    return some / trials


def _cells(most: int) -> Iterator[tuple[float, int, int, int]]:
    """Yield loss, number of samples, number of models and number of runs of each cell."""
    for total, models in product(TOTALS, MODELS):
        yield LIMIT, total, models, most
    for loss in LOSSES:
        if loss != LIMIT:
            yield loss, TOTALS[-1], 1, most // 10


def main() -> int:
    """Simulate, print and write the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m studies.stopping", description=__doc__)
    parser.add_argument("--runs", type=int, default=20_000, help="at the limit (default: 20000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="of the sweeps, kept (default: a temporary)")
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        pairs = {name: load_pairs(folder / name, name) for name in NAMES}
    for name in NAMES:
        print(replay(name, pairs[name], 100, asked.seed))
    images = {name: to_images(pairs[name]) for name in NAMES}
    flips = {name: float((pairs.lost + pairs.won).mean()) for name, pairs in images.items()}
    cells = list(product(flips, _cells(asked.runs)))
    for name, (loss, total, models, runs) in track(cells, "Simulating"):
        random = np.random.default_rng([asked.seed, total, models, round(1e6 * loss)])
        plan = StoppingPlan(total, LIMIT, SIGNIFICANCE / models)
        rows.append(simulate(name, flips[name], loss, plan, runs, random))
        print(*(f"{v:.4g}" if isinstance(v, float) else v for v in astuple(rows[-1])))
    files.write_text(TABLE, files.to_csv([[f.name for f in fields(Rates)], *map(astuple, rows)]))
    for name, total in product(("resnet8", "vit", "ic02"), TOTALS[1:]):
        share = simulate_single_runs(images[name], total, 1000, asked.seed)
        print(f"{RUNS} single runs, {name}, {total:,} samples: some wrong pass in {share:.1%}")
    print(f"{ANALYSES} looks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
