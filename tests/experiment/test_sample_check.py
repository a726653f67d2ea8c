"""A damaged calibration sample is named before a run quantizes, in every framework."""

import logging

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from resnet8ptq.calibration.activations import Activations
from resnet8ptq.calibration.outliers import Outliers
from resnet8ptq.core.errors import QuantizationError
from resnet8ptq.core.machine import Runtime
from resnet8ptq.data.dataset import Split
from resnet8ptq.experiment import run_warnings
from resnet8ptq.experiment.sample_check import calibrates, check_dynamic, check_inputs
from resnet8ptq.graph.layers import weight_layers
from tests.helpers.calling import call
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


ATTENTION = """<ir_version: 8, opset_import: ["" : 17]>
network (float[N, 3, 4] x) => (float[N, 4] y)
{ turned = Transpose<perm = [0, 2, 1]>(x)
  scores = MatMul(x, turned)
  masked = Add(scores, mask)
  shares = Softmax(masked)
  mixed = MatMul(shares, x)
  layer = MatMul(mixed, weights)
  y = Gather<axis = 1>(layer, first) }"""


def build_attention(folder, mask):
    proto = parser.parse_model(ATTENTION)
    constants = {"mask": np.float32(mask), "weights": np.eye(4, dtype="f4"), "first": np.array(0)}
    for name, values in constants.items():
        proto.graph.initializer.append(numpy_helper.from_array(values, name))
    for node in proto.graph.node:
        node.name = f"node_{node.output[0]}"
    path = folder / "network.onnx"
    onnx.save(proto, path)
    return path


CAUSAL = [[0, -np.inf, -np.inf], [0, 0, -np.inf], [0, 0, 0]]
PADDED = [[0, 0, -np.inf], [0, 0, -np.inf], [-np.inf] * 3]  # the last row takes nothing
TOKENS = Split(np.random.default_rng(0).normal(size=(20, 3, 4)).astype(np.float32), None, "own")
SAYS = "Softmax node_shares is NaN where its mask is -inf for a whole row"


def test_a_mask_that_hides_a_whole_row_is_named_with_ranges_at_inference(tmp_path):
    def check(mask):
        proto = onnx.load(build_attention(tmp_path, mask))
        check_dynamic(proto, weight_layers(proto.graph).values(), TOKENS, threads=1)

    check(CAUSAL)
    with pytest.raises(QuantizationError, match=f"^MatMul node_layer takes NaN .*: mixed; {SAYS}"):
        check(PADDED)


def test_a_mask_that_hides_a_whole_row_is_named_by_a_calibration(tmp_path):
    calib = make_config("data=shapes").calib
    path = build_attention(tmp_path, PADDED)
    activations = Activations(path, TOKENS, calib, Runtime(tmp_path / "cache", 1))
    with pytest.raises(QuantizationError, match=SAYS):
        activations.find_around([])


def test_other_nan_is_not_blamed_on_a_mask(tmp_path):
    proto = onnx.load(build_attention(tmp_path, CAUSAL))
    [node] = [node for node in proto.graph.node if node.output[0] == "masked"]
    node.op_type = "Log"  # of negative scores too
    del node.input[1:]
    with pytest.raises(QuantizationError, match=r"try nodes_to_exclude=\[node_layer\]"):
        check_dynamic(proto, weight_layers(proto.graph).values(), TOKENS, threads=1)


@pytest.mark.slow
def test_a_run_of_fp32_beside_dynamic_ones_may_have_nan(tmp_path):
    path = build_attention(tmp_path, PADDED)
    np.savez(tmp_path / "x.npz", x=TOKENS.stored)
    words = (f"model.path={path}", f"data.root={tmp_path / 'x.npz'}", "backend=onnx")
    done = call(tmp_path, *words, "method=dynamic", "dtype=fp32", "latency.enabled=false")
    assert done.code == 0, done.err
    [run] = done.runs
    assert run.data.tags["status"] == "ok"
