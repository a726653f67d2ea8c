"""What the model card says of a run."""

from pathlib import Path

import pytest
import yaml

from resnet8ptq.deploy import card
from resnet8ptq.deploy.source import SourceRun
from tests.helpers import cells
from tests.helpers.configs import make_config

MADE = [
    ({"dtype": "fp32"}, "net in FP32, not quantized", set()),
    ({"method": "qat"}, "net quantized with fine-tuning", {"quantization-aware-training"}),
    ({"method": "static"}, "net quantized after training", {"post-training-quantization"}),
]


def source_of(**params: str) -> SourceRun:
    record = cells.record("a", cells.predictions(), dataset="pets", **params)
    config = make_config("data=folder", "data.root=.", "model.name=net", "model.path=net.onnx")
    return SourceRun(record, config, Path("model.onnx"))


@pytest.mark.parametrize(("params", "says", "tags"), MADE)
def test_card_says_how_the_model_was_made(params, says, tags):
    source = source_of(**params)
    task = source.record.task
    assert card._summary(source, task).startswith(says)
    header = yaml.safe_load(card._header(source, task, "net", inputs=()))
    ways = {"quantization-aware-training", "post-training-quantization"}
    assert ways & {*header["tags"]} == tags
    assert header["model-index"][0]["results"][0]["dataset"]["name"] == "pets"


def test_card_names_the_settings_of_the_backend():
    record = source_of(**{"backend": "torch", "backend.flow": "pt2e", "calib.table": "mine"}).record
    settings = card._say_settings(record, {"calib.table"})
    assert "backend=torch" in settings and "backend.flow=pt2e" in settings
    assert "mine" not in settings


def test_card_has_the_size_of_the_file_beside_it():
    """A converted file, such as one of the ORT format, has another size than the measured one."""
    record = source_of().record
    assert record.size_bytes == 100_000
    rows = {title: own for title, own, _ in card._measured(record.task, record, size=123_456)}
    assert rows["size, kB"] == "123.456"


@pytest.mark.parametrize(("value", "shown"), [(25.0, "25"), (1.5, "1.5"), (0.0001, "0"), (0, "")])
def test_a_number_does_not_end_in_a_point(value, shown):
    assert card._short(value) == shown
