"""A file whose optimized graph computes something else is named, with the optimizer."""

from functools import partial

import numpy as np
import onnx
import onnxruntime
import pytest

from resnet8ptq.backends.onnx import checking
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.session import open_runner


def test_a_wrong_optimizer_is_found_and_named(caplog):
    samples = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)

    def open_file(optimized=True, without=()):
        is_wrong = optimized and "Pad_Fusion" not in without
        return lambda batch: [batch * (2 if is_wrong else 1)]

    params = checking.compare_kernels(
        "it.onnx", open_file, partial(open_file, optimized=False), Split(samples, None, "made")
    )
    assert float(params["kernels_sqnr_db"]) < checking.LIMIT_DB
    assert "it.onnx" in caplog.text and "Pad_Fusion" in caplog.text


def test_an_optimizer_that_makes_nan_is_named(caplog):
    samples = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)

    def open_file(optimized=True, without=()):
        is_wrong = optimized and "Pad_Fusion" not in without
        return lambda batch: [batch * np.float32(np.nan if is_wrong else 1)]

    def open_fp32():
        return lambda batch: [batch + 0.1]

    checking.compare_kernels("it.onnx", open_file, open_fp32, Split(samples, None, "made"))
    assert "it.onnx" in caplog.text and "Pad_Fusion" in caplog.text


def test_a_right_file_is_not_warned_about(caplog):
    samples = np.random.default_rng(0).random((20, 1, 4, 4), np.float32)

    def open_file(optimized=True, without=()):
        return lambda batch: [batch]

    assert (
        checking.compare_kernels("it.onnx", open_file, open_file, Split(samples, None, "made"))
        == {}
    )
    assert not caplog.messages


# ONNX Runtime 1.31 makes the zeros of the Pad the pool's own padding, below all negative values.
PADDED = """
<ir_version: 8, opset_import: ["": 17]>
padded (float[n, 1, 4, 4] x) => (float[n, 1, 5, 5] y)
<int64[8] pads = {0, 0, 1, 1, 0, 0, 1, 1}, float zero = {0.0}> {
    wide = Pad(x, pads, zero)
    y = MaxPool<kernel_shape = [2, 2]>(wide)
}
"""


def open_padded(tmp_path):
    path = tmp_path / "padded.onnx"
    onnx.save(onnx.parser.parse_model(PADDED), path)
    return partial(open_runner, str(path), 1)


@pytest.mark.skipif(
    [int(part) for part in onnxruntime.__version__.split(".")[:2]] >= [1, 32],
    reason="ONNX Runtime 1.32 has mended its fault",
)
def test_the_wrong_optimizer_of_onnxruntime_1_31_is_named(tmp_path, caplog):
    negative = -1 - np.random.default_rng(0).random((20, 1, 4, 4), np.float32)
    open_file = open_padded(tmp_path)
    params = checking.compare_kernels(
        "it.onnx", open_file, partial(open_file, optimized=False), Split(negative, None, "made")
    )
    assert float(params["kernels_sqnr_db"]) < checking.LIMIT_DB
    assert "it.onnx" in caplog.text and "Pad_Fusion" in caplog.text


@pytest.mark.parametrize("faulty", [0.05, 0.5])
def test_noise_below_that_of_quantization_is_not_warned_about(faulty, caplog):
    samples = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    noise = np.random.default_rng(1).normal(size=samples.shape)

    def open_file(optimized=True, without=()):
        return lambda batch: [batch + (faulty * noise if optimized else 0)]

    def open_fp32():
        return lambda batch: [batch + 0.2 * noise]

    checking.compare_kernels("it.onnx", open_file, open_fp32, Split(samples, None, "made"))
    assert bool(caplog.messages) == (faulty > 0.2)


def test_fp32_does_not_run_where_the_kernels_are_near():
    samples = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)

    def open_file(optimized=True, without=()):
        return lambda batch: [batch + (1e-4 if optimized else 0)]

    def open_fp32():
        raise AssertionError("work was done")

    params = checking.compare_kernels("it.onnx", open_file, open_fp32, Split(samples, None, "made"))
    assert float(params["kernels_sqnr_db"]) > checking.LIMIT_DB
