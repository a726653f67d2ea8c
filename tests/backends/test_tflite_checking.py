"""LiteRT's kernels are compared with its reference kernels where these run the file."""

import numpy as np

from resnet8ptq.backends.tflite import checking
from resnet8ptq.data.dataset import Split

SAMPLES = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


def run(batch):
    return [batch]


def test_a_file_that_the_reference_kernels_lack_is_not_an_error(caplog):
    caplog.set_level("INFO")

    def open_file(reference):
        if reference:
            raise ValueError("Didn't find op for builtin opcode 'ELU' version '1'")
        return run

    split = Split(SAMPLES, None, "made")
    assert checking.compare_kernels("it.tflite", open_file, lambda: run, split) == {}
    [line] = caplog.messages
    assert "it.tflite" in line and "'ELU'" in line


def test_wrong_kernels_are_warned_about(caplog):
    def open_file(reference):
        return run if reference else lambda batch: [batch * 2]

    split = Split(SAMPLES, None, "made")
    params = checking.compare_kernels("it.tflite", open_file, lambda: run, split)
    assert float(params["kernels_sqnr_db"]) < checking.LIMIT_DB
    assert "it.tflite" in caplog.text


def test_wrong_reference_kernels_are_not_blamed_on_this_cpu(caplog):
    def open_file(reference):
        return (lambda batch: [batch * 0.01]) if reference else run

    split = Split(SAMPLES, None, "made")
    checking.compare_kernels("it.tflite", open_file, lambda: run, split)
    [line] = caplog.messages
    assert "reference kernels compute it wrongly" in line
