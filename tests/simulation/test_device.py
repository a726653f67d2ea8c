import pytest
import torch

from resnet8ptq.core.errors import ConfigError
from resnet8ptq.simulation.device import find_device


@pytest.mark.parametrize(
    ("setting", "has_gpu", "expected"),
    [
        ("auto", True, "cuda"),
        ("auto", False, "cpu"),
        ("cpu", True, "cpu"),
        ("cuda", True, "cuda"),
    ],
)
def test_auto_takes_a_gpu_only_where_torch_sees_one(setting, has_gpu, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert find_device(setting).type == expected


def test_cuda_without_a_gpu_names_the_key_and_a_mend(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^device: got cuda, .*try device=auto$"):
        find_device("cuda")
