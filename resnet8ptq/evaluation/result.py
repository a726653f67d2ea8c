"""The result of a run: its outcome, and the measurement if there is one."""

from dataclasses import dataclass, field

from resnet8ptq.evaluation.stopped_hits import StoppedHits, find_outcome
from resnet8ptq.tasks.scoring.comparison import Comparison
from resnet8ptq.tasks.scoring.metric import BASELINE, CHOICE, TOTAL, Metrics
from resnet8ptq.tasks.task import Task


@dataclass(frozen=True)
class Measurement:
    """The measurement of an artifact, which was loaded from disk and run over reported samples.

    Attributes:
        metrics: metrics that `comparison` lacks, by MLflow name; a value of None was not measured.
        choice: the comparison on the selection samples; None without them.
        outputs_sha256: the hash of the model's outputs for all scored samples.
        silent: a sentence on an output that does not depend on the sample, see
            `Scope.find_silent`; empty if there is none.
        evaluation_cached: whether outputs and `system/evaluate_s` come from an earlier run.
    """

    task: Task
    comparison: Comparison
    size_bytes: int
    metrics: Metrics
    choice: Comparison | None = None
    evaluation_cached: bool = False
    silent: str = ""
    outputs_sha256: str = ""


@dataclass(frozen=True)
class RunResult:
    """The outcome of one run: `ok`, or `unsupported` with a reason.

    An experiment that is `ok` has a measurement. Analyses return subclasses without one.

    Attributes:
        status: `ok` or `unsupported`.
        resolved: MLflow params besides the settings: `Resolved.to_params`, such as `weight_dtype`,
            and findings, such as `execution`, `artifact_sha256` and `doubt`.
    """

    status: str
    reason: str = ""
    measurement: Measurement | None = None
    resolved: dict[str, str] = field(default_factory=dict)

    def summary(self) -> str:
        """Return the outcome in one line."""
        if self.measurement is None:
            return f"{self.status}: {self.reason}"
        measured = self.measurement
        scored = measured.task.summary(measured.comparison)
        stopped = measured.comparison.stopped
        if isinstance(stopped, StoppedHits):
            outcome = find_outcome(measured.comparison)
            total = measured.comparison.model.total
            scored += f", {outcome} after {total:,} of {stopped.plan.total:,} samples"
        return f"{scored}, {measured.size_bytes / 1000:.1f} kB"

    def to_metrics(self) -> dict[str, float]:
        """Return the measured metrics by MLflow name; accuracies are fractions."""
        measured = self.measurement
        if measured is None:
            return {}
        task = measured.task
        metrics = {"size_bytes": measured.size_bytes, **measured.metrics}

        # Of the selection samples, keep only what a choice needs
        if measured.choice is not None:
            values = task.metrics(measured.choice)
            metric = task.metric
            criterion = task.criterion
            names = [metric.name, metric.ranked_by, f"{BASELINE}{metric.name}", "drop", TOTAL]
            if criterion:
                names.append(criterion.name)
            for name in names:
                metrics[f"{CHOICE}{name}"] = values.get(name)

        # Leave out what is unknown
        known = {}
        for key, value in (task.metrics(measured.comparison) | metrics).items():
            if value is not None:
                known[key] = float(value)
        return known
