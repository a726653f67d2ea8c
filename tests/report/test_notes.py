"""The notes below a table."""

from dataclasses import replace

import pytest

from resnet8ptq.config.schema import ReportConfig
from resnet8ptq.report import notes, verdicts
from resnet8ptq.report.families import Cell
from resnet8ptq.tasks.classification import ACCURACY
from tests.helpers.cells import predictions, record, sweep


@pytest.mark.parametrize(
    ("metrics", "near"),
    [
        ({}, "equal outputs"),
        ({"target/sqnr_db": 41.26}, "outputs within 41.3 dB"),
        ({"accuracy": 0.1}, "other outputs"),  # of NaN, which have no SQNR
    ],
)
def test_a_machine_is_named_with_the_difference_of_its_outputs(metrics, near):
    model = predictions(lost=2)
    here = record("a", model).metrics["accuracy"]
    measured = record(
        "a", model, measured_on="a board", **{"target/here_accuracy": here, **metrics}
    )
    assert near in notes.say_machine(ACCURACY, measured)


def test_the_note_on_the_limit_counts_models_whose_results_are_lost():
    family = sweep(("a", predictions(lost=2), {"artifact_sha256": "a" * 64}))
    other = record("b", predictions(lost=2), calib="entropy", artifact_sha256="b" * 64)
    lost = Cell(other.as_failed("no predictions.npz"), "b", lost=True)
    family = replace(family, cells=(*family.cells, lost))
    lines = notes.collect(verdicts.assess(family, ReportConfig()))
    [line] = [line for line in lines if line.startswith("limit:")]
    assert "corrected for 2 models" in line
