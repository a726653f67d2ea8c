"""The lines of the log about the operators and the ranges of a network with attention."""

import pytest

from resnet8ptq.experiment.attention_report import log_attention
from tests.helpers import transformers
from tests.helpers.configs import make_config

WEIGHTS = ("method=weight_only", "dtype=w8", "weight_only.block_size=null")


@pytest.mark.parametrize(("settings", "lines"), [((), 1), (WEIGHTS, 0)])
def test_no_operator_is_named_where_all_activations_are_float(settings, lines, caplog):
    caplog.set_level("INFO")
    log_attention(make_config("backend=openvino", *settings), transformers.build().graph)
    assert caplog.text.count("attention=all quantizes them") == lines
