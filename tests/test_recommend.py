"""The choices, from sweeps made by hand."""

from cells import predictions, sweep

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.report.recommend import broken_limits, recommend

LIMITS = ReportConfig()


def by_use(*cells: tuple[str, object, dict[str, float | str]]) -> dict[str, object]:
    return {r.use: r for r in recommend(sweep(*cells), LIMITS)}  # type: ignore[arg-type]


def test_most_accurate_names_those_that_cannot_be_told_from_it() -> None:
    found = by_use(
        ("best", predictions(won=10), {}),
        ("near", predictions(won=8), {"calib": "entropy"}),
        ("far", predictions(lost=40), {"calib": "percentile"}),
    )
    choice = found["most accurate"]
    assert choice.choice.record.run_id == "best"
    assert [cell.record.run_id for cell in choice.equals] == ["near"]


def test_smallest_is_not_bought_with_accuracy() -> None:
    found = by_use(
        ("best", predictions(won=10), {"size_bytes": 110_000.0}),
        ("small", predictions(won=9), {"size_bytes": 90_000.0, "calib": "entropy"}),
        ("tiny", predictions(lost=40), {"size_bytes": 10_000.0, "calib": "percentile"}),
    )
    assert found["smallest"].choice.record.run_id == "small"
    assert found["smallest"].equals == ()


def test_fastest_only_where_latency_was_measured() -> None:
    slow = {"latency_p50_ms": 0.2, "latency_batch_p50_ms": 20.0}
    fast = {"latency_p50_ms": 0.1, "latency_batch_p50_ms": 30.0, "calib": "entropy"}
    ratios = {"speedup": 1.0, "speedup_batch": 1.0}
    found = by_use(("a", predictions(), slow | ratios), ("b", predictions(), fast | ratios))
    assert found["fastest, one image at a time"].choice.record.run_id == "b"
    assert found["fastest, in batches"].choice.record.run_id == "a"
    assert not any(use.startswith("fastest") for use in by_use(("a", predictions(), {})))


def test_best_of_each_framework_where_there_are_several() -> None:
    found = by_use(("a", predictions(), {}), ("b", predictions(lost=5), {"backend": "torch"}))
    assert found["most accurate in torch"].choice.record.run_id == "b"
    assert "most accurate in onnx" not in by_use(("a", predictions(), {}))


def test_limits_are_named_and_keep_a_model_out() -> None:
    (cell,) = sweep(("a", predictions(lost=100), {})).cells
    assert broken_limits(cell, LIMITS) == ["drop > 5 points", "accuracy < 85.0%"]
    assert recommend(sweep(("a", predictions(lost=100), {})), LIMITS) == []


def test_a_gain_is_called_not_below() -> None:
    found = by_use(("a", predictions(won=3), {}))
    assert "not below FP32 (+0.30 points)" in found["most accurate"].why
