"""Which of a sweep's models to deploy, for what, and how sure that is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.report import table
from resnet8ptq.report.comparison import Cell, Family, indistinguishable
from resnet8ptq.tasks.contract import Metric
from resnet8ptq.tasks.statistics import SIGNIFICANCE

CLOSE = 0.05  # latencies and sizes within 5% count as equal


def least_of(metric: Metric, limits: ReportConfig) -> float | None:
    """Return what the metric must reach; None where no limit is for it."""
    return getattr(limits, metric.least) if metric.least else None


def broken_limits(metric: Metric, cell: Cell, limits: ReportConfig) -> list[str]:
    """Say which limits a measured cell breaks, in words."""
    broken, least = [], least_of(metric, limits)
    if cell.drop > limits.max_drop:
        broken.append(f"drop > {metric.show_drop(limits.max_drop)}")
    if least is not None and metric.cost(cell.metric(metric.name)) > metric.cost(least):
        broken.append(f"{metric.title} < {metric.show(least)}")
    return broken


def why_none(family: Family, limits: ReportConfig) -> list[str]:
    """Say why no model is recommended, and what may help."""
    metric, measured = family.task.metric, family.measured
    least = least_of(metric, limits)
    asked = f"report.max_drop={limits.max_drop:g}"
    if least is not None:
        asked += f", report.{metric.least}={least:g}"
    lines = [f"No model keeps the limits ({asked}) on integer kernels, so none is recommended."]
    for value in sorted({cell.metric(f"baseline_{metric.name}") for cell in measured}):
        if least is not None and metric.cost(value) > metric.cost(least):
            lines.append(f"FP32 itself has {metric.show(value)}, less than report.{metric.least}.")
    if all(cell.drop > limits.max_drop for cell in measured):
        tried = any(cell.record.params.get("per_channel") == "true" for cell in measured)
        lines.append(
            f"To lose less: {'' if tried else 'per_channel=true; '}another calibration (calib=); "
            "nodes_to_exclude=auto, which leaves layers in float; +analysis=sensitivity names "
            "them, +analysis=diagnose says why."
        )
    return lines


@dataclass(frozen=True)
class Recommendation:
    """The choice for one use, and those that are as good as far as can be told."""

    use: str
    choice: Cell
    why: str
    equals: tuple[Cell, ...]
    equals_mean: str


def recommend(family: Family, limits: ReportConfig) -> list[Recommendation]:
    """Return one recommendation for each use that the sweep can answer; none where nothing passes.

    Every choice keeps the limits, and was measured on integer kernels. The smallest and the fastest
    are chosen among those whose result is not significantly worse than the best one's.
    """
    metric = family.task.metric
    passing = [cell for cell in family.measured if not broken_limits(metric, cell, limits)]
    # A simulated run says nothing about deployment on integer kernels.
    passing = [cell for cell in passing if cell.record.params.get("execution") != "simulated"]
    if not passing:
        return []
    best = _best(metric, passing)
    rest = [cell for cell in passing if cell is not best]
    peers = [best, *indistinguishable(best, rest)]
    recommendations = [_explain(metric, f"best {metric.title}", best, passing)]
    sizes = partial(_size, metric)
    recommendations.append(_least("smallest", peers, _bytes, sizes))
    if _bytes(smallest := min(passing, key=_bytes)) < _bytes(recommendations[-1].choice):
        use = "smallest within the limits"
        recommendations.append(_least(use, [smallest], _bytes, sizes))
    timed = [cell for cell in peers if "latency_p50_ms" in cell.record.metrics]
    if timed:
        for use, figure, text, ratio in (
            ("fastest, one image at a time", _latency, _latency_text, "speedup"),
            ("fastest, in batches", _batch_latency, _batch_latency_text, "speedup_batch"),
        ):
            fastest = _least(use, timed, figure, text)
            ratios = [c.metric(ratio) for c in family.measured if ratio in c.record.metrics]
            if max(ratios, default=1) < 1:
                fastest = replace(fastest, why=f"{fastest.why}; no model here is faster than FP32")
            recommendations.append(fastest)
    backends = sorted({cell.backend for cell in passing})
    for backend in backends if len(backends) > 1 else []:
        members = [cell for cell in passing if cell.backend == backend]
        winner = _best(metric, members)
        use = f"best {metric.title} in {backend}"
        recommendations.append(_explain(metric, use, winner, members))
    return recommendations


def _best(metric: Metric, cells: Sequence[Cell]) -> Cell:
    return min(cells, key=lambda cell: metric.cost(cell.metric(metric.ranked_by)))


def _explain(metric: Metric, use: str, best: Cell, candidates: Sequence[Cell]) -> Recommendation:
    equals = indistinguishable(best, [cell for cell in candidates if cell is not best])
    shown, fair = (metric.show(best.metric(name)) for name in (metric.name, metric.ranked_by))
    why = shown + (f" ({fair} with ties at the top broken at random)" if fair != shown else "")
    if best.adjusted_p is not None:
        against = (
            "significantly worse than"
            if best.adjusted_p < SIGNIFICANCE
            else "not significantly worse than"
        )
        if best.drop <= 0:
            against = "not worse than"
        change = metric.say_change(best.metric("delta"))
        if interval := table.show_interval(metric, best.record.metrics):
            change += f", 95% interval {interval}"
        why += f", {against} FP32 ({change})"
    return Recommendation(
        use, best, why, tuple(equals), f"no significant difference in {metric.title}"
    )


def _least(
    use: str,
    candidates: Sequence[Cell],
    figure: Callable[[Cell], float],
    text: Callable[[Cell], str],
) -> Recommendation:
    best = min(candidates, key=figure)
    equals = tuple(
        cell
        for cell in candidates
        if cell is not best and figure(cell) <= figure(best) * (1 + CLOSE)
    )
    return Recommendation(use, best, text(best), equals, f"within {CLOSE:.0%}")


def _bytes(cell: Cell) -> float:
    return cell.metric("size_bytes")


def _latency(cell: Cell) -> float:
    return cell.metric("latency_p50_ms")


def _batch_latency(cell: Cell) -> float:
    return cell.metric("latency_batch_p50_ms")


def _size(metric: Metric, cell: Cell) -> str:
    size, saved = cell.metric("size_bytes") / 1000, cell.metric("size_reduction")
    return f"{size:.1f} kB, {saved:.1%} less than FP32, at {metric.show(cell.metric(metric.name))}"


def _latency_text(cell: Cell) -> str:
    return f"{_latency(cell):.3f} ms, {_ratio(cell, 'speedup')}"


def _batch_latency_text(cell: Cell) -> str:
    size = cell.record.params.get("latency.batch_size", "?")
    return f"{_batch_latency(cell):.1f} ms for {size} images, {_ratio(cell, 'speedup_batch')}"


def _ratio(cell: Cell, name: str) -> str:
    """Compare with FP32 in the same framework; 8 bits are not always faster."""
    speedup = cell.metric(name)
    if speedup < 1:
        return f"slower than FP32 in {cell.backend} ({speedup:.2f} times as fast)"
    return f"{speedup:.2f} times as fast as FP32 in {cell.backend}"
