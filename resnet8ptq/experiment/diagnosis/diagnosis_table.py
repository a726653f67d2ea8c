"""The tables, the files and the figure of a diagnosis."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # no pyplot: nothing here needs a screen or global state
from rich.console import Console

from resnet8ptq.config.loading import CONFIG_FILE, save_config
from resnet8ptq.config.naming import Combination
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import figures, files, table
from resnet8ptq.core.console import say, stdout
from resnet8ptq.core.table import Column, Table, number
from resnet8ptq.core.text import plain, printable, show
from resnet8ptq.experiment.diagnosis.conclusion import DiagnosisResult
from resnet8ptq.experiment.diagnosis.findings import Finding
from resnet8ptq.experiment.diagnosis.measuring import Activation, TensorMeasurements, Weight
from resnet8ptq.experiment.diagnosis.outcomes import Outcome
from resnet8ptq.tasks.metric import Metric

SHOWN = 8  # tensors of each kind in the terminal; diagnosis.csv has all of them

ACTIVATIONS: Sequence[Column[Activation]] = (
    Column("", lambda one: "activation", key="kind"),
    Column("activation", lambda one: one.tensor.name, key="tensor"),
    Column("", lambda one: one.tensor.layer, key="node"),
    number("SQNR dB", lambda one: one.network.sqnr_db, ".1f", "sqnr_db"),
    number("of its layer", lambda one: one.layer.sqnr_db, ".1f", "layer_sqnr_db"),
    number("of rounding", lambda one: one.rounding_db, ".1f", "rounding_sqnr_db"),
    Column("", lambda one: one.tensor.low, key="range_low"),
    Column("", lambda one: one.tensor.high, key="range_high"),
    Column("", lambda one: one.spread.low, key="low"),
    Column("", lambda one: one.spread.high, key="high"),
    Column("", lambda one: one.spread.reach, key="reach_99"),
    Column("", lambda one: one.spread.bulk_db, key="bulk_sqnr_db"),
    number("beyond range", lambda one: one.beyond_share, ".2%", "beyond_range"),
    Column("", lambda one: one.off_share, key="kernel_off"),
    Column("", lambda one: one.most_off, key="kernel_most_off"),
    number("99% within", lambda one: _say_range(one)),
)
WEIGHTS: Sequence[Column[Weight]] = (
    Column("", lambda one: "weight", key="kind"),
    Column("weight", lambda one: one.name, key="tensor"),
    Column("", lambda one: one.node, key="node"),
    number("SQNR dB", lambda one: one.sqnr_db, ".1f", "sqnr_db"),
    Column("", lambda one: one.sqnr_db, key="rounding_sqnr_db"),
    Column("", lambda one: one.spread.low, key="low"),
    Column("", lambda one: one.spread.high, key="high"),
    number("largest", lambda one: one.spread.peak, ".3g"),
    number("99% within", lambda one: one.spread.reach, ".3g", "reach_99"),
    Column("", lambda one: one.spread.bulk_db, key="bulk_sqnr_db"),
)


def _say_range(one: Activation) -> str:
    return f"{one.spread.reach:.3g} of {one.tensor.low:.3g} to {one.tensor.high:.3g}"


def describe(config: RunConfig) -> str:
    """Return the title: the diagnosed configuration."""
    return " · ".join([config.data.name, *Combination.of_config(config).cells, "diagnosis"])


def write(folder: Path, config: RunConfig, result: DiagnosisResult) -> None:
    """Write `config.yaml` and `diagnosis.csv`, `.md` and `.png`, each atomically."""
    save_config(config, folder / CONFIG_FILE)
    files.write_text(folder / "diagnosis.csv", to_csv(result.measured))
    files.write_text(folder / "diagnosis.md", to_markdown(result, describe(config)))
    figures.save(draw(result, describe(config)), folder / "diagnosis.png")


def to_csv(measured: TensorMeasurements) -> str:
    """Return a line for each rounded tensor: activations, then weights, lowest SQNR first.

    Shares are fractions of the tensor's values.
    """
    return table.to_csv(_activations(measured), _weights(measured))


def to_markdown(result: DiagnosisResult, title: str) -> str:
    """Return the whole diagnosis as a page: the conclusion first."""
    parts = [f"# {printable(title)}", *map(_escape, (*result.conclusion, *result.notes))]
    for shown in _tables(result):
        parts += [f"## {shown.title}", shown.to_markdown(_escape)]
    return "\n\n".join([*parts, *_notes(result)]) + "\n"


def print_tables(result: DiagnosisResult, title: str, console: Console | None = None) -> None:
    """Print the conclusion, then its measurements, to stdout."""
    console = stdout(console, 130)
    console.print(show(title), style="bold", highlight=False, markup=False)
    for line in (*result.conclusion, *result.notes):
        say(console, line)
    for whole in _tables(result):
        rows = whole.rows[:SHOWN] if whole.columns in (ACTIVATIONS, WEIGHTS) else whole.rows
        Table(whole.columns, rows).print(console, whole=False)
    for line in _notes(result):
        say(console, line)


def _tables(result: DiagnosisResult) -> Iterator[Table[Any]]:
    findings = sorted(result.findings, key=lambda finding: not result.costs(finding))
    if findings:
        yield Table(_of_findings(result), findings, "Findings")
    halves = result.halves.weights, result.halves.activations
    yield Table(
        _of_changes(result.metric), [result.before, *halves, *result.outcomes], "Changes tried"
    )
    yield _activations(result.measured)
    yield _weights(result.measured)


def _of_findings(result: DiagnosisResult) -> list[Column[Finding]]:
    def change(finding: Finding) -> str:
        answer = result.answer(finding)
        return answer.words if answer else ", ".join(change.words for change in finding.changes)

    def won(finding: Finding) -> str:
        answer = result.answer(finding)
        gain = "" if answer is None else f"{answer.won_db:+.1f} dB"
        if result.costs(finding):
            return gain
        return f"nothing alone ({gain})" if answer else "not tried"

    return [
        Column("finding", lambda finding: finding.name),
        Column("in", lambda finding: finding.tensors[0]),
        Column("change", change),
        Column("won back", won),
    ]


def _of_changes(metric: Metric) -> list[Column[Outcome]]:
    def value(one: Outcome) -> str:
        return f"not tried: {one.reason}" if one.reason else metric.show(one.value)

    def is_change(one: Outcome) -> bool:
        return bool(one.words) and not one.reason

    return [
        Column("change", lambda one: one.words or "(unchanged)"),
        number(metric.title, value),
        number("won back", lambda one: one.won if is_change(one) else None, metric.show_loss),
        number("SQNR dB", lambda one: None if one.reason else one.sqnr_db, ".1f"),
        number("won back dB", lambda one: one.won_db if is_change(one) else None, "+.1f"),
    ]


def _activations(measured: TensorMeasurements) -> Table[Activation]:
    worst = sorted(measured.activations, key=lambda activation: activation.network.sqnr_db)
    return Table(ACTIVATIONS, worst, "Activations")


def _weights(measured: TensorMeasurements) -> Table[Weight]:
    worst = sorted(measured.weights, key=lambda weight: weight.sqnr_db)
    return Table(WEIGHTS, worst, "Weights")


def _notes(result: DiagnosisResult) -> list[str]:
    return [
        f"Activations on {result.measured.samples} held-out training samples, lowest SQNR first: "
        "in the quantized network, with only their own layer quantized, and of rounding alone. "
        "99% within: a power of 2 that 99% of the nonzero values stay below.",
        f"Changes on {result.images:,} held-out training samples, each alone, ranked by the SQNR "
        f"of the output against FP32. FP32: {result.metric.title} "
        f"{result.metric.show(result.fp32_value)}. A difference of a few samples is noise.",
    ]


def _escape(text: str) -> str:
    return printable(text).replace("|", r"\|")


def draw(result: DiagnosisResult, title: str) -> Figure:
    """Draw the SQNR of activations and weights along the network, and the gain of each change."""
    tried = [outcome for outcome in result.outcomes if math.isfinite(outcome.won_db)]
    figure = Figure(figsize=(13, max(4.5, 1.6 + 0.4 * len(tried))), layout="constrained")
    along, weights, changes = figure.subplots(1, 3, width_ratios=(2, 1, 1.3))
    activations = result.measured.activations
    for label, ratios in (
        ("in the quantized network", [activation.network.sqnr_db for activation in activations]),
        ("its layer alone", [activation.layer.sqnr_db for activation in activations]),
    ):
        along.plot([_finite(ratio) for ratio in ratios], marker="o", markersize=3, label=label)
    named = {name for finding in result.reasons for name in finding.tensors}
    marked = [
        number for number, activation in enumerate(activations) if activation.tensor.name in named
    ]
    levels = [_finite(activations[number].network.sqnr_db) for number in marked]
    along.plot(marked, levels, "o", color="tab:red", label="found" if marked else None)
    along.set_xlabel("activations, from input to output")
    along.set_ylabel("SQNR (dB)")
    along.legend(frameon=False)

    all_weights = result.measured.weights
    colours = ["tab:red" if weight.name in named else "tab:blue" for weight in all_weights]
    weights.bar(
        range(len(all_weights)), [_finite(weight.sqnr_db) for weight in all_weights], color=colours
    )
    weights.set_xlabel("weights, from input to output")
    weights.set_ylabel("SQNR (dB)")

    bars = changes.barh(range(len(tried)), [outcome.won_db for outcome in tried], color="tab:green")
    changes.bar_label(bars, fmt="%+.1f", padding=3, fontsize=9)
    changes.set_yticks(range(len(tried)), [plain(outcome.words)[:34] for outcome in tried])
    changes.invert_yaxis()
    changes.axvline(0, color="black", linewidth=0.8)
    changes.margins(x=0.3)  # room for the labels
    changes.set_xlabel("SQNR of the output won back (dB)")
    for axes in (along, weights):
        axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in (along, weights, changes):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(plain(title), x=0.01, ha="left")
    return figure


def _finite(ratio: float) -> float:
    """Return the ratio; NaN, a gap in the figure, if it is infinite (exact tensor)."""
    return ratio if math.isfinite(ratio) else math.nan
