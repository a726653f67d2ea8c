"""Shows the error by layer in heat maps and pictures, from the files of runs.

Analyses have written the tables and pictures (`experiment.layers`, `exploration`). A run of another
program's file has a picture too if a layer was found to cause its loss. A store is untrusted, so
the report warns about a damaged file and leaves it out. A picture becomes an `img`, in which
browsers neither run scripts nor load other files.
"""

import base64
import csv
import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from resnet8ptq.core import files
from resnet8ptq.tracking import history
from resnet8ptq.tracking.mlflow_store.store import Store
from resnet8ptq.tracking.record import RunRecord

SHOWN = 40  # worst rows that a map shows
MAX_BYTES = 2**24  # largest file
PICTURE = "network.svg"
DARKEST = 0.6  # opacity of the worst value

Rows = list[dict[str, str]]
Values = dict[str, dict[str, float]]  # layer -> column -> dB

_HIGH_IS_BAD = "all_but_one"
_SENSITIVITY = {
    "one_at_a_time": "SQNR of the output with this layer alone quantized, in dB: low is bad.",
    _HIGH_IS_BAD: "SQNR of the output with this layer alone in float, in dB: a high value marks a "
    "layer whose quantization costs most.",
}
_TABLES = {"diagnose": "diagnosis.csv", "compare": "tensors.csv"}
_BY_TENSOR = "SQNR of each layer's tensors against FP32, in dB: low is bad."
_OWN = "output, by this layer alone"
_WHOLE = "output, with all layers before it"
_WEIGHTS = "weights"


@dataclass(frozen=True)
class HeatCell:
    """A value in dB as text, with the opacity of its colour."""

    text: str = ""
    opacity: float = 0.0


@dataclass(frozen=True)
class HeatMap:
    """A table of errors by layer, or a picture of the layers, or both.

    Attributes:
        rows: the name of each layer, with a value for each column.
        more: the number of layers that are left out.
        picture: the layers along the graph, as a data URL; empty without one.
    """

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, tuple[HeatCell, ...]], ...] = ()
    more: int = 0
    picture: str = ""


def load_heat_maps(store: Store, run_id: str) -> list[HeatMap]:
    """Return the heat maps of the sweep or the single run with this id."""
    # Draw a map for each run, except for sensitivity analyses, which share one
    runs = history.load_children(store, run_id)
    if not runs:
        runs = [history.complete(store, history.load_run(store, run_id))]
    by_mode: dict[str, list[RunRecord]] = {}
    maps = []
    for run in runs:
        name = run.params.get("analysis.name")
        if run.status != "ok":
            continue
        if name == "sensitivity":
            by_mode.setdefault(run.params.get("analysis.mode", ""), []).append(run)
        elif name in _TABLES:
            values = _load(store, run, name=_TABLES[name], read=_by_layer)
            made = draw(f"{_name(run)}: {_BY_TENSOR}", values)
            maps.append(replace(made, picture=_load_picture(store, run)))
        elif run.cause:  # a file of another program that is far from FP32
            maps.append(HeatMap(f"{_name(run)}: {run.cause}", picture=_load_picture(store, run)))

    # Draw one map for all sensitivity analyses of a mode
    for mode, members in by_mode.items():
        if mode not in _SENSITIVITY:
            continue
        joined: Values = {}
        for run in members:
            values = _load(store, run, name="sensitivity.csv", read=_ranked)
            for layer, value in values.items():
                joined.setdefault(layer, {})[_name(run)] = value["sqnr_db"]
        if joined:
            maps.append(draw(_SENSITIVITY[mode], joined, high_is_bad=mode == _HIGH_IS_BAD))
    return [made for made in maps if made.rows or made.picture]


def draw(
    title: str, values: Mapping[str, Mapping[str, float]], high_is_bad: bool = False
) -> HeatMap:
    """Return the heat map of values by layer and column; the worst layer comes first.

    Args:
        values: values in dB, by layer and column; infinite for a tensor that did not change, minus
            infinite for one with NaN or infinity.
        high_is_bad: whether the layer with the largest value is the worst.
    """
    # Scale the colours over all finite values
    columns: dict[str, None] = {}  # runs in the order of their first layer
    known: list[float] = []
    for row in values.values():
        columns |= dict.fromkeys(row)
        known += filter(math.isfinite, row.values())
    low = min(known, default=0.0)
    high = max(known, default=0.0)

    def rank(layer: str) -> float:
        """Return the sort key of a layer: the worst layer has the lowest."""
        if high_is_bad:
            return -max(values[layer].values())
        return min(values[layer].values())

    def cell(value: float | None) -> HeatCell:
        if value is None:
            return HeatCell()
        part = (high - value) / ((high - low) or 1)
        part = min(max(part, 0.0), 1.0)  # infinite values have the colours of the ends
        if high_is_bad:
            part = 1 - part
        text = f"{value:.1f}".replace("inf", "∞")
        return HeatCell(text, round(DARKEST * part, 2))

    # Put the worst layers first; a layer may lack columns
    rows: list[tuple[str, tuple[HeatCell, ...]]] = []
    for name in sorted(values, key=rank):
        layer = map(values[name].get, columns)
        rows.append((name, tuple(map(cell, layer))))
    more = max(0, len(rows) - SHOWN)
    return HeatMap(title, columns=tuple(columns), rows=tuple(rows[:SHOWN]), more=more)


def _load(store: Store, run: RunRecord, name: str, read: Callable[[Rows], Values]) -> Values:
    def reader(path: Path) -> Values:
        text = files.read_bytes(path, MAX_BYTES).decode()
        return read(list(csv.DictReader(io.StringIO(text))))

    lacks = "the report leaves out a heat map"
    return history.read_if_sound(store, record=run, name=name, reader=reader, lacks=lacks) or {}


def _load_picture(store: Store, run: RunRecord) -> str:
    lacks = "the report leaves out the picture of a network"
    return (
        history.read_if_sound(
            store, record=run, name=PICTURE, reader=_read_picture, lacks=lacks, optional=True
        )
        or ""
    )


def _read_picture(path: Path) -> str:
    content = files.read_bytes(path, MAX_BYTES)
    if not content.startswith(b"<svg "):
        raise ValueError("not an SVG file")
    return f"data:image/svg+xml;base64,{base64.b64encode(content).decode()}"


def _ranked(rows: Rows) -> Values:
    """Return the SQNR of a sensitivity analysis by layer, read from its only SQNR column."""
    [column] = [name for name in rows[0] if name.endswith("_sqnr_db")]
    values: Values = {}
    for row in rows:
        sqnr_db = float(row[column])
        if not math.isnan(sqnr_db):
            values[row["layer"]] = {"sqnr_db": sqnr_db}
    return values


def _by_layer(rows: Rows) -> Values:
    """Return SQNRs of each layer by column: of its weights, and of its output.

    The output has two: one with the error of this layer alone, and one that includes the errors of
    all layers before it. If a layer has several tensors of a kind, the lowest SQNR counts.
    """
    values: Values = {}
    for row in rows:
        # An activation has two SQNRs, see `_OWN` and `_WHOLE`; weights have one
        columns = {_WEIGHTS: "sqnr_db"}
        if row["kind"] == "activation":
            columns = {_OWN: "layer_sqnr_db", _WHOLE: "sqnr_db"}
        for column, key in columns.items():
            if row[key] and not math.isnan(float(row[key])):
                known = values.setdefault(row["node"], {})
                known[column] = min(float(row[key]), known.get(column, math.inf))
    return values


def _name(run: RunRecord) -> str:
    return " ".join(filter(None, run.combination.cells))
