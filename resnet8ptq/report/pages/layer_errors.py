"""The error by layer as heat maps, where a sweep has sensitivity analyses or diagnoses.

Their runs have written the tables (`experiment.layers`, `exploration.diagnosis`). A store is
untrusted: a damaged table is one warning, and is left out.
"""

import csv
import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from resnet8ptq.core import files
from resnet8ptq.tracking import history
from resnet8ptq.tracking.mlflow_store.store import Store
from resnet8ptq.tracking.record import RunRecord

SHOWN = 40  # rows of a map, the worst
MAX_BYTES = 2**24  # of a table
DARKEST = 0.6  # opacity of the worst value

Rows = list[dict[str, str]]
Values = dict[str, dict[str, float]]  # layer -> column -> dB

_HIGH_IS_BAD = "all_but_one"
_SENSITIVITY = {
    "one_at_a_time": "SQNR of the output with this layer alone quantized, in dB: low is bad.",
    _HIGH_IS_BAD: "SQNR of the output with this layer alone in float, in dB: a high value names a "
    "layer whose quantization costs most.",
}
_DIAGNOSIS = "SQNR of each layer's tensors against FP32, in dB: low is bad."
_OWN = "output, by this layer alone"
_WHOLE = "output, with all before"
_WEIGHTS = "weights"


@dataclass(frozen=True)
class Cell:
    """A value in dB as text, with the opacity of its colour."""

    text: str = ""
    opacity: float = 0.0


@dataclass(frozen=True)
class HeatMap:
    """A table of layers; `more` counts the layers that are left out."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    more: int = 0


def load(store: Store, parent_id: str) -> list[HeatMap]:
    """Return the heat maps of a sweep's analyses; empty without any."""
    runs = [r for r in history.load_children(store, parent_id) if r.is_analysis]
    by_mode: dict[str, list[RunRecord]] = {}
    maps = []
    for run in runs:
        name = run.params.get("analysis.name")
        if run.status != "ok":
            continue
        if name == "sensitivity":
            by_mode.setdefault(run.params.get("analysis.mode", ""), []).append(run)
        elif name == "diagnose" and (values := _load(store, run, "diagnosis.csv", _diagnosed)):
            maps.append(draw(f"{_name(run)}: {_DIAGNOSIS}", values))
    for mode, members in by_mode.items():
        if mode not in _SENSITIVITY:
            continue
        joined: Values = {}
        for run in members:
            for layer, value in _load(store, run, "sensitivity.csv", _ranked).items():
                joined.setdefault(layer, {})[_name(run)] = value["sqnr_db"]
        if joined:
            maps.append(draw(_SENSITIVITY[mode], joined, high_is_bad=mode == _HIGH_IS_BAD))
    return maps


def draw(
    title: str, values: Mapping[str, Mapping[str, float]], high_is_bad: bool = False
) -> HeatMap:
    """Return the heat map of values by layer and column; the worst layer comes first.

    Args:
        values: in dB; infinite for an output that did not change.
    """
    columns = list(dict.fromkeys(name for row in values.values() for name in row))
    known = [v for row in values.values() for v in row.values() if math.isfinite(v)]
    low = min(known, default=0.0)
    high = max(known, default=0.0)
    worst = -1.0 if high_is_bad else 1.0
    order = sorted(values, key=lambda layer: min(worst * v for v in values[layer].values()))

    def cell(value: float | None) -> Cell:
        if value is None:
            return Cell()
        if not math.isfinite(value):
            return Cell("∞")
        part = (high - value) / ((high - low) or 1)
        return Cell(f"{value:.1f}", round(DARKEST * (1 - part if high_is_bad else part), 2))

    rows = [(name, tuple(cell(values[name].get(column)) for column in columns)) for name in order]
    more = max(0, len(rows) - SHOWN)
    return HeatMap(title, tuple(columns), tuple(rows[:SHOWN]), more)


def _load(store: Store, run: RunRecord, name: str, read: Callable[[Rows], Values]) -> Values:
    def reader(path: Path) -> Values:
        text = files.read_bytes(path, MAX_BYTES).decode()
        return read(list(csv.DictReader(io.StringIO(text))))

    lacks = "the report leaves out a heat map"
    return history.read_if_sound(store, run, name, reader, lacks) or {}


def _ranked(rows: Rows) -> Values:
    """Return the SQNR of a sensitivity analysis by layer; its column names the output."""
    [column] = [name for name in rows[0] if name.endswith("_sqnr_db")]
    values = {row["layer"]: {"sqnr_db": float(row[column])} for row in rows}
    return {layer: value for layer, value in values.items() if not math.isnan(value["sqnr_db"])}


def _diagnosed(rows: Rows) -> Values:
    """Return the lowest SQNR of each layer's weights and activations in a diagnosis."""
    values: Values = {}
    for row in rows:
        activation = row["kind"] == "activation"
        columns = (
            {_OWN: "layer_sqnr_db", _WHOLE: "sqnr_db"} if activation else {_WEIGHTS: "sqnr_db"}
        )
        for column, key in columns.items():
            if row[key] and not math.isnan(float(row[key])):
                known = values.setdefault(row["node"], {})
                known[column] = min(float(row[key]), known.get(column, math.inf))
    return values


def _name(run: RunRecord) -> str:
    return " ".join(filter(None, run.combination.cells))
