"""Table, files and figure of a comparison of tensors."""

import json
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
from resnet8ptq.core.table import Column, Table, number
from resnet8ptq.core.text import plain
from resnet8ptq.experiment.tensors.comparing import LOST_DB, Compared, TensorComparison

ROWS = 12  # of the printed table: the layers that cost most
LABELLED = 60  # tensors with a label in the figure
SHORT = 30  # characters of a label: the end of a name tells tensors apart
LOWEST_DB, HIGHEST_DB = -10.0, 60.0  # of the figure: what lies beyond is at its edge


def _say_range(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.3g} to {ends[1]:.3g}"


def _range_in_file(tensor: Compared) -> tuple[float, float] | None:
    levels = tensor.levels
    return None if levels is None else (levels.low, levels.high)


COLUMNS: Sequence[Column[Compared]] = (
    Column("tensor", lambda tensor: tensor.name, key="tensor"),
    Column("operator", lambda tensor: tensor.operator, lambda name: name or "input", "operator"),
    Column(
        "in the file",
        lambda tensor: tensor.inner.name,
        lambda name: name.partition(";")[0],  # TFLite joins the names of fused operators
        "file_tensor",
    ),
    number("alone dB", lambda tensor: tensor.own_db, ".1f", "own_sqnr_db"),
    number("so far dB", lambda tensor: tensor.sqnr_db, ".1f", "sqnr_db"),
    Column("FP32's values", lambda tensor: (tensor.low, tensor.high), _say_range),
    Column("its range", _range_in_file, _say_range),
    Column("", lambda tensor: tensor.low, key="fp32_low"),
    Column("", lambda tensor: tensor.high, key="fp32_high"),
    Column("", lambda tensor: tensor.inner.low, key="file_low"),
    Column("", lambda tensor: tensor.inner.high, key="file_high"),
)


def write(folder: Path, config: RunConfig, compared: TensorComparison) -> None:
    """Write `config.yaml`, `tensors.csv`, `tensors.json` and `tensors.png`, each atomically."""
    save_config(config, folder / CONFIG_FILE)
    files.write_text(folder / "tensors.csv", to_csv(compared))
    files.write_text(folder / "tensors.json", json.dumps(to_document(compared), indent=2))
    figures.save(draw(compared, describe(config)), folder / "tensors.png")


def to_csv(compared: TensorComparison) -> str:
    """Return one line for each tensor, in the order of execution."""
    return table.to_csv(Table(COLUMNS, compared.tensors))


def to_document(compared: TensorComparison) -> dict[str, object]:
    """Return the comparison as a JSON document; SQNRs that are not finite are null."""
    lost = compared.first_lost
    return {
        "finding": compared.describe(),
        "explanation": compared.explanation,
        "costliest": compared.costliest.name,
        "first_below_10_db": None if lost is None else lost.name,
        "cut": [tensor.name for tensor in compared.cut],
        "samples": compared.samples,
        "unmatched": compared.unmatched,
        "tensors": [_to_entry(tensor) for tensor in compared.tensors],
    }


def _to_entry(tensor: Compared) -> dict[str, object]:
    return {
        "name": tensor.name,
        "operator": tensor.operator,
        "file_tensor": tensor.inner.name,
        "own_sqnr_db": _finite(tensor.own_db),
        "sqnr_db": _finite(tensor.sqnr_db),
        "fp32_range": [_finite(tensor.low), _finite(tensor.high)],
        "file_range": [tensor.inner.low, tensor.inner.high],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def print_table(compared: TensorComparison, title: str, console: Console | None = None) -> None:
    """Print the layers that cost most, in the order of execution, and the finding."""
    console = consoles.stdout(console, 130)
    worst = sorted(compared.tensors, key=lambda tensor: tensor.own_db)[:ROWS]
    shown = [tensor for tensor in compared.tensors if tensor in worst]
    Table(COLUMNS, shown, title).print(console)
    consoles.say(
        console,
        f"alone: the layer's own error, computed from the file's tensors before it; so far: with "
        f"theirs. {len(compared.tensors)} tensors matched, {compared.unmatched} of FP32 not; "
        f"{compared.samples} held-out training samples.",
    )
    if cut := compared.cut:
        ends = _range_in_file(cut[0])
        assert ends is not None  # of a tensor with a reach
        consoles.say(
            console,
            f"FP32's values reach beyond the range in the file in {len(cut)} tensors, furthest in "
            f"{cut[0].name}: {_say_range((cut[0].low, cut[0].high))}, range {_say_range(ends)}.",
        )
    consoles.say(console, compared.describe())


def describe(config: RunConfig) -> str:
    """Return the title: the compared configuration, in one line."""
    return " · ".join([config.data.name, *Combination.of_config(config).cells, "tensors"])


def draw(compared: TensorComparison, title: str) -> Figure:
    """Draw the SQNR of each tensor along the graph, alone and with all errors so far."""
    tensors = compared.tensors
    places = range(len(tensors))
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes = figure.subplots()
    for label, colour, values in (
        ("layer alone", "tab:blue", [tensor.own_db for tensor in tensors]),
        ("with what came before", "tab:red", [tensor.sqnr_db for tensor in tensors]),
    ):
        heights = [min(max(value, LOWEST_DB), HIGHEST_DB) for value in values]
        axes.plot(places, heights, color=colour, marker=".", label=label)
    axes.axhline(LOST_DB, color="grey", linestyle="--", linewidth=0.8)
    worst = tensors.index(compared.costliest)
    axes.annotate(
        plain(compared.costliest.name),
        (worst, max(compared.costliest.own_db, LOWEST_DB)),
        xytext=(0, -24),
        textcoords="offset points",
        ha="center",
        arrowprops={"arrowstyle": "->"},
    )
    axes.set_xlabel("tensors in the order of execution")
    axes.set_ylabel(f"SQNR (dB), drawn up to {HIGHEST_DB:g}")
    if len(tensors) <= LABELLED:
        names = [plain(tensor.name[-SHORT:]) for tensor in tensors]
        axes.set_xticks(places, names, rotation=90, fontsize=7)
    axes.set_title(plain(title), fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure
