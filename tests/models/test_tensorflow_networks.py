"""TensorFlow networks of several inputs, and with operators that tf2onnx or onnx2torch lack."""

import json
from pathlib import Path

import numpy as np
import pytest
from ai_edge_litert.schema_py_generated import TensorType

from resnet8ptq.backends.tflite import contents, predictor
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.models import conversion
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.tasks.scoring.distortion import sqnr_db
from tests.helpers import probe
from tests.helpers.configs import make_config
from tests.helpers.converted import record_of
from tests.helpers.factories import quantizer_of

pytestmark = pytest.mark.slow

# Makes Keras files, a SavedModel and a TFLite file, and converts each with records of both inputs.
PROBE = """
import json, os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
from pathlib import Path
import keras
import numpy as np
import tensorflow as tf
from keras import layers
from resnet8ptq.backends.tflite import converter
from resnet8ptq.core.records import pack
from resnet8ptq.data.dataset import Split
from tests.helpers.converted import attempt

folder, random = Path(sys.argv[1]), np.random.default_rng(0)
keras.utils.set_random_seed(0)
picture = keras.Input((8, 6, 3), name="picture")
tokens = keras.Input((5,), dtype="int32", name="tokens")
scaled = layers.Normalization(mean=[0.5, 0.1, 0.2], variance=[0.2, 0.3, 0.1])(picture)
seen = layers.GlobalMaxPooling2D()(layers.Conv2D(4, 3, activation="gelu")(scaled))
read = layers.LSTM(4)(layers.Embedding(20, 6)(tokens))
joined = layers.Concatenate()([seen, read])
outputs = [
    layers.Dense(3, activation="softmax", name="kind")(joined), layers.Dense(1, name="size")(joined)
]
network = keras.Model([picture, tokens], outputs)
network.save(folder / "list.keras")
keras.Model({"tokens": tokens, "picture": picture}, outputs).save(folder / "dict.keras")
network.export(folder / "saved", verbose=False)

rows = layers.Flatten()(layers.Embedding(20, 6)(tokens))
wide = layers.Resizing(11, 9, interpolation="nearest")(layers.Conv2D(4, 3, groups=2)(
    layers.Concatenate()([picture / 2, picture[:, ::-1]])
))
read_off = keras.ops.mean(wide, axis=(1, 2)) - keras.ops.max(wide[..., 1:], axis=(1, 2, 3))[:, None]
network = keras.Model(picture, layers.Dense(3)(layers.Activation("celu")(read_off)))
network.save(folder / "operators.keras")

plain = [picture, layers.Conv2D(6, 3, groups=3), layers.Flatten(), layers.Dense(3)]
tf.saved_model.save(keras.Sequential(plain), folder / "copies")  # with a copy of each variable

bent = keras.activations.gelu(layers.Concatenate()([seen, rows]), approximate=True)
still = keras.Model([picture, tokens], layers.Dense(2)(bent))
content = tf.lite.TFLiteConverter.from_keras_model(still).convert()
(folder / "still.tflite").write_bytes(content)

both = {
    "tokens": random.integers(0, 20, (12, 5)).astype(np.int32),
    "picture": random.normal(size=(12, 8, 6, 3)).astype(np.float32),
}
names = ("serving_default_tokens:0", "serving_default_picture:0")
named = {"still.tflite": dict(zip(names, both.values()))}
report = {}
for path in sorted(folder.iterdir()):
    samples = pack(named.get(path.name, both))
    one = path.name in ("operators.keras", "copies")
    report[path.name] = attempt(path, both["picture"] if one else samples)
report["one"] = attempt(folder / "list.keras", both["picture"])
(folder / "report.json").write_text(json.dumps(report))

steps, last = keras.Input((4, 3)), layers.Bidirectional(layers.GRU(5))
network = keras.Model(steps, layers.Dense(2)(last(layers.LSTM(6, return_sequences=True)(steps))))
network.save(folder / "loops.keras")
samples = random.normal(size=(50, 4, 3)).astype(np.float32)
written = converter.convert(folder / "loops.keras", Split(samples, None, "made"), True, True)
(folder / "loops.tflite").write_bytes(written)
np.savez(folder / "loops.npz", samples=samples, outputs=network(samples))
"""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what PROBE made."""
    folder = tmp_path_factory.mktemp("tensorflow")
    probe.run(PROBE, folder)
    return folder


@pytest.fixture(scope="module")
def report(kept: Path) -> dict[str, list[str]]:
    """The error's class and message of each attempt; empty ones without an error."""
    return json.loads((kept / "report.json").read_text())


@pytest.mark.parametrize("name", ["list.keras", "dict.keras", "saved"])
def test_inputs_and_outputs_have_the_names_of_the_network(kept, report, name):
    assert report[name] == ["", ""]
    record = record_of(kept, name)
    assert {str(tensor) for tensor in record.contract.inputs} == {
        *("picture [8, 6, 3] float32", "tokens [5] int32")
    }
    outputs = {tensor.shape for tensor in record.contract.outputs}
    assert (outputs, record.contract.batch) == ({(3,), (1,)}, None)
    assert max(record.parity.values()) < 1e-5


def test_a_tflite_file_takes_several_inputs(kept, report):
    assert report["still.tflite"] == ["", ""]
    record = record_of(kept, "still.tflite")
    assert [tensor.shape for tensor in record.contract.inputs] in (
        [(8, 6, 3), (5,)],
        [(5,), (8, 6, 3)],
    )
    assert not record.without_torch
    assert max(record.parity.values()) < 1e-5


@pytest.mark.parametrize("name", ["operators.keras", "copies"])
def test_calculations_with_tensors_are_taken(kept, report, name):
    assert report[name] == ["", ""]
    record = record_of(kept, name)
    assert not record.without_torch
    assert max(record.parity.values()) < 1e-5


def test_one_array_does_not_fill_two_inputs(kept, report):
    kind, message = report["one"]
    assert kind == "ModelError"
    assert message.startswith(
        f"{kept / 'list.keras'}: has 2 inputs (picture [8, 6, 3] float32, tokens [5] int32), and"
    )
    assert "the samples are one array; expected an array for each (data=arrays)" in message


def test_tflite_does_not_take_several_inputs(kept, report):
    record = record_of(kept, "list.keras")
    path = kept / "list.keras.converted" / conversion.FOLDED
    network = Fp32Model("own", kept / "list.keras", "", path, True, record)
    quantizer = quantizer_of(make_config("backend=tflite"))
    with pytest.raises(UnsupportedError, match=r"got a network of 2 inputs \("):
        quantizer.fit(network)


def test_tflite_runs_recurrent_layers_in_8_bits(kept):
    content, kept_values = (kept / "loops.tflite").read_bytes(), np.load(kept / "loops.npz")
    layers = [*contents.layers(contents.read_model(content))]
    assert {layer.output.type for layer in layers} == {TensorType.INT8}
    computed = predictor.open_run(content, 1)(kept_values["samples"])
    assert sqnr_db([kept_values["outputs"]], computed) > 20
