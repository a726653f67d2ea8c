"""The run that is deployed, and the warnings beside it."""

from pathlib import Path

import pytest

from resnet8ptq.deploy.source import SourceRun
from tests.helpers.cells import predictions, record
from tests.helpers.configs import make_config


@pytest.mark.parametrize(
    ("verdict", "text", "has_caution"),
    [
        ("pass", "pass after 2,750 of 5,000", False),  # evaluate.stop=decided
        ("undecided", "undecided (needs 1,200 samples)", True),
        (None, "not judged (a file was lost)", True),
        (None, "", False),
    ],
)
def test_a_verdict_other_than_pass_is_a_caution(verdict, text, has_caution):
    run = record("a", predictions()).changed(verdict=verdict, verdict_text=text)
    cautions = SourceRun(run, make_config(), Path("model.onnx")).cautions
    assert bool(cautions) == has_caution
