"""The limits of `report` that replace those of the runs."""

import numpy as np
import pytest

from resnet8ptq.core.errors import ConfigError
from resnet8ptq.report.logged_limits import limits_of


def test_a_requested_limit_that_is_no_number_is_refused_by_its_key():
    with pytest.raises(ConfigError, match=r"min_accuracy: got '0\.9', expected a number"):
        limits_of([], {"max_drop": None, "min_accuracy": "0.9"})


def test_a_requested_limit_may_be_a_number_of_numpy():
    assert limits_of([], {"max_drop": np.float32(0.25)}).max_drop == 0.25
