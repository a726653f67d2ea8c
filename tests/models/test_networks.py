"""Real networks of others, where `SHARED_NETWORKS` names a folder that holds them."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from resnet8ptq.models.conversion import Conversion, read_record
from resnet8ptq.tasks.scoring.outputs import LOGITS, PROBABILITIES, VALUES
from tests.helpers import probe

FOLDER = os.environ.get("SHARED_NETWORKS")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FOLDER, reason="needs SHARED_NETWORKS")]


@dataclass(frozen=True)
class Expected:
    """A network: samples as its data has them, and what it takes and returns."""

    samples: tuple[int, ...]
    takes: str
    gives: tuple[str, ...]
    final: str
    opset: int = 17  # of the file
    spread: float = 1.0  # standard deviation of the samples


NETWORKS = {
    "kws/kws_ref_model": Expected(
        (49, 10, 1), "input_1 [49, 10, 1] float32", ("dense [12] float32",), PROBABILITIES
    ),
    "vww/vww_96.h5": Expected(
        (96, 96, 3), "input [96, 96, 3] float32", ("probabilities [2] float32",), PROBABILITIES
    ),
    "ic02/pretrainedResnet_large_float.tflite": Expected(
        (32, 32, 3),
        "serving_default_input_5:0 [32, 32, 3] float32",
        ("StatefulPartitionedCall:0 [10] float32",),
        PROBABILITIES,
    ),
    "ad/ad01.h5": Expected((640,), "input [640] float32", ("dense_9 [640] float32",), VALUES),
    "ad/ad01_fp32.tflite": Expected(
        (640,), "input_1 [640] float32", ("Identity [640] float32",), VALUES
    ),
    "str_ww/str_ww_ref_model.h5": Expected(
        (30, 1, 40), "input [30, 1, 40] float32", ("probabilities [3] float32",), PROBABILITIES
    ),
    "mnist/mnist.onnx": Expected(
        (28, 28), "Input3 [1, 28, 28] float32", ("Plus214_Output_0 [10] float32",), LOGITS, 8
    ),
    "detectors/yolox_nano.onnx": Expected(
        (416, 416, 3),
        "images [3, 416, 416] float32",
        ("output [3549, 85] float32",),
        VALUES,
        11,
        60,
    ),
    "networks/mobilenet_v2_128_0.5.onnx": Expected(
        (128, 128, 3),
        "input_1:0 [3, 128, 128] float32",
        ("Identity:0 [2] float32",),
        PROBABILITIES,
        15,
    ),
    "networks/version-RFB-320.onnx": Expected(
        (240, 320, 3),
        "input [3, 240, 320] float32",
        ("scores [4420, 2] float32", "boxes [4420, 4] float32"),
        VALUES,
        9,
    ),
}
REFUSED = {
    "kws/kws_ref_model.tflite": ((49, 10, 1), "already quantized (int8 "),
    "kws/kws_ref_model_float32.tflite": ((49, 10, 1), "already quantized (int8 weights"),
    "ic02/pretrainedResnet_large_int8.tflite": ((32, 32, 3), "already quantized (int8 "),
    "vww/vww_96_int8.tflite": ((96, 96, 3), "already quantized (int8 "),
    "ad/ad01_int8.tflite": ((640,), "already quantized (int8 "),
    "mnist/mnist.onnx": ((32, 32, 3), "takes (1, 28, 28), the samples are (32, 32, 3)"),
}

# Converts all of them.
PROBE = """
import json, sys
from pathlib import Path
import numpy as np
from tests.helpers.converted import convert

folder, wanted = Path(sys.argv[1]), json.loads(sys.argv[3])
made, report = Path(sys.argv[2]), []
for index, (name, shape, spread) in enumerate(wanted):
    samples = spread * np.random.default_rng(0).normal(size=(6, *shape)).astype(np.float32)
    try:
        convert(folder / name, made / str(index), samples)
        report.append("")
    except Exception as error:
        report.append(f"{type(error).__name__}: {error}")
(made / "report.json").write_text(json.dumps(report))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Conversion | str]:
    """What came of each: the record, or the error."""
    assert FOLDER is not None
    folder = tmp_path_factory.mktemp("networks")
    wanted = [(name, network.samples, network.spread) for name, network in NETWORKS.items()]
    wanted += [(name, shape, 1.0) for name, (shape, _) in REFUSED.items()]
    probe.run(PROBE, FOLDER, folder, json.dumps(wanted))
    errors = json.loads((folder / "report.json").read_text())
    names = [*NETWORKS, *(f"refused {name}" for name in REFUSED)]
    return {
        name: error or read_record(folder / str(index))
        for index, (name, error) in enumerate(zip(names, errors, strict=True))
    }


@pytest.mark.parametrize("name", NETWORKS)
def test_a_real_network_is_taken_as_it_is(made, name):
    expected, record = NETWORKS[name], made[name]
    assert isinstance(record, Conversion), record
    assert [str(output) for output in record.contract.inputs] == [expected.takes]
    assert [str(output) for output in record.contract.outputs] == list(expected.gives)
    assert (record.final, record.source_opset) == (expected.final, expected.opset)
    assert record.contract.batch is None
    assert "BatchNormalization" not in record.preprocessing.operators_after
    assert set(record.parity) == {
        f"{framework}, {file}" for framework in ("onnx", "torch") for file in ("folded", "unfolded")
    }
    assert max(record.parity.values()) < 2e-5


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_baseline_or_does_not_fit_is_refused_in_one_line(made, name):
    message = made[f"refused {name}"]
    assert isinstance(message, str)
    assert message.startswith(f"ModelError: {Path(FOLDER or '') / name}: ")
    assert REFUSED[name][1] in message
    assert "\n" not in message
