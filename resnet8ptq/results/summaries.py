"""Runs of a sweep with the report's verdicts, and the choices of the sweep, for programs.

Verdicts and choices come from `report`. This module adds bounds, files, and the commands that
repeat a run.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from resnet8ptq.core import invocation
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.core.text import printable
from resnet8ptq.report.families import Family, by_run_id
from resnet8ptq.report.recommend import (
    HALVED,
    RECOMMENDED,
    ModelSelection,
    Recommendation,
    find_recommendation,
    own_family,
    why_none,
)
from resnet8ptq.results import bounds
from resnet8ptq.tracking import origin
from resnet8ptq.tracking.record import RunRecord, printable_or_none, show_frame, to_frame

if TYPE_CHECKING:  # its import takes half a second
    import pandas


@dataclass(frozen=True)
class SweepSummary:
    """A sweep: its runs and its choices.

    Attributes:
        status: ok, failed, killed or running.
        runs: the runs of each set of scored samples in turn, in the order of the jobs.
        choices: the recommendations; several sets of scored samples may each have one for a use.
        why_none: the reason why nothing is recommended; empty otherwise.
        report: path or address of the report's page; None without one.
    """

    run_id: str
    name: str
    status: str
    runs: tuple[RunRecord, ...]
    # Left out of `repr`, which would print arrays of predictions
    choices: tuple[Recommendation, ...] = field(repr=False)
    why_none: str
    report: str | None

    def run(self, run_id: str) -> RunRecord:
        """Return the run with this id; raise KeyError if the sweep has no such run."""
        for run in self.runs:
            if run.run_id == run_id:
                return run
        raise KeyError(run_id)

    def choice(self, use: str = RECOMMENDED) -> RunRecord | None:
        """Return the recommended run for a use; None without one, or if FP32 itself is the fastest.

        If the sweep scored several sets of samples, the first recommendation for the use counts.
        The use `RECOMMENDED` returns a run even if the headline advises to keep FP32.
        """
        choice = find_recommendation(use, self.choices)
        return None if choice is None else choice.run

    recommended = choice

    def deploy(self, folder: str | Path, use: str = RECOMMENDED, **settings: object) -> Path:
        """Export the recommended model into a new folder, see `RunRecord.deploy`.

        Raises:
            ConfigError: the sweep recommends no run for the use.
            PtqError: see `RunRecord.deploy`.
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
        artifacts: path or address of each run's file, by the run's id; None without a file.
        report: path or address of the report's page; None without one.
    """
    # Join what the sets of scored samples have separately
    runs: list[RunRecord] = []
    choices: list[Recommendation] = []
    reasons: list[str] = []
    has_reported = any(not selected.on_selection for selected in selections)
    for selected in selections:
        whole = _complete(selected, artifacts)
        runs += whole.family.records
        choices += _choose(whole)
        counts = not (selected.on_selection and has_reported)  # such runs never recommend
        if counts and not selected.recommendations:
            reasons += _why_none(selected)
    # One set with a recommendation is enough for the sweep
    why = ""
    if not choices:
        why = printable(" ".join(reasons))
    return SweepSummary(
        run_id=parent.run_id,
        name=parent.name,
        status=parent.status,
        runs=tuple(runs),
        choices=tuple(choices),
        why_none=why,
        report=report,
    )


def _choose(selected: ModelSelection) -> list[Recommendation]:
    """Return the recommendations of a selection, with the bounds that belong to their verdicts.

    Models of `own_family`, and a headline that was assessed by itself, may have other verdicts and
    bounds than in the table.
    """
    own = bounds.add_bounds(own_family(selected, selected.recommendations))
    cells = by_run_id(own.cells)
    choices = []
    for recommended in selected.recommendations:
        cell = recommended.choice
        # Take the bounds by which the verdict was corrected, see `recommend._assess`
        if cell is not None and recommended.use != RECOMMENDED:
            cell = cells.get(cell.record.run_id, cell)
        elif cell is not None and selected.headline is not None and selected.headline.alone:
            [cell] = bounds.add_bounds(Family((cell,), selected.limits)).cells
        choices.append(replace(recommended, choice=cell))
    return choices


def _why_none(selected: ModelSelection) -> list[str]:
    if selected.family.measured:
        return why_none(selected)
    counts = Counter(cell.record.status for cell in selected.family.cells)
    listed = ", ".join(f"{count} {status}" for status, count in counts.items())
    return [f"No quantized run was measured ({listed})."]


def assess_runs(selected: ModelSelection, artifacts: Mapping[str, str | None]) -> list[RunRecord]:
    """Return the runs of a selection, with their bounds, files and commands to repeat them."""
    return _complete(selected, artifacts).family.records


def _complete(selected: ModelSelection, artifacts: Mapping[str, str | None]) -> ModelSelection:
    family = bounds.add_bounds(selected.family)
    cells = []
    for cell in family.cells:
        record = cell.record
        more = {"artifact": artifacts.get(record.run_id), "reproduce_command": _reproduce(record)}
        cells.append(replace(cell, record=record.model_copy(update=more)))
    return replace(selected, family=replace(family, cells=tuple(cells)))


def _reproduce(record: RunRecord) -> str | None:
    """Return the command that repeats one job of a sweep as a single run.

    Returns None for a single run, and if a setting is damaged, not printable or not safe to repeat.
    """
    if not record.job_overrides:  # a single run has none
        return None
    kept = origin.find_overrides(record)
    if kept is None:
        return None

    # Add the settings by which a single run scores the same samples
    if record.chosen_by.endswith(HALVED):  # a single run would report on all samples
        kept.append("evaluate.choice=half")
    elif record.stopped_early and record.chosen_by:
        kept.append("evaluate.choice=held_out")
    if record.stopped_early:  # a single run would stop earlier
        models = record.params.get("evaluate.models", "null")
        if not re.fullmatch(r"\d+|null", models):
            return None
        kept.append(f"evaluate.models={models}")
    # A named experiment may be a sweep.
    return printable_or_none(invocation.command("run", *kept, "hydra.mode=RUN"))
