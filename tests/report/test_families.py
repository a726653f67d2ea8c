"""Families of runs: their models, and tests by class, corrected together."""

import json
import math

import numpy as np
import pytest

from resnet8ptq.report import equal_files, families
from resnet8ptq.report.families import Cell, make_family
from resnet8ptq.tasks.classification import metric_names
from resnet8ptq.tasks.scoring.statistics import flips, mcnemar
from resnet8ptq.tracking.record import RunRecord
from tests.helpers.cells import (
    NAMES,
    amend,
    predictions,
    sweep,
    unmeasured,
)


def test_mcnemar_of_no_images_is_one():
    nothing = np.zeros(0, dtype=bool)
    assert mcnemar(*flips(nothing, nothing)) == 1.0


def test_every_cell_stays_and_only_measured_ones_are_tested():
    measured = sweep(("a", predictions(lost=30), {}), ("b", predictions(), {"dtype": "uint8"}))
    refused = unmeasured("c", "unsupported", "no kernel")
    result = make_family([*measured.cells, refused])
    assert [cell.record.run_id for cell in result.cells] == ["a", "b", "c"]
    adjusted = equal_files.adjusted_p(result.records)
    assert list(adjusted) == ["a", "b"]
    assert adjusted["a"] == pytest.approx(2 * 2 * 0.5**30)
    assert adjusted["b"] == 1.0


def test_a_class_is_flagged_only_where_it_lost_significantly():
    result = sweep(
        ("a", predictions(lost=25, label=1), {}),
        ("b", predictions(lost=3, label=1), {"dtype": "uint8"}),
        ("c", predictions(won=40), {"dtype": "u8s8"}),
    )
    assert result.class_names == NAMES
    assert [cell.worse_classes for cell in result.cells] == [("dog",), (), ()]


def test_nothing_measured_gives_an_empty_comparison():
    result = make_family([unmeasured("a", "failed", "boom")])
    assert result.measured == []
    assert result.class_names == ()


def test_classes_of_any_name_are_tested():
    names = ("c++", "c--/")
    odd = sweep(("a", predictions(lost=25, label=1), {}))
    (cell,) = odd.cells
    drops = {
        f"class/{name}/drop": cell.record.metrics[f"class/{plain}/drop"]
        for plain, name in zip(NAMES, metric_names(names), strict=True)
    }
    cell = amend(cell, tags={"class_names": json.dumps(names)}, metrics=drops)
    result = make_family([cell])
    assert result.class_deltas(result.cells[0]) == [0, pytest.approx(-0.05)]
    assert result.cells[0].worse_classes == ("c--/",)


def test_what_a_cell_knows_of_itself():
    (cell,) = sweep(("a", predictions(), {})).cells
    assert (
        cell.record.backend,
        cell.record.status,
        cell.metric("counts/total"),
        cell.quantized,
    ) == ("onnx", "ok", 1000, True)
    bare = Cell(RunRecord.of("id", {}, {}, {}), "label")
    assert (bare.record.backend, bare.record.status, bare.quantized) == ("?", "?", False)
    assert math.isnan(bare.metric("accuracy"))
    (baseline,) = sweep(("a", predictions(), {"dtype": "fp32"})).cells
    assert not baseline.quantized


def test_a_failed_run_alone_has_the_metric_of_its_task():
    """As a confirmation that the end of the time interrupts."""
    failed = RunRecord.of("id", {"scored_as": "deviation"}, {}, {"status": "failed"})
    assert families.task_of([failed]).metric.name == "relative_error"
    assert families.task_of([RunRecord.of("id", {}, {}, {})]).name == "classification"
