"""The notes below a table."""

import pytest

from resnet8ptq.report import notes
from resnet8ptq.tasks.classification import ACCURACY
from tests.helpers.cells import predictions, record


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
