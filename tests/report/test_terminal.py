"""The end of a single run in the terminal, from sweeps made by hand."""

import pytest

from resnet8ptq.report import terminal
from tests.helpers.cells import predictions, sweep
from tests.helpers.selections import select


@pytest.mark.parametrize(
    ("lost", "verdict", "begins", "has_remedy"),
    [
        (0, "pass", "Verdict: At most 2 points worse", False),
        (16, "undecided", "Verdict: Undecided: 1,000 samples", False),
        (100, "fail", "Verdict: Fails: accuracy < 85.00%. Fails the limit", True),
    ],
)
def test_a_run_says_its_verdict_and_after_a_fail_a_remedy(
    capsys, lost, verdict, begins, has_remedy
):
    selected = select(sweep(("a", predictions(lost=lost), {})))
    assert terminal.print_verdict([selected], "a") == verdict
    printed = capsys.readouterr().out
    assert printed.startswith(begins)
    assert ("To reduce the loss, try per_channel=true" in printed) == has_remedy


def test_another_run_has_no_verdict_here(capsys):
    selected = select(sweep(("a", predictions(), {})))
    assert terminal.print_verdict([selected], "b") == ""
    assert capsys.readouterr().out == ""
