"""`+analysis=plan_test`: reports the losses that these test samples can prove, before any run.

The losses follow from the sample size of Tango's test for 80% power
(`statistics.Margin.items_needed`). Losses and sample size depend on the share of predictions that
quantization changes between right and wrong, which is known only after a run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure  # no pyplot: nothing here needs a screen or global state

from resnet8ptq.config.loading import CONFIG_FILE, save_config
from resnet8ptq.core import console as consoles
from resnet8ptq.core import figures, files
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.data.sampling import count_units
from resnet8ptq.evaluation.result import RunResult
from resnet8ptq.experiment import preparation
from resnet8ptq.experiment.network_and_data import load_data_and_network, make_task
from resnet8ptq.experiment.recorder import Recorder
from resnet8ptq.experiment.samples import draw, has_groups
from resnet8ptq.experiment.settings import Settings
from resnet8ptq.tasks.scoring.metric import Metric
from resnet8ptq.tasks.scoring.statistics import POWER, SIGNIFICANCE, find_edge, round_size, tango

CHANGED = (0.005, 0.02, 0.05, 0.1)  # shares of changed predictions, without `analysis.changed`
HEADS = (
    "changed",
    "passes up to a loss of",
    "fails from a loss of",
    "samples to pass without loss",
)
MOST = 10_000_000  # the largest sample size that is printed
FILE = "test_plan.png"


@dataclass(frozen=True)
class PowerRow:
    """The power of the test for a given share of changed predictions.

    Attributes:
        changed: see `plan`.
        passes: the largest loss that passes with 80% power; negative if only a model with at least
            such a gain passes, -1 if none does.
        fails: the smallest loss that fails with 80% power; 1 if none does.
        needed: the sample size at which a model without a loss passes with 80% power.
    """

    changed: float
    passes: float
    fails: float
    needed: float


@dataclass(frozen=True, kw_only=True)
class PowerAnalysis(RunResult):
    """The power of the test with `total` samples, a row for each share of changed predictions.

    Attributes:
        limit: the largest accepted loss, as a fraction of the samples.
    """

    metric: Metric
    total: int
    limit: float
    rows: tuple[PowerRow, ...]

    def summary(self) -> str:
        """Return the sample size and the limit in one line."""
        return f"{self.total:,} test samples, limit {self.limit:g}"

    def to_metrics(self) -> dict[str, float]:
        """Return every finite metric under its MLflow name."""
        metrics = {"test_plan/samples": float(self.total)}
        for row in self.rows:
            for name in ("passes", "fails", "needed"):
                value = float(getattr(row, name))
                if math.isfinite(value):
                    metrics[f"test_plan/{name}/{row.changed:g}"] = value
        return metrics


def analyse(settings: Settings, folder: Path, run: Recorder) -> PowerAnalysis:
    """Plan the test of the reported samples; write and print the result. Nothing is quantized.

    Raises:
        ConfigError: the spread of the task's metric is known only after a run, or the samples are
            not independent.
        PtqError: network or samples cannot be read, or do not fit each other or the task.
    """
    config = settings.config
    data, network = load_data_and_network(settings)
    samples = draw(config, data, tunes=preparation.tunes(config), check=lambda split: None)
    task = make_task(config.task, dataset=data, fp32=network, scored=samples.reported)
    if not task.test.sequential:
        raise ConfigError(
            f"analysis: got plan_test with task={task.name}, expected a task of hits "
            "(classification, agreement): the spread of other metrics is known only after a run"
        )
    if has_groups(samples.reported, task):
        raise ConfigError(
            "analysis: got plan_test with data.groups, expected independent samples: no verdict is "
            "given on samples of groups; try task.join=mean, which scores a group as one"
        )
    run.log_params(task.describe())
    run.log_datasets(samples.data, samples.calibrating)

    # Compute a row for each share of changed predictions
    changed: tuple[float, ...] = CHANGED
    if config.analysis.changed is not None:
        changed = (config.analysis.changed,)
    total = len(samples.reported)
    if task.scope.joins_groups:
        total = count_units(samples.reported)
    limit = task.metric.limit(config.report)
    rows = tuple(plan(share, total, limit) for share in changed)
    result = PowerAnalysis("ok", metric=task.metric, total=total, limit=limit, rows=rows)

    # Write and print them
    save_config(config, folder / CONFIG_FILE)
    lines: list[tuple[object, ...]] = [HEADS]
    for row in rows:
        lines.append((row.changed, row.passes, row.fails, row.needed))
    files.write_text(folder / "test_plan.csv", files.to_csv(lines))
    figures.save(_draw(result), folder / FILE)
    _print(result, samples.data.name)
    return result


def plan(changed: float, total: int, limit: float) -> PowerRow:
    """Return the losses that `total` samples prove to pass or to fail with 80% power.

    Args:
        changed: the share of predictions that only one of model and FP32 gets right.
    """
    edge = find_edge(lambda loss: loss >= limit or needed(loss, changed, limit) > total)
    beyond = find_edge(lambda loss: loss > limit and needed(loss, changed, limit) <= total)
    return PowerRow(changed, passes=edge, fails=beyond, needed=needed(0.0, changed, limit))


def needed(loss: float, changed: float, limit: float) -> float:
    """Return the sample size at which a model with this loss passes or fails with 80% power.

    The size is infinite for a loss at the limit. The share of changed predictions counts as at
    least the magnitude of the loss.
    """
    share = max(changed, abs(loss))
    margin = tango(
        MOST * (share + loss) / 2, won=MOST * (share - loss) / 2, total=MOST, limit=limit
    )
    return margin.items_needed(MOST, SIGNIFICANCE)


def _draw(result: PowerAnalysis) -> Figure:
    """Draw the largest loss that passes against the sample size, for each share of changes."""
    metric = result.metric
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    sizes = np.geomspace(max(result.total / 20, 20), 20 * result.total, 60).astype(int)
    for row in result.rows:
        edges = []
        for size in sizes:
            at_size = plan(row.changed, int(size), result.limit)
            edges.append(at_size.passes)
        axes.plot(sizes, np.multiply(edges, metric.scale), label=f"{row.changed:.1%} changed")

    # Mark the limit and the size of this test
    limit = metric.scale * result.limit
    axes.axhline(limit, color="0.5", lw=1)
    axes.axvline(result.total, color="0.5", lw=1, ls=":")
    axes.annotate("limit", (sizes[0], limit), va="bottom", fontsize=8)
    axes.annotate(f" {result.total:,} here", (result.total, -limit), va="bottom", fontsize=8)
    axes.set(
        xscale="log",
        xlabel="test samples",
        ylabel=metric.loss_title,
        title=f"Largest loss that passes with {POWER:.0%} power",
        ylim=(-limit, 1.2 * limit),
    )
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure


def _print(result: PowerAnalysis, data: str) -> None:
    metric = result.metric
    console = consoles.stdout(None, 130)
    rows = []
    for row in result.rows:
        changed = f"{row.changed:.1%}"
        passes = metric.say_loss(round(row.passes, 4)) if row.passes >= 0 else "none"
        fails = metric.say_loss(round(row.fails, 4))
        needed_size = f"more than {MOST:,}"
        if row.needed <= MOST:
            needed_size = f"about {round_size(row.needed):,}"
        rows.append((changed, passes, fails, needed_size))

    # Print the table, then the meaning of its columns
    title = f"{data}: {result.total:,} test samples, limit {metric.say_loss(result.limit)}"
    consoles.print_table(console, HEADS, rows, title=title, right=range(len(HEADS)))
    for note in NOTES:
        consoles.say(console, note)


NOTES: Sequence[str] = (
    "passes: a model with this true loss or less is shown to be within the limit in 4 of 5 cases "
    "(80% power); fails: this true loss or more is shown to be beyond the limit as often. Between "
    "both, most verdicts are undecided.",
    "changed: share of predictions that only FP32 or only the model gets right. A run logs their "
    "numbers as paired/right_to_wrong and paired/wrong_to_right; analysis.changed= sets the share. "
    "Models that change few predictions need fewer samples.",
    "For one model. A sweep corrects its verdicts, and needs more samples.",
)
