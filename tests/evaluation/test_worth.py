"""The rule of what is worth deploying instead of FP32."""

import pytest

from resnet8ptq.evaluation.worth import saves


@pytest.mark.parametrize(
    ("size_bytes", "speedup", "is_worth"),
    [
        (90, None, True),
        (91, None, False),
        (99, 1.04, False),
        (99, 1.05, True),
        (150, 2.0, True),
        (25, 0.5, True),
    ],
)
def test_a_file_saves_bytes_or_time_clearly(size_bytes, speedup, is_worth):
    assert saves(size_bytes, 100, speedup) == is_worth


def test_an_unknown_size_of_fp32_hides_nothing():
    assert saves(100, 0)
