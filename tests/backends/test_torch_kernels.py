"""torch's integer kernels, compared with the arithmetic that a quantized module defines."""

import logging

import numpy as np
import pytest
import torch
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

from resnet8ptq.backends import kernel_noise
from resnet8ptq.backends.torch import checking, torchscript

SAMPLES = np.random.default_rng(0).normal(size=(8, 3, 6, 6)).astype(np.float32)


@pytest.fixture
def prepared(monkeypatch):
    """A calibrated module, whose calibration samples are `SAMPLES`."""
    with torchscript.known_warnings():
        yield from _prepare(monkeypatch)


def _prepare(monkeypatch):
    monkeypatch.setattr(kernel_noise, "draw_batch", lambda _: SAMPLES)
    torch.manual_seed(0)
    layers = (torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64, 5))
    module = torch.nn.Sequential(*layers).eval()
    example = torch.from_numpy(SAMPLES)
    observed = prepare_fx(module, get_default_qconfig_mapping(), example)
    observed(example)
    yield observed


class Wrong(torch.nn.Module):
    """Kernels that return other values."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -self.module(x)


@pytest.mark.parametrize("engine", ["onednn", "fbgemm"])
def test_kernels_with_more_noise_than_the_quantization_get_a_warning(
    prepared, monkeypatch, caplog, engine
):
    monkeypatch.setattr(checking, "convert_fx", lambda module: Wrong(convert_fx(module)))
    monkeypatch.setattr(torch.backends.quantized, "engine", engine)
    with caplog.at_level(logging.WARNING):
        assert isinstance(checking.convert_checked(prepared, None), Wrong)
    mend = {"onednn": "backend.engine=fbgemm", "fbgemm": "backend=onnx"}[engine]
    assert f"the integer kernels of {engine} add more noise" in caplog.text
    assert mend in caplog.text


def test_right_kernels_get_no_warning(prepared, caplog):
    with caplog.at_level(logging.WARNING):
        quantized = checking.convert_checked(prepared, None)
    assert quantized(torch.from_numpy(SAMPLES)).shape == (8, 5)
    assert not caplog.text
