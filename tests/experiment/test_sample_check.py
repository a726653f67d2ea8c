"""A damaged calibration sample is named before a run quantizes, in every framework."""

import logging

import numpy as np
import onnx
import pytest
from onnx import parser

from resnet8ptq.calibration.outliers import Outliers
from resnet8ptq.data.dataset import Split
from resnet8ptq.experiment import run_warnings
from resnet8ptq.experiment.sample_check import calibrates, check_inputs
from tests.helpers.configs import make_config
from tests.helpers.frameworks import QUANTIZING


@pytest.fixture
def graph() -> onnx.GraphProto:
    network = """<ir_version: 8, opset_import: ["" : 17]> network (float[N, 4] x) => (float[N, 4] y)
        { y = Neg(x) }"""
    return parser.parse_model(network).graph


@pytest.fixture
def damaged() -> Split:
    samples = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    samples[3] *= 1e4
    return Split(samples, None, "own.npz")


@pytest.mark.parametrize("backend", QUANTIZING)
@pytest.mark.parametrize("calib", ["minmax", "histogram"])
def test_a_damaged_sample_is_named_in_every_framework(graph, damaged, caplog, backend, calib):
    config = make_config("data=shapes", f"backend={backend}", f"calib={calib}")
    assert calibrates(config)
    [outliers] = check_inputs(config.calib, graph, damaged)
    assert (outliers.tensor, outliers.samples) == ("x", (3,))
    assert check_inputs(config.calib, graph, damaged.take(np.arange(4, 50))) == []


@pytest.mark.parametrize(
    "override", ["dtype=fp32", "method=dynamic", "calib.table=ranges.json", "backend=file"]
)
def test_a_run_that_does_not_calibrate_is_not_checked(override):
    assert not calibrates(make_config("data=shapes", override))


def test_a_noisy_run_is_reported_to_remove_the_sample_first(damaged, caplog):
    config, outliers = make_config("data=shapes"), [Outliers("x", (3,), 1e4, 50)]
    run_warnings.warn_of_noise(config, 0.0, False, outliers, damaged)
    run_warnings.warn_of_noise(config, 0.0, False, [], damaged)
    first, other = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "remove this sample" in first
    assert "sample 3 of own.npz" in first
    assert "per_channel" not in first
    assert "per_channel=true" in other
