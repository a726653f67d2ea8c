"""Runs of a sweep with the report's verdicts, and the choices of the sweep, for programs.

Nothing is measured or tested here: verdicts and choices come from `report`.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from resnet8ptq.core import invocation
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.core.text import printable
from resnet8ptq.report import verdicts
from resnet8ptq.report.comparison import Cell
from resnet8ptq.report.recommend import (
    RECOMMENDED,
    ModelSelection,
    own_family,
    why_none,
)
from resnet8ptq.results.bounds import Bounds, measure
from resnet8ptq.tracking import origin
from resnet8ptq.tracking.record import RunRecord, printable_or_none, show_frame, to_frame

if TYPE_CHECKING:  # half a second to import
    import pandas

_HALVED = "of the test samples"  # the end of `RunRecord.chosen_by` with evaluate.choice=half


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
        run: the run, with its verdict as a recommended run: if other samples chose it, not
            corrected for the runs that were not chosen. None for FP32 itself.
        margin: half of the limit; None for uses other than best, balanced and best_NAME.
    """

    use: str
    run_id: str | None
    label: str
    because: str
    equals: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    margin: float | None = None
    run: RunRecord | None = field(default=None, repr=False)


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
    runs: tuple[RunRecord, ...]
    choices: tuple[Choice, ...]
    why_none: str
    report: str | None

    def run(self, run_id: str) -> RunRecord:
        """Return the run with this id; raise KeyError if the sweep has no such run."""
        return {run.run_id: run for run in self.runs}[run_id]

    def choice(self, use: str = RECOMMENDED) -> RunRecord | None:
        """Return the recommended run for a use; None if there is none, or for FP32 itself.

        See `Choice.run` for its verdict. With several sets of scored samples, the first set counts.
        """
        return next((choice.run for choice in self.choices if choice.use == use), None)

    recommended = choice

    def deploy(self, folder: str | Path, use: str = RECOMMENDED, **settings: object) -> Path:
        """Export the recommended model into a new folder, see `RunRecord.deploy`.

        Raises:
            ConfigError: the sweep recommends no run for the use.
        """
        run = self.choice(use)
        if run is None:
            raise ConfigError(f"use: got {use}, for which no run is recommended. {self.why_none}")
        return run.deploy(folder, **settings)

    def to_frame(self) -> "pandas.DataFrame":
        """Return the runs as a frame, see `tracking.record.to_frame`."""
        return to_frame(self.runs)

    def _repr_html_(self) -> str:
        """Return the main columns as a table, for a notebook."""
        return show_frame(self.runs)


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
    runs = [run for selected in selections for run in judge_runs(selected, artifacts)]
    by_id = {run.run_id: run for run in runs}
    choices = [choice for selected in selections for choice in _choose(selected, by_id)]
    reasons = [line for s in selections if not s.recommendations for line in _why_none(s)]
    return SweepSummary(
        run_id=parent.run_id,
        name=parent.name,
        status=parent.status,
        runs=tuple(runs),
        choices=tuple(choices),
        why_none="" if choices else printable(" ".join(reasons)),
        report=report,
    )


def _choose(selected: ModelSelection, runs: Mapping[str, RunRecord]) -> list[Choice]:
    """Return the choices of a selection, with the bounds of `own_family`."""
    bounds = measure(own_family(selected, selected.recommendations))
    choices = []
    for recommended in selected.recommendations:
        run = None
        if recommended.choice is not None:
            chosen = recommended.choice.record
            whole = runs[chosen.run_id]
            found = {name: getattr(whole, name) for name in _FOUND}
            if chosen.run_id in bounds:
                found |= vars(bounds[chosen.run_id])
            run = chosen.model_copy(update=found)
        choice = Choice(
            use=recommended.key,
            run_id=None if run is None else run.run_id,
            label=printable(recommended.label),
            because=printable(recommended.why),
            equals=_ids(recommended.equals),
            unknown=_ids(recommended.unknown),
            margin=_margin(selected, recommended.key),
            run=run,
        )
        choices.append(choice)
    return choices


# Attributes that this module adds to those of `verdicts.judge`.
_FOUND = ("artifact", "reproduce_command", "loss_upper_bound", "loss_lower_bound")


def _ids(cells: Sequence[Cell]) -> tuple[str, ...]:
    return tuple(cell.record.run_id for cell in cells)


def _margin(selected: ModelSelection, use: str) -> float | None:
    if use != "balanced" and not use.startswith("best"):
        return None
    return verdicts.margin_of(selected.family.metric, selected.limits)


def _why_none(selected: ModelSelection) -> list[str]:
    if selected.family.measured:
        return why_none(selected)
    counts = Counter(cell.record.status for cell in selected.family.cells)
    return [f"No quantized run was measured ({', '.join(f'{n} {s}' for s, n in counts.items())})."]


def judge_runs(
    selected: ModelSelection, artifacts: Mapping[str, str | None]
) -> tuple[RunRecord, ...]:
    """Return runs that were scored on the same samples, with bounds, file and command."""
    bounds = measure(selected.family)
    runs = []
    for record in selected.family.records:
        bound = bounds.get(record.run_id, Bounds())
        found = {"artifact": artifacts.get(record.run_id), "reproduce_command": _reproduce(record)}
        runs.append(record.model_copy(update=found | vars(bound)))
    return tuple(runs)


def _reproduce(record: RunRecord) -> str | None:
    """Return the command for one job of a sweep, from the job's overrides."""
    kept = origin.find_overrides(record) if record.job_overrides else None
    if kept is None:
        return None
    if record.chosen_by.endswith(_HALVED):  # alone, a run chooses nothing, and reports on all
        kept.append("evaluate.choice=half")
    elif record.samples_planned is not None and record.chosen_by:
        kept.append("evaluate.choice=held_out")
    if record.samples_planned is not None:  # alone, a run would stop earlier
        models = record.params.get("evaluate.models", "null")
        if not re.fullmatch(r"\d+|null", models):
            return None
        kept.append(f"evaluate.models={models}")
    # A named experiment may be a sweep.
    return printable_or_none(invocation.command("run", *kept, "hydra.mode=RUN"))
