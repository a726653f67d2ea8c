"""The tables, the files and the figure of a diagnosis."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure  # no pyplot: nothing here needs a screen or global state
from rich.console import Console

from resnet8ptq.config.loading import CONFIG_FILE, save_config
from resnet8ptq.config.naming import Combination
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import figures, files
from resnet8ptq.core.console import print_table, say, stdout
from resnet8ptq.core.text import plain, printable, show
from resnet8ptq.experiment.diagnosis.conclusion import DiagnosisResult
from resnet8ptq.experiment.diagnosis.measuring import Activation, TensorMeasurements, Weight
from resnet8ptq.experiment.diagnosis.outcomes import Outcome
from resnet8ptq.tasks.metric import Metric

SHOWN = 8  # tensors of each kind in the terminal; diagnosis.csv has all of them
Rows = Sequence[Sequence[str]]

FINDINGS = ("finding", "in", "change", "won back")
ACTIVATIONS = ("activation", "SQNR dB", "of its layer", "of rounding", "beyond range", "99% within")
WEIGHTS = ("weight", "SQNR dB", "largest", "99% within")


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
    columns = ["kind", "tensor", "node", "sqnr_db", "layer_sqnr_db", "rounding_sqnr_db"]
    columns += ["range_low", "range_high", "low", "high", "reach_99", "bulk_sqnr_db"]
    rows: list[list[object]] = [[*columns, "beyond_range", "kernel_off", "kernel_most_off"]]
    for activation in _worst_activations(measured):
        tensor, spread = activation.tensor, activation.spread
        ratios = [activation.network.sqnr_db, activation.layer.sqnr_db, activation.rounding_db]
        seen = [tensor.low, tensor.high, spread.low, spread.high, spread.reach, spread.bulk_db]
        shares = [activation.beyond_share, activation.off_share, activation.most_off]
        rows.append(["activation", tensor.name, tensor.layer, *ratios, *seen, *shares])
    for weight in _worst_weights(measured):
        spread = weight.spread
        seen = [spread.low, spread.high, spread.reach, spread.bulk_db]
        named = ["weight", weight.name, weight.node, weight.sqnr_db, "", weight.sqnr_db]
        rows.append([*named, "", "", *seen, "", "", ""])
    return files.to_csv(rows)


def to_markdown(result: DiagnosisResult, title: str) -> str:
    """Return the whole diagnosis as a page: the conclusion first."""
    parts = [f"# {printable(title)}", *map(_escape, (*result.conclusion, *result.notes))]
    for heading, columns, rows in _tables(result):
        parts += [f"## {heading}", _markdown(columns, rows)]
    return "\n\n".join([*parts, *_notes(result)]) + "\n"


def print_tables(result: DiagnosisResult, title: str, console: Console | None = None) -> None:
    """Print the conclusion, then its measurements, to stdout."""
    console = stdout(console, 130)
    console.print(show(title), style="bold", highlight=False, markup=False)
    for line in (*result.conclusion, *result.notes):
        say(console, line)
    for _, columns, rows in _tables(result):
        right = () if columns is FINDINGS else range(1, len(columns))
        shown = rows[:SHOWN] if columns in (ACTIVATIONS, WEIGHTS) else rows
        print_table(console, columns, shown, right=right, whole=False)
    for line in _notes(result):
        say(console, line)


def _tables(result: DiagnosisResult) -> Iterator[tuple[str, Sequence[str], Rows]]:
    """Yield heading, columns and rows of each table."""
    if result.findings:
        yield "Findings", FINDINGS, _findings(result)
    changes = ("change", result.metric.title, "won back", "SQNR dB", "won back dB")
    yield "Changes tried", changes, _changes(result)
    yield "Activations", ACTIVATIONS, _activations(result.measured)
    yield "Weights", WEIGHTS, _weights(result.measured)


def _findings(result: DiagnosisResult) -> list[list[str]]:
    rows = []
    for finding in sorted(result.findings, key=lambda finding: not result.costs(finding)):
        answer = result.answer(finding)
        won = "" if answer is None else f"{answer.won_db:+.1f} dB"
        if not result.costs(finding):
            won = f"nothing alone ({won})" if answer else "not tried"
        words = answer.words if answer else ", ".join(change.words for change in finding.changes)
        rows.append([finding.name, finding.tensors[0], words, won])
    return rows


def _changes(result: DiagnosisResult) -> list[list[str]]:
    metric, before = result.metric, result.before
    rows = [["(unchanged)", metric.show(before.value), "", f"{before.sqnr_db:.1f}", ""]]
    for outcome in (result.halves.weights, result.halves.activations, *result.outcomes):
        rows.append([outcome.words, *_change(outcome, metric)])
    return rows


def _change(outcome: Outcome, metric: Metric) -> list[str]:
    if outcome.reason:
        return [f"not tried: {outcome.reason}", "", "", ""]
    won = metric.show_loss(outcome.won)
    return [metric.show(outcome.value), won, f"{outcome.sqnr_db:.1f}", f"{outcome.won_db:+.1f}"]


def _activations(measured: TensorMeasurements) -> list[list[str]]:
    rows = []
    for activation in _worst_activations(measured):
        tensor, reach = activation.tensor, activation.spread.reach
        ratios = [activation.network.sqnr_db, activation.layer.sqnr_db, activation.rounding_db]
        ranged = f"{reach:.3g} of {tensor.low:.3g} to {tensor.high:.3g}"
        shown = [*(f"{ratio:.1f}" for ratio in ratios), f"{activation.beyond_share:.2%}", ranged]
        rows.append([tensor.name, *shown])
    return rows


def _weights(measured: TensorMeasurements) -> list[list[str]]:
    rows = []
    for weight in _worst_weights(measured):
        ends = [f"{weight.spread.peak:.3g}", f"{weight.spread.reach:.3g}"]
        rows.append([weight.name, f"{weight.sqnr_db:.1f}", *ends])
    return rows


def _worst_activations(measured: TensorMeasurements) -> list[Activation]:
    return sorted(measured.activations, key=lambda activation: activation.network.sqnr_db)


def _worst_weights(measured: TensorMeasurements) -> list[Weight]:
    return sorted(measured.weights, key=lambda weight: weight.sqnr_db)


def _notes(result: DiagnosisResult) -> list[str]:
    return [
        f"Activations on {result.measured.samples} held-out training samples, lowest SQNR first: "
        "in the quantized network, with only their own layer quantized, and of rounding alone. "
        "99% within: a power of 2 that 99% of the nonzero values stay below.",
        f"Changes on {result.images:,} held-out training samples, each alone, ranked by the SQNR "
        f"of the output against FP32. FP32: {result.metric.title} "
        f"{result.metric.show(result.fp32_value)}. A difference of a few samples is noise.",
    ]


def _markdown(columns: Sequence[str], rows: Rows) -> str:
    lines = [columns, ["---"] * len(columns), *(list(map(_escape, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


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
