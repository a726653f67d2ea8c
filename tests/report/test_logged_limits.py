"""The limits of `report` that replace those of the runs."""

import numpy as np
import pytest

from resnet8ptq.core.errors import ConfigError, TrackingError
from resnet8ptq.report.logged_limits import limits_of
from resnet8ptq.tracking.record import RunRecord


def test_a_requested_limit_that_is_no_number_is_refused_by_its_key():
    with pytest.raises(ConfigError, match=r"min_accuracy: got '0\.9', expected a number"):
        limits_of([], {"max_drop": None, "min_accuracy": "0.9"})


def test_a_requested_limit_may_be_a_number_of_numpy():
    assert limits_of([], {"max_drop": np.float32(0.25)}).max_drop == 0.25


@pytest.mark.parametrize("name", ["max_drop", "min_sqnr_db"])
def test_a_logged_limit_that_is_null_is_refused(name):
    params = {"report.max_drop": "0.01", f"report.{name}": "null"}
    run = RunRecord.of("a", params, {}, {})
    with pytest.raises(TrackingError, match="invalid limits"):
        limits_of([run], {})


def test_only_the_smallest_accuracy_may_be_logged_as_null():
    params = {"report.max_drop": "0.02", "report.min_accuracy": "null"}
    limits = limits_of([RunRecord.of("a", params, {}, {})], {})
    assert limits.max_drop == 0.02 and limits.min_accuracy is None
