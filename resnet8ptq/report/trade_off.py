"""The figure of a sweep: the loss of each model against its size and its latency, as SVG.

The page shows it inline, with points that can be hovered and selected; `trade_offs.svg` is a file
with the same figure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.core import templates
from resnet8ptq.report.comparison import Cell, Family
from resnet8ptq.report.recommend import ModelSelection
from resnet8ptq.report.reference import Entry
from resnet8ptq.tasks.contract import BASELINE

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 62, 18, 14, 46  # margins, in units of the drawing
SPAN = 4.0  # times the limit: points with a larger loss lie on the lower edge
# Okabe and Ito's colours, which people with colour blindness can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


@dataclass(frozen=True)
class Point:
    """A model in the figure; x, y, low and high are coordinates of the drawing.

    Attributes:
        title: its name and values, for hovering and screen readers.
        row: the index of its row in the table of runs; -1 if it has no row.
        kind: the outcome of its verdict, `fp32` or `other`; sets the shape of the mark.
        low, high: ends of the 95% interval of the loss; equal if there is none.
        beyond: whether the loss lies outside of the drawing.
    """

    title: str
    row: int
    kind: str
    colour: str
    x: float
    y: float
    low: float
    high: float
    beyond: bool = False


@dataclass(frozen=True)
class Panel:
    """One of the two drawings.

    Attributes:
        name: `size` or `latency`.
        x_title, y_title: the titles of the axes, with units.
        x_ticks, y_ticks: positions and texts of the ticks.
        limit: the position of the largest accepted loss.
        front: the Pareto front, as the points of a polyline.
        keys: the frameworks with their colours.
    """

    name: str
    x_title: str
    y_title: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    limit: float
    front: str
    points: list[Point]
    keys: list[tuple[str, str]]


@dataclass(frozen=True)
class _Datum:
    """A model in data units: `x` in the unit of the axis, losses in the unit of the metric."""

    label: str
    x: float
    loss: float
    low: float
    high: float
    kind: str
    framework: str
    row: int = -1


def panels(selected: ModelSelection, others: Sequence[Entry] = ()) -> list[Panel]:
    """Return a drawing over size and, if measured, one over latency; empty without runs.

    Args:
        others: results of other tools on the same samples, drawn over size.
    """
    family = selected.family
    over = [
        ("size", "model file, kB", "size_bytes", 1e-3, list(_others(family, others))),
        ("latency", "latency of one sample, median, ms", "latency_p50_ms", 1.0, []),
    ]
    drawn = []
    for name, title, metric_name, scale, more in over:
        data = [
            _datum(selected, cell, row, scale * cell.metric(metric_name))
            for row, cell in enumerate(family.cells)
            if cell.quantized and not math.isnan(cell.metric(metric_name))
        ]
        if data:
            data += _baselines(family, metric_name, scale)
            drawn.append(_place(name, title, family, selected.limits, [*data, *more]))
    return drawn


def to_svg(drawn: Sequence[Panel]) -> str:
    """Return the drawings as one SVG file, side by side."""
    template = templates.load("resnet8ptq.report", "trade_offs.svg.j2")
    return template.render(panels=drawn, width=WIDTH, height=HEIGHT)


def _datum(selected: ModelSelection, cell: Cell, row: int, x: float) -> _Datum:
    metric, record = selected.family.metric, cell.record
    delta = record.delta(metric)
    loss = cell.metric("drop") if delta is None else metric.cost(delta)
    loss = loss if record.stopped_loss is None else record.stopped_loss
    interval = record.interval("delta")
    low, high = sorted(map(metric.cost, interval)) if interval else (loss, loss)
    framework = record.combination.framework
    outcome = selected.outcome(cell)
    return _Datum(cell.label, x, loss, low, high, outcome, framework, row)


def _baselines(family: Family, metric_name: str, scale: float) -> list[_Datum]:
    """Return FP32 in each framework, as the median over the runs."""
    measured: dict[str, list[float]] = {}
    for cell in family.measured:
        value = cell.record.metrics.get(f"{BASELINE}{metric_name}")
        if value is not None:
            measured.setdefault(cell.record.combination.baseline, []).append(value)
    return [
        _Datum(f"{framework} fp32", scale * float(np.median(values)), 0, 0, 0, "fp32", framework)
        for framework, values in measured.items()
    ]


def _others(family: Family, others: Sequence[Entry]) -> "list[_Datum]":
    if not others:
        return []
    name = f"{BASELINE}{family.metric.name}"
    fp32 = float(np.mean([cell.metric(name) for cell in family.measured]))
    data = []
    for entry in others:
        loss = fp32 - entry.fair / entry.total
        data.append(
            _Datum(
                f"{entry.tool} {entry.configuration}",
                1e-3 * entry.size_bytes,
                loss,
                loss,
                loss,
                "other",
                "",
            )
        )
    return data


def _place(
    name: str, title: str, family: Family, limits: ReportConfig, data: Sequence[_Datum]
) -> Panel:
    metric = family.metric
    values = [cell.metric(f"{BASELINE}{metric.name}") for cell in family.measured]
    most = metric.allowed(metric.limit(limits), values[0])
    largest = SPAN * most if most else max(d.loss for d in data)
    shown = [d for d in data if d.loss <= largest]
    bottom = max([most, *(min(d.high, largest) for d in shown)])
    top = min([0.0, *(d.low for d in shown)])
    pad = 0.06 * ((bottom - top) or 1)
    x_low, x_high = min(d.x for d in data), max(d.x for d in data)
    x_pad = 0.06 * ((x_high - x_low) or x_high or 1)
    x_axis = _Axis(x_low - x_pad, x_high + x_pad, LEFT, WIDTH - RIGHT)
    y_axis = _Axis(top - pad, bottom + pad, TOP, HEIGHT - BOTTOM)  # the smallest loss on top
    frameworks = sorted({d.framework for d in data if d.framework})
    colours = {f: COLOURS[i % len(COLOURS)] for i, f in enumerate(frameworks)}
    points = [
        Point(
            f"{d.label}: {metric.say_change(-d.loss if metric.maximize else d.loss)}, {d.x:.4g} "
            f"{title.rpartition(', ')[2]}, {d.kind}",
            d.row,
            d.kind,
            colours.get(d.framework, "#777"),
            x_axis.at(d.x),
            y_axis.at(min(d.loss, bottom)),
            y_axis.at(min(d.low, bottom)),
            y_axis.at(min(d.high, bottom)),
            d.loss > bottom,
        )
        for d in data
    ]
    return Panel(
        name,
        title,
        metric.loss_title,
        x_axis.ticks(1),
        y_axis.ticks(metric.scale),
        y_axis.at(most),
        _front(data, points),
        points,
        [(framework, colours[framework]) for framework in frameworks],
    )


def _front(data: Sequence[_Datum], points: Sequence[Point]) -> str:
    """Return the Pareto-optimal points, from left to right."""
    costs = np.array([(d.x, d.loss) for d in data])
    front = sorted(find_front(costs), key=lambda i: points[i].x)
    return " ".join(f"{points[i].x:.1f},{points[i].y:.1f}" for i in front)


def find_front(costs: NDArray[np.float64]) -> list[int]:
    """Return the Pareto-optimal points of [n, objectives]; lower costs are better.

    A point is dominated by one that is nowhere worse and somewhere better. Equal points do not
    dominate each other.
    """
    return [
        index
        for index, point in enumerate(costs)  # one by one: all pairs would take n * n of memory
        if not ((costs <= point).all(axis=1) & (costs < point).any(axis=1)).any()
    ]


@dataclass(frozen=True)
class _Axis:
    """A linear scale from values `low` to `high` onto positions `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return the position of a value."""
        part = (value - self.low) / (self.high - self.low)
        return round(self.start + part * (self.end - self.start), 1)

    def ticks(self, scale: float) -> list[tuple[float, str]]:
        """Return positions and texts of round values, multiplied by `scale` for the texts."""
        values = MaxNLocator(6).tick_values(scale * self.low, scale * self.high)
        within = [v for v in values if scale * self.low <= v <= scale * self.high]
        return [(self.at(v / scale), f"{v:g}") for v in within]
