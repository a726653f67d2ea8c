"""A run and a sweep as typed values, with the report's verdicts, for programs.

Nothing is measured or tested here: records come from `tracking.record`, verdicts and choices from
`report`. Texts are printable, because a store is untrusted. Numbers are finite, or None if they
were not measured.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resnet8ptq.core import child, invocation
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.core.text import printable
from resnet8ptq.report import equal_files, facts, verdicts
from resnet8ptq.report.comparison import Cell
from resnet8ptq.report.recommend import (
    RECOMMENDED,
    ModelSelection,
    Recommendation,
    own_family,
    why_none,
)
from resnet8ptq.report.verdicts import Verdict
from resnet8ptq.results.bounds import Bounds, measure
from resnet8ptq.tasks.metric import BASELINE, Metric
from resnet8ptq.tracking import origin
from resnet8ptq.tracking.record import RunRecord

if TYPE_CHECKING:  # half a second to import
    import pandas

UNSUPPORTED = "unsupported"  # a verdict beside those of `report.verdicts`
_HALVED = "of the test samples"  # the end of `RunRecord.chosen_by` with evaluate.choice=half


@dataclass(frozen=True)
class RunSummary:
    """A run, judged among the runs of its sweep.

    Attributes:
        label: the combination as text, with the settings that vary in the sweep.
        status: ok, unsupported, failed, killed or running.
        reason: the reason if the run is unsupported, failed or void.
        settings: the settings that vary in the sweep, besides the four columns before them.
        verdict: pass, fail, undecided, void or unsupported; also fail if the metric is below its
            own limit, such as `report.min_accuracy`. None for FP32 and for failed runs.
        loss_verdict: the verdict on the loss alone; `verdict_text` is the report's text.
        samples_needed: if undecided, the approximate sample size for 80% power at the measured
            loss; None beyond a million, or without spread.
        least: the metric's own limit.
        loss: the loss against FP32, positive if the model is worse: a difference of the metric, or
            for unbounded metrics a fraction of FP32's value, see `Metric.loss`.
        loss_upper_bound, loss_lower_bound: one-sided 95% bounds, see `bounds`.
        limit: the largest loss that passes.
        p_value: p-value of the difference from FP32, corrected for the runs of the sweep.
        samples: the number of scored samples; `samples_from` is test, selection or
            held-out training.
        samples_planned: planned samples of a run that stopped when decided; else None.
        latency_ms: median latency of one sample; `batch_latency_ms` of a batch.
        artifact: path or address of the quantized file.
        equal_runs: ids of the other runs of the sweep with an equal file; the report has one row
            for all of them.
        deploy_command: the command that exports the file with a model card; `deploy_words`: its
            settings.
        reproduce_command: the command that repeats a sweep's run; None for other runs.

    `load_run` and `load_sweep` return summaries.
    """

    run_id: str
    name: str
    sweep_id: str
    label: str
    status: str
    reason: str
    framework: str
    dtype: str
    calibration: str
    weights: str
    settings: Mapping[str, str]
    execution: str
    verdict: str | None
    loss_verdict: str | None
    verdict_text: str
    samples_needed: int | None
    metric: Metric
    value: float | None
    fp32_value: float | None
    least: float | None
    loss: float | None
    loss_upper_bound: float | None
    loss_lower_bound: float | None
    limit: float
    p_value: float | None
    samples: int | None
    samples_planned: int | None
    samples_from: str
    samples_digest: str
    size_bytes: int | None
    fp32_size_bytes: int | None
    latency_ms: float | None
    batch_latency_ms: float | None
    fp32_latency_ms: float | None
    speedup: float | None
    latency_threads: str
    cpu: str
    artifact: str | None
    artifact_sha256: str
    deploy_command: str | None
    reproduce_command: str | None
    equal_runs: tuple[str, ...] = ()
    deploy_words: tuple[str, ...] = field(default=(), repr=False)

    @property
    def path(self) -> Path | None:
        """The quantized file; None if there is none on this machine."""
        path = None if self.artifact is None else Path(self.artifact)
        return path if path is not None and path.exists() else None

    def deploy(self, folder: str | Path, **settings: object) -> Path:
        """Export the model with its card, test vectors and example into a new folder.

            load_run().deploy("folder", verify=False)

        Args:
            settings: keys of `resnet8ptq deploy`, with `__` for a dot.

        Returns:
            The folder.

        Raises:
            PtqError: as on the command line.
        """
        if self.deploy_command is None:
            raise ConfigError(f"run_id: run {self.run_id} has no file of this tool to deploy")
        target = Path(folder).expanduser().absolute()
        asked = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
        child.run("deploy", [*self.deploy_words, *asked, f"folder={target}"])
        return target

    def _repr_html_(self) -> str:
        """Return the run as a table of one row, for a notebook."""
        return _show_frame([self])


@dataclass(frozen=True)
class Choice:
    """The run that a sweep recommends for a use, see `report.recommend`.

    Attributes:
        use: recommended, best, balanced, smallest, fastest, fastest_batch, or best_NAME for a
            backend.
        run_id: None for FP32 itself, which only the uses for speed recommend.
        equals: ids of the alternatives: for best and balanced, the runs proven to be within the
            margin of the best; for other uses, runs close in size or speed.
        unknown: ids of the runs that may be within the margin; the samples do not decide.
        run: the run's summary, with its verdict as a recommended run: if other samples chose it,
            not corrected for the runs that were not chosen. None for FP32 itself.
        margin: half of the limit; None for uses other than best, balanced and best_NAME.
    """

    use: str
    run_id: str | None
    label: str
    because: str
    equals: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    margin: float | None = None
    run: RunSummary | None = field(default=None, repr=False)


@dataclass(frozen=True)
class SweepSummary:
    """A sweep: its runs in the order of its jobs, and its choices.

    Attributes:
        status: ok, failed, killed or running.
        choices: the choices by use; one for each set of scored samples.
        why_none: the reason if nothing is recommended; else empty.
        report: path or address of the report's page.
    """

    run_id: str
    name: str
    status: str
    runs: tuple[RunSummary, ...]
    choices: tuple[Choice, ...]
    why_none: str
    report: str | None

    def run(self, run_id: str) -> RunSummary:
        """Return the run with this id; raise KeyError if the sweep has no such run."""
        return {run.run_id: run for run in self.runs}[run_id]

    def choice(self, use: str = RECOMMENDED) -> RunSummary | None:
        """Return the recommended run for a use; None if there is none, or for FP32 itself.

        See `Choice.run` for its verdict. With several sets of scored samples, the first set counts.
        """
        return next((choice.run for choice in self.choices if choice.use == use), None)

    recommended = choice

    def deploy(self, folder: str | Path, use: str = RECOMMENDED, **settings: object) -> Path:
        """Export the recommended model into a new folder, see `RunSummary.deploy`.

        Raises:
            ConfigError: the sweep recommends no run for the use.
        """
        run = self.choice(use)
        if run is None:
            raise ConfigError(f"use: got {use}, for which no run is recommended. {self.why_none}")
        return run.deploy(folder, **settings)

    def to_frame(self) -> "pandas.DataFrame":
        """Return the runs as a frame, see `summaries.to_frame`."""
        return to_frame(self.runs)

    def _repr_html_(self) -> str:
        """Return the main columns as a table, for a notebook."""
        return _show_frame(self.runs)


def to_frame(runs: Iterable[RunSummary]) -> "pandas.DataFrame":
    """Return a frame with a row for each run, indexed by `run_id`, and a column for each attribute.

    `metric` is the metric's name. Each setting of `settings` is a separate column. A number that
    was not measured is NaN.

        frame = load_sweep().to_frame()
        frame[frame.loss_upper_bound <= 0.01].sort_values("size_bytes")
    """
    import pandas

    names = [item.name for item in fields(RunSummary) if item.name not in _NO_COLUMNS]
    rows = [
        {name: getattr(run, name) for name in names} | {"metric": run.metric.name, **run.settings}
        for run in runs
    ]
    columns = dict.fromkeys([*names, *(key for row in rows for key in row)])
    frame = pandas.DataFrame(rows, columns=list(columns))
    return frame.astype(dict.fromkeys(_NUMBERS, "float64")).set_index("run_id")


_NO_COLUMNS = ("settings", "deploy_words")
# The columns that a notebook shows.
_SHOWN = ("label", "status", "value", "loss", "verdict", "size_bytes", "latency_ms", "speedup")


def _show_frame(runs: Sequence[RunSummary]) -> str:
    frame = to_frame(runs).reset_index()[list(_SHOWN)]
    return str(frame.to_html(index=False, na_rep="", float_format="%.4g"))


_NUMBERS = [
    item.name for item in fields(RunSummary) if item.type in (float, float | None, int | None)
]


def summarize_sweep(
    parent: RunRecord,
    selections: Sequence[ModelSelection],
    artifacts: Mapping[str, str | None],
    report: str | None,
) -> SweepSummary:
    """Return the summary of a sweep.

    Args:
        selections: one for each set of scored samples.
        artifacts: path or address of each run's quantized file, by the run's id.
    """
    runs = [run for selected in selections for run in summarize_runs(selected, artifacts)]
    bounds = [measure(own_family(s, s.recommendations), s.limits) for s in selections]
    choices = [
        Choice(
            recommended.key,
            None if recommended.choice is None else printable(recommended.choice.record.run_id),
            printable(recommended.label),
            printable(recommended.why),
            _ids(recommended.equals),
            _ids(recommended.unknown),
            _margin(selected, recommended.key),
            _recommended(selected, recommended, runs, own),
        )
        for selected, own in zip(selections, bounds, strict=True)
        for recommended in selected.recommendations
    ]
    reasons = [line for s in selections if not s.recommendations for line in _why_none(s)]
    return SweepSummary(
        run_id=printable(parent.run_id),
        name=printable(parent.name),
        status=printable(parent.status),
        runs=tuple(runs),
        choices=tuple(choices),
        why_none="" if choices else printable(" ".join(reasons)),
        report=report,
    )


def _recommended(
    selected: ModelSelection,
    recommended: Recommendation,
    runs: Sequence[RunSummary],
    own: Mapping[str, Bounds],
) -> RunSummary | None:
    """Return the summary of a recommended run, with the verdict and bounds of `own_family`.

    Args:
        own: bounds of the models of `own_family`, by run id.
    """
    cell = recommended.choice
    if cell is None:
        return None
    run_id = cell.record.run_id
    [run] = [run for run in runs if run.run_id == printable(run_id)]
    run = replace(run, **_judge(cell, recommended.judged))
    if run_id not in own:
        return run
    bounds = own[run_id]
    return replace(run, loss_upper_bound=bounds.upper, loss_lower_bound=bounds.lower)


def _ids(cells: Sequence[Cell]) -> tuple[str, ...]:
    return tuple(printable(cell.record.run_id) for cell in cells)


def _margin(selected: ModelSelection, use: str) -> float | None:
    if use != "balanced" and not use.startswith("best"):
        return None
    return verdicts.margin_of(selected.family.metric, selected.limits)


def _why_none(selected: ModelSelection) -> list[str]:
    if selected.family.measured:
        return why_none(selected)
    counts = Counter(cell.record.status for cell in selected.family.cells)
    return [f"No quantized run was measured ({', '.join(f'{n} {s}' for s, n in counts.items())})."]


def summarize_runs(
    selected: ModelSelection, artifacts: Mapping[str, str | None]
) -> tuple[RunSummary, ...]:
    """Return the summaries of runs that were scored on the same samples."""
    family, limits = selected.family, selected.limits
    bounds, adjusted = measure(family, limits), facts.adjusted_p(family.records)
    varied = facts.varied(family.records)
    equal = _find_equal_runs(family.records)
    return tuple(
        _summarize(
            selected,
            cell,
            bounds.get(cell.record.run_id, Bounds()),
            adjusted.get(cell.record.run_id),
            {printable(k): printable(cell.record.params.get(k, "")) for k in varied},
            artifacts.get(cell.record.run_id),
            equal.get(cell.record.run_id, ()),
        )
        for cell in family.cells
    )


def _find_equal_runs(records: Sequence[RunRecord]) -> dict[str, tuple[str, ...]]:
    """Return the ids of the other runs with an equal file, by run id."""
    others = {}
    for members in equal_files.group(records):
        ids = [member.run_id for member in members]
        for run_id in ids:
            others[run_id] = tuple(printable(other) for other in ids if other != run_id)
    return others


# Of a record, under the same names.
_TEXTS = ("run_id", "name", "status", "execution", "latency_threads", "cpu", "artifact_sha256")


def _summarize(
    selected: ModelSelection,
    cell: Cell,
    bounds: Bounds,
    p_value: float | None,
    settings: Mapping[str, str],
    artifact: str | None,
    equal_runs: tuple[str, ...],
) -> RunSummary:
    record, metric, limits = cell.record, selected.family.metric, selected.limits
    framework, dtype, calibration, weights = map(printable, record.combination.cells)
    texts: dict[str, Any] = {name: printable(getattr(record, name)) for name in _TEXTS}
    return RunSummary(
        **texts,
        sweep_id=printable(record.parent_id),
        label=printable(cell.label),
        reason=printable(record.reason or record.doubt),
        framework=framework,
        dtype=dtype,
        calibration=calibration,
        weights=weights,
        settings=settings,
        **_judge(cell, selected.judged.get(record.run_id)),
        metric=metric,
        value=_finite(record.value(metric)),
        fp32_value=_finite(record.value(metric, BASELINE)),
        least=verdicts.least_of(metric, limits),
        loss=_finite(record.drop),
        loss_upper_bound=bounds.upper,
        loss_lower_bound=bounds.lower,
        limit=metric.limit(limits),
        p_value=_finite(p_value),
        samples=_whole(record.total),
        samples_planned=_whole(record.planned),
        samples_from=facts.images_of([record]),
        samples_digest=printable(record.test_digest),
        size_bytes=_whole(record.size_bytes),
        fp32_size_bytes=_whole(record.baseline_size_bytes),
        latency_ms=_finite(record.latency_ms),
        batch_latency_ms=_finite(record.batch_latency_ms),
        fp32_latency_ms=_finite(record.baseline_latency_ms),
        speedup=_finite(record.speedup),
        artifact=artifact,
        equal_runs=equal_runs,
        deploy_command=_deploy(cell) if artifact else None,
        deploy_words=tuple(Recommendation("", cell.label, "", cell).deploy_words),
        reproduce_command=_reproduce(record),
    )


def _judge(cell: Cell, judged: Verdict | None) -> dict[str, Any]:
    """Return the attributes of a `RunSummary` that hold the verdict on it."""
    if judged is None:
        verdict = UNSUPPORTED if cell.record.status == UNSUPPORTED else None
        return {
            "verdict": verdict,
            "loss_verdict": None,
            "verdict_text": "",
            "samples_needed": None,
        }
    return {
        "verdict": judged.outcome,
        "loss_verdict": judged.loss,
        "verdict_text": verdicts.say(cell, judged),
        "samples_needed": judged.samples,
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _whole(value: float | None) -> int | None:
    return round(value) if value is not None and math.isfinite(value) else None


def _deploy(cell: Cell) -> str | None:
    """Return the deploy command of a run; None if its id, from an untrusted store, is not plain."""
    if not re.fullmatch(r"\w+", cell.record.run_id):
        return None
    return _printable_or_none(Recommendation("", cell.label, "", cell).command)


def _reproduce(record: RunRecord) -> str | None:
    """Return the command for one job of a sweep, from the job's overrides."""
    kept = origin.find_overrides(record) if record.job_overrides else None
    if kept is None:
        return None
    if record.chosen_by.endswith(_HALVED):  # alone, a run chooses nothing, and reports on all
        kept.append("evaluate.choice=half")
    elif record.planned is not None and record.chosen_by:
        kept.append("evaluate.choice=held_out")
    if record.planned is not None:  # alone, a run would stop earlier
        models = record.params.get("evaluate.models", "null")
        if not re.fullmatch(r"\d+|null", models):
            return None
        kept.append(f"evaluate.models={models}")
    # A named experiment may be a sweep.
    return _printable_or_none(invocation.command("run", *kept, "hydra.mode=RUN"))


def _printable_or_none(command: str) -> str | None:
    """Return a command if it is one printable line, because an escaped one would differ."""
    return command if command and command.isprintable() else None
