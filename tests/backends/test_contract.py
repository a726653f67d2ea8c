"""Checks of a written file that all backends share."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from resnet8ptq.backends.contract import Artifact, run_once
from resnet8ptq.core.errors import QuantizationError, UnsupportedError
from resnet8ptq.data.dataset import Split

SAMPLES = Split(np.zeros((3, 4), np.float32), None, "made")
ARTIFACT = Artifact(Path("model.onnx"), 1)


def fail(*_):
    raise RuntimeError("no kernel")


def quantizer(load):
    backend = SimpleNamespace(name="onnx")
    config = SimpleNamespace(backend=backend)
    return SimpleNamespace(config=config, runtime=SimpleNamespace(threads=1), load=load)


@pytest.mark.parametrize("load", [fail, lambda *_: SimpleNamespace(predict=fail)])
def test_a_valid_file_that_the_framework_does_not_load_or_run_is_unsupported(load):
    with pytest.raises(UnsupportedError, match="cannot run its quantized file"):
        run_once(quantizer(load), ARTIFACT, SAMPLES, read=lambda _: None)


def test_an_invalid_file_is_a_fault_of_the_quantizer():
    with pytest.raises(QuantizationError, match="wrote an invalid file"):
        run_once(quantizer(fail), ARTIFACT, SAMPLES, read=fail)
