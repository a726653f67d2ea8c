"""The tables, the files and the figure of a diagnosis."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # no pyplot: nothing here needs a screen or global state
from rich.console import Console

from resnet8ptq.config.loading import CONFIG_FILE, save_config
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import figures, files
from resnet8ptq.core.console import say, stdout
from resnet8ptq.core.table import Column, Table, number
from resnet8ptq.core.text import plain, printable, show
from resnet8ptq.exploration.diagnosis.conclusion import DiagnosisResult
from resnet8ptq.exploration.diagnosis.outcomes import Outcome
from resnet8ptq.exploration.tensors import network_picture, tensor_table
from resnet8ptq.exploration.tensors.comparing import ComparedTensor
from resnet8ptq.exploration.tensors.findings import Finding, name_tensors
from resnet8ptq.tasks.scoring.metric import Metric


def write_diagnosis(folder: Path, config: RunConfig, result: DiagnosisResult) -> None:
    """Write `config.yaml`, `diagnosis.md`, `diagnosis.png` and the files of `write_comparison`."""
    title = tensor_table.describe(config, "diagnosis")
    save_config(config, folder / CONFIG_FILE)
    tensor_table.write_comparison(
        folder, name="diagnosis", compared=result.compared, faults=result.findings, title=title
    )
    files.write_text(folder / "diagnosis.md", to_markdown(result, title))
    figures.save(draw_diagnosis(result, title), folder / "diagnosis.png")


def to_markdown(result: DiagnosisResult, title: str) -> str:
    """Return the whole diagnosis as a Markdown page, the conclusion first."""
    parts = [f"# {printable(title)}", *map(_escape, (*result.conclusion, *result.notes))]
    for shown in _tables(result, result.compared.tensors):
        parts += [f"## {shown.title}", shown.to_markdown(_escape)]
    parts.append(f"![network]({network_picture.FILE})")
    parts += _notes(result)
    return "\n\n".join(parts) + "\n"


def print_tables(
    result: DiagnosisResult, config: RunConfig, console: Console | None = None
) -> None:
    """Print the conclusion, then the measurements behind it."""
    console = stdout(console, 130)
    title = tensor_table.describe(config, "diagnosis")
    console.print(show(title), style="bold", highlight=False, markup=False)
    for line in (*result.conclusion, *result.notes):
        say(console, line)
    for shown in _tables(result, tensor_table.find_costliest(result.compared)):
        replace(shown, title="").print(console, whole=False)
    for line in _notes(result):
        say(console, line)


def _tables(result: DiagnosisResult, tensors: Sequence[ComparedTensor]) -> Iterator[Table[Any]]:
    findings = sorted(result.findings, key=lambda finding: not result.costs(finding))
    if findings:
        yield Table(_of_findings(result), findings, "Findings")
    outcomes = [result.before]
    if result.halves:
        outcomes += [result.halves.weights, result.halves.activations]
    outcomes += result.outcomes
    yield Table(_of_changes(result.metric), outcomes, "Changes tried")
    yield Table(tensor_table.COLUMNS, tensors, "Tensors")


def _of_findings(result: DiagnosisResult) -> list[Column[Finding]]:
    def change(finding: Finding) -> str:
        answer = result.answer(finding)
        if answer is not None:
            return answer.words
        return ", ".join(change.words for change in finding.changes)  # none was tried

    def won(finding: Finding) -> str:
        costs = result.costs(finding)
        answer = result.answer(finding)
        if answer is None:
            return "" if costs else "not tried"
        gain = f"{answer.won_db:+.1f} dB"
        return gain if costs else f"nothing alone ({gain})"

    # The worst tensor stands for all
    return [
        Column("finding", lambda finding: finding.name),
        Column("in", lambda finding: finding.tensors[0]),
        Column("change", change),
        Column("won back", won),
    ]


def _of_changes(metric: Metric) -> list[Column[Outcome]]:
    def value(one: Outcome) -> str:
        return "not tried" if one.reason else metric.show(one.value)

    def is_change(one: Outcome) -> bool:
        return bool(one.words) and not one.reason

    # The unchanged settings and untried changes win nothing back
    def won(one: Outcome) -> float | None:
        return one.won if is_change(one) else None

    def won_db(one: Outcome) -> float | None:
        return one.won_db if is_change(one) else None

    def sqnr_db(one: Outcome) -> float | None:
        return None if one.reason else one.sqnr_db

    return [
        Column("change", lambda one: one.words or "(unchanged)"),
        number(metric.title, value),
        number("won back", won, metric.show_loss),
        number("SQNR dB", sqnr_db, ".1f"),
        number("won back dB", won_db, "+.1f"),
    ]


def _notes(result: DiagnosisResult) -> list[str]:
    notes = [tensor_table.note(result.compared)]
    refused = [outcome.refusal for outcome in result.outcomes if outcome.reason]
    if refused:
        notes.append(f"Not tried: {'; '.join(refused)}")
    notes.append(
        f"Changes on {result.samples:,} held-out training samples, each alone, ranked by the SQNR "
        f"of the output against FP32. FP32: {result.metric.title} "
        f"{result.metric.show(result.fp32_value)}. A difference of a few samples is noise."
    )
    return notes


def _escape(text: str) -> str:
    return printable(text).replace("|", r"\|")


def draw_diagnosis(result: DiagnosisResult, title: str) -> Figure:
    """Draw the SQNR along the network, and the finite gains of the changes."""
    tried = [outcome for outcome in result.outcomes if math.isfinite(outcome.won_db)]
    figure = Figure(figsize=(13, max(5.5, 1.6 + 0.4 * len(tried))), layout="constrained")
    along, changes = figure.subplots(1, 2, width_ratios=(2.4, 1))
    tensor_table.draw_ratios(along, result.compared, name_tensors(result.reasons))

    # Draw the gain of each change, the best on top
    positions = range(len(tried))
    bars = changes.barh(positions, [outcome.won_db for outcome in tried], color="tab:green")
    changes.bar_label(bars, fmt="%+.1f", padding=3, fontsize=9)
    changes.set_yticks(positions, [plain(outcome.words)[:34] for outcome in tried])
    changes.invert_yaxis()
    changes.axvline(0, color="black", linewidth=0.8)
    changes.margins(x=0.3)  # leaves room for the labels
    changes.set_xlabel("SQNR of the output won back (dB)")
    changes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(plain(title), x=0.01, ha="left")
    return figure
