"""Table, files and figure of a comparison of tensors."""

import json
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # no pyplot: nothing here needs a screen or global state
from rich.console import Console

from resnet8ptq.config.naming import Combination
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import console as consoles
from resnet8ptq.core import figures, files, table
from resnet8ptq.core.table import Column, Table, number
from resnet8ptq.core.text import plain
from resnet8ptq.exploration.tensors import network_picture
from resnet8ptq.exploration.tensors.comparing import (
    LOST_DB,
    ComparedTensor,
    TensorComparison,
    Weight,
)
from resnet8ptq.exploration.tensors.findings import Finding, name_tensors, to_entries

ROWS = 12  # rows of the printed table, for the layers that cost most
LABELLED = 60  # tensors with a label in the figure
SHORT = 30  # last characters of a name that are a label, because ends tell names apart
# The ends of the figure's axis, where values beyond are drawn
LOWEST_DB = -10.0
HIGHEST_DB = 60.0


def _first_name(name: str) -> str:
    return name.partition(";")[0]  # TFLite joins the names of fused operators


def _say_range(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.3g} to {ends[1]:.3g}"


_SPREAD: Sequence[Column[Any]] = (  # shared by activations and weights
    Column("", lambda row: row.spread.low, key="low"),
    Column("", lambda row: row.spread.high, key="high"),
    Column("", lambda row: row.spread.reach, key="reach_99"),
    Column("", lambda row: row.spread.bulk_db, key="bulk_sqnr_db"),
)
COLUMNS: Sequence[Column[ComparedTensor]] = (
    Column("", lambda tensor: "activation", key="kind"),
    Column("tensor", lambda tensor: tensor.name, _first_name, "tensor"),
    Column("", lambda tensor: tensor.layer, key="node"),
    Column("operator", lambda tensor: tensor.operator, lambda name: name or "input", "operator"),
    Column("", lambda tensor: tensor.inner.name, key="file_tensor"),
    number("alone dB", lambda tensor: tensor.own_db, ".1f", "layer_sqnr_db"),
    number("so far dB", lambda tensor: tensor.sqnr_db, ".1f", "sqnr_db"),
    number("weights dB", lambda tensor: tensor.weights_db, ".1f"),
    Column("", lambda tensor: tensor.spread.sqnr_db, key="rounding_sqnr_db"),
    Column("FP32's values", lambda tensor: (tensor.spread.low, tensor.spread.high), _say_range),
    Column("range in the file", lambda tensor: tensor.levels, str),
    Column("", lambda tensor: tensor.inner.low, key="range_low"),
    Column("", lambda tensor: tensor.inner.high, key="range_high"),
    *_SPREAD,
    number("beyond", lambda tensor: tensor.beyond_share, ".1%", "beyond_range"),
    Column("", lambda tensor: tensor.off_share, key="kernel_off"),
    Column("", lambda tensor: tensor.most_off, key="kernel_most_off"),
)
WEIGHTS: Sequence[Column[Weight]] = (
    Column("", lambda weight: "weight", key="kind"),
    Column("", lambda weight: weight.rounded.name, key="tensor"),
    Column("", lambda weight: weight.rounded.node, key="node"),
    Column("", lambda weight: weight.spread.sqnr_db, key="sqnr_db"),
    Column("", lambda weight: weight.spread.sqnr_db, key="rounding_sqnr_db"),
    *_SPREAD,
)


def write_comparison(
    folder: Path, name: str, compared: TensorComparison, faults: Sequence[Finding], title: str
) -> None:
    """Write the comparison as `name`.csv and .json, and the network's picture and node data."""
    files.write_text(folder / f"{name}.csv", to_csv(compared))
    document = json.dumps(to_document(compared, faults), indent=2)
    files.write_text(folder / f"{name}.json", document)
    picture = network_picture.draw_network(compared, faults, title)
    files.write_text(folder / network_picture.FILE, picture)
    node_data = json.dumps(network_picture.to_node_data(compared), indent=2)
    files.write_text(folder / network_picture.NODE_DATA, node_data)


def to_csv(compared: TensorComparison) -> str:
    """Return a CSV: lines for the tensors in the order of execution, then for the weights by layer.

    `layer_sqnr_db` is the SQNR of the layer alone. `beyond_range` and `kernel_off` are fractions of
    the tensor's values.
    """
    return table.to_csv(Table(COLUMNS, compared.tensors), Table(WEIGHTS, compared.weights))


def to_document(compared: TensorComparison, faults: Sequence[Finding]) -> dict[str, Any]:
    """Return tensors and findings as a JSON document; numbers that are not finite are null."""
    lost = compared.first_lost
    lost_name = None if lost is None else lost.name
    return {
        "finding": compared.describe(),
        "findings": to_entries(faults),
        "costliest": compared.costliest.name,
        "first_below_10_db": lost_name,
        "samples": compared.samples,
        "unmatched": compared.unmatched,
        "tensors": [_to_entry(tensor) for tensor in compared.tensors],
    }


def _to_entry(tensor: ComparedTensor) -> dict[str, Any]:
    """Return the values of the columns that have a key."""
    entry = {}
    for column in COLUMNS:
        if column.key:
            entry[column.key] = _to_json(column.value(tensor))
    return entry


def _to_json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no infinity
    return value


def find_costliest(compared: TensorComparison) -> list[ComparedTensor]:
    """Return up to `ROWS` tensors with the lowest SQNR alone, in the order of execution."""
    worst = sorted(compared.tensors, key=lambda tensor: tensor.own_db)[:ROWS]
    return [tensor for tensor in compared.tensors if tensor in worst]


def note(compared: TensorComparison) -> str:
    """Return the meaning of `alone` and `so far`, and the numbers of tensors and samples."""
    return (
        "alone: the layer's own error, computed from the file's tensors before it; so far: with "
        f"theirs. {len(compared.tensors)} tensors matched, {compared.unmatched} of FP32 not; "
        f"{compared.samples} held-out training samples."
    )


def print_table(
    compared: TensorComparison,
    faults: Sequence[Finding],
    title: str,
    console: Console | None = None,
) -> None:
    """Print the noisiest tensors, the text of `note`, the findings, and a summary."""
    console = consoles.stdout(console, 130)
    Table(COLUMNS, find_costliest(compared), title).print(console)
    consoles.say(console, note(compared))
    for fault in faults:
        line = f"finding: {fault.say()}"
        if fault.changes:
            answers = " or ".join(change.words for change in fault.changes)
            line += f"; try {answers}"
        consoles.say(console, line)
    consoles.say(console, compared.describe())


def describe(config: RunConfig, kind: str) -> str:
    """Return the title: the data set, the configuration and the kind of analysis, in one line."""
    return Combination.of_config(config).describe(config.data.name, kind)


def draw_ratios(axes: Any, compared: TensorComparison, named: Collection[str]) -> None:
    """Draw the SQNR of each tensor along the graph, alone and with all errors so far.

    Args:
        named: names of the tensors to mark, because findings name them.
    """
    tensors = compared.tensors
    positions = range(len(tensors))
    alone = [_height(tensor.own_db) for tensor in tensors]
    so_far = [_height(tensor.sqnr_db) for tensor in tensors]
    axes.plot(positions, alone, color="tab:blue", marker=".", label="layer alone")
    axes.plot(positions, so_far, color="tab:red", marker=".", label="with what came before")

    # Mark the faults
    marked = [position for position in positions if tensors[position].name in named]
    if marked:
        heights = [alone[position] for position in marked]
        axes.plot(
            marked, heights, "o", color="black", fillstyle="none", markersize=10, label="fault"
        )

    # Point at the costliest layer
    axes.axhline(LOST_DB, color="grey", linestyle="--", linewidth=0.8)
    worst = compared.costliest
    axes.annotate(
        plain(worst.name),
        (tensors.index(worst), _height(worst.own_db)),
        xytext=(0, -24),
        textcoords="offset points",
        ha="center",
        arrowprops={"arrowstyle": "->"},
    )

    # Name the tensors if there is room
    axes.set_xlabel("tensors in the order of execution")
    axes.set_ylabel(f"SQNR (dB), drawn up to {HIGHEST_DB:g}")
    if len(tensors) <= LABELLED:
        names = [plain(tensor.name[-SHORT:]) for tensor in tensors]
        axes.set_xticks(positions, names, rotation=90, fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def save_figure(
    path: Path, compared: TensorComparison, faults: Sequence[Finding], title: str
) -> None:
    """Write the figure of a comparison as PNG."""
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes = figure.subplots()
    draw_ratios(axes, compared, name_tensors(faults))
    axes.set_title(plain(title), fontsize=11, loc="left")
    figures.save(figure, path)


def _height(ratio: float) -> float:
    return min(max(ratio, LOWEST_DB), HIGHEST_DB)
