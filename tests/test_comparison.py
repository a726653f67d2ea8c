"""Tests across a sweep: Holm's correction, classes, and which models cannot be told apart."""

import json

import numpy as np
import pytest
from cells import BASELINE, LABELS, NAMES, predictions, sweep, unmeasured
from hypothesis import given
from hypothesis import strategies as st
from statsmodels.stats.contingency_tables import mcnemar as reference_mcnemar

from resnet8ptq.report.comparison import compare, indistinguishable
from resnet8ptq.tasks.classification import metric_names
from resnet8ptq.tasks.statistics import holm, mcnemar, wilson


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_mcnemar_equals_statsmodels(hits: list[bool], random: "np.random.Generator") -> None:
    ours = np.array(hits)
    theirs = np.array([hit if random.random() < 0.6 else not hit for hit in hits])
    table = [[(ours & theirs).sum(), (ours & ~theirs).sum()]]
    table.append([(~ours & theirs).sum(), (~ours & ~theirs).sum()])
    expected = reference_mcnemar(table, exact=True).pvalue
    assert mcnemar(ours, theirs) == pytest.approx(min(expected, 1.0))


@pytest.mark.parametrize(
    ("lost", "won", "p"),
    [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 0.0625), (0, 5, 0.0625), (6, 0, 0.03125), (7, 7, 1.0)],
)
def test_mcnemar_by_hand(lost: int, won: int, p: float) -> None:
    hits = predictions(lost, won) == LABELS
    assert mcnemar(hits, BASELINE == LABELS) == pytest.approx(p)


def test_mcnemar_of_no_images_is_one() -> None:
    nothing = np.zeros(0, dtype=bool)
    assert mcnemar(nothing, nothing) == 1.0


def test_holm_by_hand() -> None:
    # Sorted 0.01, 0.02, 0.04: times 3, 2, 1, and never smaller than the one before.
    assert holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])
    assert holm([0.03]) == [0.03]
    assert holm([]) == []


def test_wilson_by_hand() -> None:
    # 8703 of 9980: centre 0.871883, half width 0.006556 (z = 1.959964).
    assert wilson(8703, 9980) == pytest.approx((0.865339, 0.878451), abs=2e-5)
    assert wilson(0, 10)[0] == 0.0
    assert wilson(10, 10)[1] == 1.0


def test_every_cell_stays_and_only_measured_ones_are_tested() -> None:
    measured = sweep(("a", predictions(lost=30), {}), ("b", predictions(), {"dtype": "uint8"}))
    refused = unmeasured("c", "unsupported", "no kernel")
    found = compare([*measured.cells, refused])
    assert [cell.record.run_id for cell in found.cells] == ["a", "b", "c"]
    assert [cell.adjusted_p is None for cell in found.cells] == [False, False, True]
    assert found.cells[0].adjusted_p == pytest.approx(2 * 2 * 0.5**30)
    assert found.cells[1].adjusted_p == 1.0


def test_a_class_is_flagged_only_where_it_lost_significantly() -> None:
    found = sweep(
        ("a", predictions(lost=25, label=1), {}),
        ("b", predictions(lost=3, label=1), {"dtype": "uint8"}),
        ("c", predictions(won=40), {"dtype": "u8s8"}),
    )
    assert found.class_names == NAMES
    assert [cell.worse_classes for cell in found.cells] == [("dog",), (), ()]


def test_indistinguishable_is_paired_and_corrected() -> None:
    found = sweep(
        ("best", predictions(won=20), {}),
        ("near", predictions(won=18), {"calib": "entropy"}),
        ("far", predictions(lost=30), {"calib": "percentile"}),
    )
    best, near, far = found.cells
    assert indistinguishable(best, [near, far]) == [near]


def test_nothing_measured_gives_an_empty_comparison() -> None:
    found = compare([unmeasured("a", "failed", "boom")])
    assert found.measured == []
    assert found.class_names == ()


def test_classes_of_any_name_are_tested() -> None:
    names = ("c++", "c--/")
    odd = sweep(("a", predictions(lost=25, label=1), {}))
    (cell,) = odd.cells
    cell.record.tags["class_names"] = json.dumps(names)
    for plain, name in zip(NAMES, metric_names(names), strict=True):
        cell.record.metrics[f"delta_{name}"] = cell.record.metrics.pop(f"delta_{plain}")
    found = compare(odd.cells)
    assert found.class_deltas(found.cells[0]) == [0, pytest.approx(-0.05)]
    assert found.cells[0].worse_classes == ("c--/",)
