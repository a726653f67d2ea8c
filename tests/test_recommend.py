"""The choices, from sweeps made by hand."""

import pytest
from cells import predictions, sweep

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.report.recommend import broken_limits, recommend, why_none
from resnet8ptq.tasks.classification import ACCURACY

LIMITS = ReportConfig(min_accuracy=0.85)


def by_use(*cells: tuple[str, object, dict[str, float | str]]) -> dict[str, object]:
    return {r.use: r for r in recommend(sweep(*cells), LIMITS)}  # type: ignore[arg-type]


def test_most_accurate_names_those_that_cannot_be_told_from_it() -> None:
    found = by_use(
        ("best", predictions(won=10), {}),
        ("near", predictions(won=8), {"calib": "entropy"}),
        ("far", predictions(lost=40), {"calib": "percentile"}),
    )
    choice = found["best accuracy"]
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
    assert found["best accuracy in torch"].choice.record.run_id == "b"
    assert "best accuracy in onnx" not in by_use(("a", predictions(), {}))


def test_smaller_but_significantly_worse_is_its_own_use() -> None:
    found = by_use(
        ("best", predictions(won=10), {"size_bytes": 110_000.0}),
        ("small", predictions(lost=20), {"size_bytes": 90_000.0, "calib": "entropy"}),
    )
    assert found["smallest"].choice.record.run_id == "best"
    assert found["smallest within the limits"].choice.record.run_id == "small"


def test_where_all_are_slower_than_fp32_it_is_told() -> None:
    timed = {"latency_p50_ms": 0.2, "speedup": 0.9, "latency_batch_p50_ms": 9, "speedup_batch": 2}
    found = by_use(("a", predictions(), timed))
    single, batches = (
        found[f"fastest, {use}"].why for use in ("one image at a time", "in batches")
    )
    assert single.endswith("; no model here is faster than FP32")
    assert "no model here" not in batches


def test_why_nothing_is_recommended() -> None:
    lost = sweep(("a", predictions(lost=100), {}))
    lines = why_none(lost, ReportConfig(min_accuracy=0.95))
    assert "report.max_drop=0.05, report.min_accuracy=0.95" in lines[0]
    assert lines[1] == "FP32 itself has 90.00%, less than report.min_accuracy."
    assert "per_channel=true; " in lines[2]
    kept = sweep(("a", predictions(), {"per_channel": "true"}))
    assert len(why_none(kept, LIMITS)) == 1


def test_limits_are_named_and_keep_a_model_out() -> None:
    (cell,) = sweep(("a", predictions(lost=100), {})).cells
    assert broken_limits(ACCURACY, cell, LIMITS) == ["drop > 5 points", "accuracy < 85.00%"]
    assert recommend(sweep(("a", predictions(lost=100), {})), LIMITS) == []


def test_every_use_by_hand() -> None:
    """The second is ahead once ties are broken at random; the others do not come into it."""
    a = {
        **{"size_bytes": 105_000.0, "size_reduction": 0.5},
        **{"latency_p50_ms": 0.2, "speedup": 0.5, "latency_batch_p50_ms": 20.0},
        **{"speedup_batch": 2.0, "latency.batch_size": "64"},
    }
    b = {
        **{"backend": "torch", "expected_accuracy": 0.92, "size_bytes": 100_000.0},
        **{"size_reduction": 0.6, "latency_p50_ms": 0.21, "speedup": 1.5},
        **{"latency_batch_p50_ms": 10.0, "speedup_batch": 1.0, "latency.batch_size": "32"},
    }
    least = {"size_bytes": 1.0, "latency_p50_ms": 0.01, "latency_batch_p50_ms": 0.1}
    cells = sweep(
        ("a", predictions(won=10), a),
        ("b", predictions(won=9), b),
        ("below the limits", predictions(lost=100), least),
        ("simulated", predictions(won=60), {**least, "execution": "simulated"}),
    )
    found = [
        (r.use, r.choice.record.run_id, r.why, [cell.record.run_id for cell in r.equals])
        for r in recommend(cells, LIMITS)
    ]
    ahead = (
        "90.90% (92.00% with ties at the top broken at random), not worse than FP32 (+0.90 points)"
    )
    assert found == [
        ("best accuracy", "b", ahead, ["a"]),
        ("smallest", "b", "100.0 kB, 60.0% less than FP32, at 90.90%", ["a"]),
        (
            "fastest, one image at a time",
            "a",
            "0.200 ms, slower than FP32 in onnx (0.50 times as fast)",
            ["b"],
        ),
        (
            "fastest, in batches",
            "b",
            "10.0 ms for 32 images, 1.00 times as fast as FP32 in torch",
            [],
        ),
        ("best accuracy in onnx", "a", "91.00%, not worse than FP32 (+1.00 points)", []),
        ("best accuracy in torch", "b", ahead, []),
    ]
    meanings = [r.equals_mean for r in recommend(cells, LIMITS)]
    accuracy, least_cost = "no significant difference in accuracy", "within 5%"
    assert meanings == [accuracy, *[least_cost] * 3, *[accuracy] * 2]


def test_what_ran_on_no_integer_kernels_is_never_recommended() -> None:
    assert recommend(sweep(("a", predictions(), {"execution": "simulated"})), LIMITS) == []
    (first, *_) = recommend(sweep(("a", predictions(), {"execution": "integer"})), LIMITS)
    assert first.choice.record.run_id == "a"


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (0, "90.00%, not worse than FP32 (+0.00 points)"),
        (3, "89.70%, not significantly worse than FP32 (-0.30 points)"),
        (30, "87.00%, significantly worse than FP32 (-3.00 points)"),
    ],
)
def test_a_drop_is_told_by_its_significance(lost: int, words: str) -> None:
    assert by_use(("a", predictions(lost=lost), {}))["best accuracy"].why == words


def test_a_drop_is_told_with_its_interval() -> None:
    interval = {"delta_ci95_low": -0.012, "delta_ci95_high": 0.01}
    found = by_use(("a", predictions(), interval))["best accuracy"].why
    assert found.endswith("FP32 (+0.00 points, 95% interval -1.20 to +1.00)")


def test_at_its_limits_a_model_passes() -> None:
    limits = ReportConfig(max_drop=0.25, min_accuracy=0.5)
    (cell,) = sweep(("a", predictions(), {"delta": -0.25, "accuracy": 0.5})).cells
    assert broken_limits(ACCURACY, cell, limits) == []
