"""Which of a sweep's models to deploy, for what, and how sure that is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.report.comparison import SIGNIFICANCE, Cell, Comparison, indistinguishable

CLOSE = 0.05  # latencies and sizes within 5% count as equal


def broken_limits(cell: Cell, limits: ReportConfig) -> list[str]:
    """Say which limits a measured cell breaks, in words."""
    broken = []
    if -cell.metric("delta") > limits.max_drop:
        broken.append(f"drop > {100 * limits.max_drop:g} points")
    if cell.metric("accuracy") < limits.min_accuracy:
        broken.append(f"accuracy < {limits.min_accuracy:.1%}")
    return broken


@dataclass(frozen=True)
class Recommendation:
    """The choice for one use, and those that are as good as far as can be told."""

    use: str
    choice: Cell
    why: str
    equals: tuple[Cell, ...]
    equals_mean: str


def recommend(comparison: Comparison, limits: ReportConfig) -> list[Recommendation]:
    """Return one recommendation for each use that the sweep can answer; none where nothing passes.

    Every choice keeps the limits, and was measured on integer kernels. The smallest and the fastest
    are chosen among those whose accuracy is not significantly worse than the most accurate one's.
    """
    passing = [cell for cell in comparison.measured if not broken_limits(cell, limits)]
    # A simulated run says nothing about deployment on integer kernels.
    passing = [cell for cell in passing if cell.record.params.get("execution") != "simulated"]
    if not passing:
        return []
    best = max(passing, key=_accuracy)
    rest = [cell for cell in passing if cell is not best]
    peers = [best, *indistinguishable(best, rest)]
    recommendations = [_most_accurate("most accurate", best, passing)]
    recommendations.append(_least("smallest", peers, lambda cell: cell.metric("size_bytes"), _size))
    timed = [cell for cell in peers if "latency_p50_ms" in cell.record.metrics]
    if timed:
        recommendations.append(
            _least("fastest, one image at a time", timed, _latency, _latency_text)
        )
        recommendations.append(
            _least("fastest, in batches", timed, _batch_latency, _batch_latency_text)
        )
    backends = sorted({cell.backend for cell in passing})
    for backend in backends if len(backends) > 1 else []:
        members = [cell for cell in passing if cell.backend == backend]
        winner = max(members, key=_accuracy)
        recommendations.append(_most_accurate(f"most accurate in {backend}", winner, members))
    return recommendations


def _most_accurate(use: str, best: Cell, candidates: Sequence[Cell]) -> Recommendation:
    equals = indistinguishable(best, [cell for cell in candidates if cell is not best])
    significant = (best.adjusted_p or 0) < SIGNIFICANCE
    against = "significantly below" if significant else "not significantly below"
    if best.metric("delta") >= 0:
        against = "not below"
    shown, fair = f"{best.metric('accuracy'):.2%}", f"{_accuracy(best):.2%}"
    ties = f" ({fair} with ties at the top broken at random)" if fair != shown else ""
    why = f"{shown}{ties}, {against} FP32 ({_points(best)} points)"
    return Recommendation(use, best, why, tuple(equals), "no significant difference in accuracy")


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


def _accuracy(cell: Cell) -> float:
    return cell.metric("expected_accuracy")  # with ties at the top broken at random


def _latency(cell: Cell) -> float:
    return cell.metric("latency_p50_ms")


def _batch_latency(cell: Cell) -> float:
    return cell.metric("latency_batch_p50_ms")


def _size(cell: Cell) -> str:
    size, saved = cell.metric("size_bytes") / 1000, cell.metric("size_reduction")
    return f"{size:.1f} kB, {saved:.1%} less than FP32, at {cell.metric('accuracy'):.2%}"


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


def _points(cell: Cell) -> str:
    return f"{100 * cell.metric('delta'):+.2f}"
