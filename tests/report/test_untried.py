import pytest

from resnet8ptq.report.untried import _is_left_out

PROPOSED = {"backend": "onnx", "dtype": "u8s8"}


@pytest.mark.parametrize(
    ("word", "repeated"),
    [
        ("model.path=my.onnx", True),
        ("task=ctc", True),
        ("dtype=w8", False),
        ("method=weight_only", False),
        ("weight_only.block_size=null", False),
        ("backend.path=theirs.tflite", False),
        ("latency.enabled=false", False),
        ("format=qdq", False),
        ("slim=true", False),
        ("evaluate.choice=none", False),
    ],
)
def test_the_proposed_command_repeats_what_fits_another_backend(word, repeated):
    assert _is_left_out(word, PROPOSED) is not repeated
