"""Table, files and figure of a sensitivity analysis."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure  # no pyplot: nothing here needs a screen or global state
from rich.console import Console

from resnet8ptq.config.loading import CONFIG_FILE, save_config
from resnet8ptq.config.naming import Combination
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import console as consoles
from resnet8ptq.core import figures, files, table
from resnet8ptq.core.table import Column, Table, number, show_kb
from resnet8ptq.core.text import plain
from resnet8ptq.experiment.layers.ranking import LayerSensitivity, SensitivityResult


def write_sensitivity(folder: Path, config: RunConfig, result: SensitivityResult) -> None:
    """Write `config.yaml`, `sensitivity.csv` and `sensitivity.png`, each atomically."""
    save_config(config, folder / CONFIG_FILE)
    files.write_text(folder / "sensitivity.csv", to_csv(result))
    figures.save(draw_sensitivity(result, describe(config)), folder / "sensitivity.png")


def make_table(
    result: SensitivityResult, layers: Sequence[LayerSensitivity], title: str = ""
) -> Table[LayerSensitivity]:
    """Return the table of `layers`, in their order; only `result.layers` have a rank."""
    metric = result.metric
    ranks = {id(layer): rank for rank, layer in enumerate(result.layers, 1)}

    # Columns without a heading are only in the CSV file
    columns: list[Column[LayerSensitivity]] = [
        number("rank", lambda layer: ranks.get(id(layer)), key="rank"),
        Column("layer", lambda layer: layer.name, key="layer"),
        Column("", lambda layer: layer.node, key="node"),
        number("SQNR dB", lambda layer: layer.sqnr_db, ".1f", f"{result.output}_sqnr_db"),
        number(
            f"{metric.title} lost",
            lambda layer: layer.lost,
            metric.show_loss,
            f"{metric.name}_lost",
        ),
        number(metric.title, lambda layer: layer.value, metric.show, metric.name),
        Column("", lambda layer: layer.size_bytes, key="size_bytes"),
        number("saved kB", lambda layer: layer.saved_bytes, show_kb, "saved_bytes"),
        Column("", lambda layer: result.samples, key="images"),
    ]
    return Table(columns, layers, title)


def to_csv(result: SensitivityResult) -> str:
    """Return CSV with a row for each layer, the most sensitive first; sizes are in bytes."""
    return table.to_csv(make_table(result, result.layers))


def print_table(result: SensitivityResult, title: str, console: Console | None = None) -> None:
    """Print the ranking, then the network that the settings quantize, and notes.

    Args:
        console: where to print; None for stdout.
    """
    console = consoles.stdout(console, 130)
    make_table(result, [*result.layers, result.whole], title).print(console, totals=1)
    for note in _notes(result):
        consoles.say(console, note)


def _notes(result: SensitivityResult) -> list[str]:
    rank = {
        "one_at_a_time": "each layer quantized alone; lowest SQNR first",
        "all_but_one": "each layer alone left in float; highest SQNR first, as it then helps most",
    }[result.mode]
    return [
        f"SQNR of the {result.output} against FP32: {rank}.",
        f"{result.samples:,} held-out training samples, {result.metric.title} "
        f"{result.metric.show(result.fp32_value)} in FP32; a difference of a few samples is noise: "
        "the ranking is by SQNR.",
        f"saved: against the FP32 file of the same framework, {result.fp32_size_bytes / 1000:.1f} "
        "kB; this includes the bytes that conversion itself adds or removes.",
    ]


def describe(config: RunConfig) -> str:
    """Return the title: the analysed configuration, in one line."""
    mode = config.analysis.mode.replace("_", " ")
    return Combination.of_config(config).describe(config.data.name, mode)


def draw_sensitivity(result: SensitivityResult, title: str) -> Figure:
    """Draw SQNR, loss and saved bytes of each layer as bars, the first layer on top.

    A line marks the SQNR of `result.whole`, if it is finite.
    """
    layers = result.layers
    metric = result.metric
    whole_db = result.whole.sqnr_db
    sqnr_db = [layer.sqnr_db for layer in layers]
    losses = [metric.scale * layer.lost for layer in layers]
    saved_kb = [layer.saved_bytes / 1000 for layer in layers]
    unit = " (points)" if metric.percent else ""
    figure = Figure(figsize=(11, 1.8 + 0.34 * len(layers)), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True, width_ratios=(2, 1, 1))
    columns = (
        (sqnr_db, "", f"SQNR of the {result.output} (dB)"),
        (losses, "%+.3g", f"{metric.title} lost{unit}"),
        (saved_kb, "%.1f", "saved (kB)"),
    )

    # One panel for each measure
    positions = range(len(layers))
    for axes, (values, label, name) in zip(panels, columns, strict=True):
        # An infinite SQNR, such as of an output that did not change, is shown only by its label
        lengths = []
        for value in values:
            length = value if math.isfinite(value) else 0
            lengths.append(length)
        bars = axes.barh(positions, lengths, color="tab:blue", height=0.65)
        axes.bar_label(bars, fmt=label, padding=3, fontsize=9)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.margins(x=0.3)  # leaves room for the labels
        axes.set_xlabel(plain(name))
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)

    # Put SQNRs beside the names, because the line would cross numbers at the bars' ends.
    named = [f"{plain(layer.name)}  {layer.sqnr_db:.1f}" for layer in layers]
    panels[0].set_yticks(positions, named)
    panels[0].invert_yaxis()
    if math.isfinite(whole_db):
        line = panels[0].axvline(whole_db, color="tab:red", linestyle="--")
        figure.legend([line], [f"all layers: {whole_db:.1f} dB"], loc="outside upper right")
    figure.suptitle(plain(title), x=0.01, ha="left")
    return figure
