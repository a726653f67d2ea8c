"""Prepares the figure of each model's loss against size and latency, which templates draw as SVG.

The page shows it inline, with points that can be hovered and selected; `trade_offs.svg` is a file
with the same figure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.core import templates
from resnet8ptq.report import equal_files
from resnet8ptq.report.families import Cell, Family
from resnet8ptq.report.recommend import ModelSelection
from resnet8ptq.report.table import VOID
from resnet8ptq.report.timing import fp32_name
from resnet8ptq.report.verdicts import FAIL, PASS, UNDECIDED
from resnet8ptq.tasks.scoring.metric import BASELINE, Metric

WIDTH = 640
HEIGHT = 360
# The margins, in units of the drawing
LEFT = 62
RIGHT = 18
TOP = 14
BOTTOM = 46
SPAN = 4.0  # times the limit; points with a larger loss lie on the lower edge
# Okabe and Ito's colours, which people with colour blindness can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


@dataclass(frozen=True)
class Point:
    """A model or FP32 in a panel.

    Attributes:
        x: the size or the latency, in the unit of the axis.
        loss: the loss in the unit of the metric; with task=deviation, noise over signal.
        low, high: ends of the 95% interval of the loss; equal if there is none.
        kind: the outcome of the verdict, or `fp32`.
        row: the index of the model among the table's rows of runs; -1 for FP32.
    """

    label: str
    x: float
    loss: float
    low: float
    high: float
    kind: str
    framework: str = ""
    row: int = -1


@dataclass(frozen=True)
class Axis:
    """A linear scale from values `low` to `high` onto positions `start` to `end`.

    >>> Axis(low=0, high=10, start=100, end=200).at(2.5)
    125.0
    """

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return the position of a value."""
        part = (value - self.low) / (self.high - self.low)
        return round(self.start + part * (self.end - self.start), 1)

    def ticks(self, scale: float) -> list[tuple[float, str]]:
        """Return positions and texts of the marks; a text is the value, multiplied by `scale`."""
        low = scale * self.low
        high = scale * self.high
        ticks = []
        for value in MaxNLocator(6).tick_values(low, high):
            if low <= value <= high:
                ticks.append((self.at(value / scale), f"{value:g}"))
        return ticks


@dataclass(frozen=True)
class Panel:
    """The data of one trade-off plot: loss against size or latency.

    Attributes:
        name: `size` or `latency`.
        x_title: the title of the axis, with its unit.
        most: the largest accepted loss, in the unit of `Point.loss`.
        bottom: the largest loss that is drawn; points beyond it lie at this loss.
        keys: the colour of each framework.
    """

    name: str
    x_title: str
    metric: Metric
    points: list[Point]
    most: float
    bottom: float
    x_axis: Axis
    y_axis: Axis
    keys: dict[str, str]

    def y(self, loss: float) -> float:
        """Return the vertical position of a loss; at most that of `bottom`."""
        return self.y_axis.at(min(loss, self.bottom))

    @property
    def front(self) -> str:
        """The Pareto front from left to right, as the points of a polyline."""
        costs = np.array([(point.x, point.loss) for point in self.points])
        front = [self.points[index] for index in find_front(costs)]
        front.sort(key=lambda point: point.x)
        corners = []
        for point in front:
            corners.append(f"{self.x_axis.at(point.x)},{self.y(point.loss)}")
        return " ".join(corners)

    @property
    def marks(self) -> dict[str, str]:
        """The meaning of each kind of mark in the drawing."""
        kinds = {point.kind for point in self.points}
        marks = {}
        if PASS in kinds:
            marks["filled"] = PASS
        hollow = kinds & {UNDECIDED, VOID}
        if hollow:
            marks["hollow"] = " or ".join(sorted(hollow))

        # A cross stands for a fail, and for a point on the lower edge
        crossed = []
        if FAIL in kinds:
            crossed.append(FAIL)
        if any(point.loss > self.bottom for point in self.points):
            crossed.append("a loss beyond the drawing")
        if crossed:
            marks["cross"] = ", or ".join(crossed)
        marks["diamond"] = "FP32"
        return marks

    def say(self, point: Point) -> str:
        """Return a point's name and values as text, for hovering and screen readers."""
        change = self.metric.say_change(self._change(point.loss))
        unit = self.x_title.rpartition(", ")[2]
        if point.low != point.high:
            low, high = sorted(map(self._change, (point.low, point.high)))
            change += f" (95%: {self.metric.show_change(low)} to {self.metric.show_change(high)})"
        return f"{point.label}: {change}, {point.x:.4g} {unit}, {point.kind}"

    def _change(self, loss: float) -> float:
        return -loss if self.metric.maximize else loss


def panels(selected: ModelSelection) -> list[Panel]:
    """Return a panel over size and one over latency, each if any model has the value."""
    family = selected.family
    over = [
        ("size", "model file, kB", "size_bytes", 1e-3),
        ("latency", "latency of one sample, median, ms", "latency_p50_ms", 1.0),
    ]
    # A point is linked to the row of its model in the table
    shown = equal_files.distinct(family.records)
    rows = {record.run_id: row for row, record in enumerate(shown)}
    drawn = []
    for name, title, metric_name, scale in over:
        data = []
        for cell in family.models:
            x = scale * cell.metric(metric_name)
            if not math.isnan(x):  # models that were not timed have no latency
                data.append(_point(selected, cell, row=rows[cell.record.run_id], x=x))
        if data:
            data += _baselines(family, metric_name, scale)
            drawn.append(_draw(name, title, family, limits=selected.limits, points=data))
    return drawn


def to_svg(drawn: Sequence[Panel]) -> str:
    """Return the drawings as one SVG file, side by side."""
    template = templates.load("resnet8ptq.report.pages", "trade_offs.svg.j2")
    return template.render(panels=drawn, width=WIDTH, height=HEIGHT)


def _point(selected: ModelSelection, cell: Cell, row: int, x: float) -> Point:
    metric = selected.family.metric
    record = cell.record

    # Plot the loss in the metric's unit, which its interval has
    loss = cell.metric("drop")
    delta = record.delta(metric)
    if delta is not None:
        loss = metric.cost(delta)
    if record.stopped_loss is not None:  # corrected for stopping, as its interval is
        loss = record.stopped_loss
    ends = [loss, loss]
    interval = record.interval("delta")
    if interval:
        ends = sorted(map(metric.cost, interval))
    return Point(
        label=cell.label,
        x=x,
        loss=loss,
        low=ends[0],
        high=ends[1],
        kind=record.verdict or "",
        framework=record.combination.framework,
        row=row,
    )


def _baselines(family: Family, metric_name: str, scale: float) -> list[Point]:
    """Return a point for FP32 in each framework, provider and machine: the median over the runs."""
    measured: dict[tuple[str, str, str], list[float]] = {}
    for cell in family.measured:
        record = cell.record
        value = record.metrics.get(f"{BASELINE}{metric_name}")
        if value is not None:
            ran = (record.combination.baseline, fp32_name(record), record.measured_on)
            measured.setdefault(ran, []).append(value)

    # Name the machine only if several ran FP32
    machines = {machine for *_, machine in measured}
    points = []
    for (framework, name, machine), values in measured.items():
        label = name
        if len(machines) > 1:
            label += f" on {machine or 'this machine'}"
        point = Point(
            label=label,
            x=scale * float(np.median(values)),
            loss=0,
            low=0,
            high=0,
            kind="fp32",
            framework=framework,
        )
        points.append(point)
    return points


def _draw(
    name: str, title: str, family: Family, limits: ReportConfig, points: list[Point]
) -> Panel:
    metric = family.metric
    # The vertical axis has the metric's unit, which the limit may lack
    fp32 = family.measured[0].metric(f"{BASELINE}{metric.name}")
    most = metric.allowed(metric.limit(limits), fp32)
    bottom, y_axis = _make_y_axis(points, most)

    # With more frameworks than colours, the colours repeat
    frameworks = {point.framework for point in points}
    frameworks.discard("")
    return Panel(
        name=name,
        x_title=title,
        metric=metric,
        points=points,
        most=most,
        bottom=bottom,
        x_axis=_make_x_axis(points),
        y_axis=y_axis,
        keys=dict(zip(sorted(frameworks), cycle(COLOURS), strict=False)),
    )


def _make_x_axis(points: Sequence[Point]) -> Axis:
    """Return the horizontal axis, which shows all points."""
    values = [point.x for point in points]
    low = min(values)
    high = max(values)
    pad = 0.06 * ((high - low) or high or 1)
    return Axis(low=low - pad, high=high + pad, start=LEFT, end=WIDTH - RIGHT)


def _make_y_axis(points: Sequence[Point], most: float) -> tuple[float, Axis]:
    """Return the largest loss that is drawn, and the vertical axis; the smallest loss is on top.

    The axis includes the limit `most`, and points with a loss up to `SPAN` times the limit. Their
    intervals are cut there. If the limit is 0, the axis includes all points.
    """
    # Points with a larger loss do not stretch the axis
    largest = SPAN * most
    if not most:
        largest = max(point.loss for point in points)
    shown = [point for point in points if point.loss <= largest]

    # Include the limit, and the intervals of the points
    bottom = most
    top = 0.0
    for point in shown:
        bottom = max(bottom, min(point.high, largest))
        top = min(top, point.low)
    if len(shown) < len(points):  # points beyond the drawing lie clearly below the limit
        bottom = max(bottom, 1.3 * most)
    pad = 0.06 * ((bottom - top) or 1)
    return bottom, Axis(low=top - pad, high=bottom + pad, start=TOP, end=HEIGHT - BOTTOM)


def find_front(costs: NDArray[np.float64]) -> list[int]:
    """Return the indices of the Pareto-optimal points in [n, objectives]; lower costs are better.

    A point is dominated by another that is nowhere worse and somewhere better. Equal points do not
    dominate each other.

    >>> find_front(np.array([[1.0, 3.0], [2.0, 2.0], [2.0, 4.0]]))
    [0, 1]
    """
    front = []
    for index, point in enumerate(costs):  # one by one, because all pairs would need n * n memory
        is_dominating = (costs <= point).all(axis=1) & (costs < point).any(axis=1)
        if not is_dominating.any():
            front.append(index)
    return front
