"""Keras files that would have Keras run, read or ask for something: what came of each.

TensorFlow is only imported by a process of its own, as in the package.
"""

import io
import json
import zipfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import h5py
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.core.errors import ModelError
from resnet8ptq.models.gates import keras as gate
from tests.helpers import probe

Config = dict[str, Any]


FUNCTIONAL = "keras.src.models.functional"


def layer(kind: str, name: str, nodes: Any = (), **settings: Any) -> Config:
    return {
        "module": "keras.layers",
        "class_name": kind,
        "config": {"name": name, "dtype": "float32", **settings},
        "registered_name": None,
        "name": name,
        "inbound_nodes": list(nodes),
    }


def tensor(name: str) -> Config:
    config = {"shape": [None, 4], "dtype": "float32", "keras_history": [name, 0, 0]}
    return {"class_name": "__keras_tensor__", "config": config}


def call(*arguments: Any, **named: Any) -> Config:
    return {"args": list(arguments), "kwargs": named}


def network(*layers: Config) -> Config:
    """A network of one input with these layers; the last one's output is the network's."""
    taken = layer("InputLayer", "taken", batch_shape=[None, 4])
    config = {
        "name": "small",
        "trainable": True,
        "layers": [taken, *layers],
        "input_layers": [["taken", 0, 0]],
        "output_layers": [[layers[-1]["name"], 0, 0]],
    }
    return {"module": FUNCTIONAL, "class_name": "Functional", "config": config}


def calling(function: Any, argument: Any) -> Config:
    """A network in which a layer's activation is `function`, called with this."""
    asked = layer("Activation", "act", [call(inputs=argument)], activation=function)
    return network(asked, layer("Flatten", "flat", [call(tensor("taken"))]))


def named(name: str, module: str = "keras", **more: Any) -> Config:
    config = {"class_name": "function", "config": name, "registered_name": name}
    return {"module": module, **config, **more}


def weights() -> bytes:
    empty = io.BytesIO()
    h5py.File(empty, "w").close()
    return empty.getvalue()


def write(path: Path, config: Config) -> Path:
    if path.suffix == ".h5":
        with h5py.File(path, "w") as file:
            file.attrs["model_config"] = json.dumps(config)
            file.create_group("model_weights")
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("metadata.json", "{}")
            archive.writestr("config.json", json.dumps(config))
            archive.writestr("model.weights.h5", weights())
    return path


def good() -> Config:
    part = {"module": "keras.initializers", "class_name": "Zeros", "config": {}}
    dense = layer("Dense", "dense", [call(tensor("taken"))], units=3, bias_initializer=part)
    dense["build_config"] = {"input_shape": [None, 4]}
    relu = layer("Activation", "act", [call(tensor("dense"), mask=None)], activation="relu")
    return network(dense, relu)


# A file of each sort is loaded with the gate, and then by Keras without it: where the second does
# harm, the first shows that the gate is what prevents it.
PROBE = """
import json, os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
from pathlib import Path
import keras
import tensorflow as tf
from resnet8ptq.models.sources.keras import load_keras

folder = Path(sys.argv[1])


def plant(folder, target):  # a SavedModel whose loading writes a file
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        x = v1.placeholder(tf.float32, (None, 4))
        serve = v1.saved_model.predict_signature_def({"x": x}, {"y": x + 1.0})
        evil = tf.raw_ops.WriteFile(filename=str(target), contents="x")
        builder = v1.saved_model.Builder(str(folder))
        builder.add_meta_graph_and_variables(session, ["serve"], {"serve": serve}, main_op=evil)
        builder.save()


plant(folder / "saved", folder / "written")
L = keras.layers
taken = keras.Input((8, 8, 3), name="pixels")
x = L.Normalization(mean=[1, 2, 3], variance=[1, 1, 1])(L.Rescaling(1 / 255)(taken))
x = L.RandomFlip("horizontal")(x)
x = L.SeparableConv2D(4, 3, activation=L.LeakyReLU(0.1), depthwise_constraint="max_norm")(x)
y = L.DepthwiseConv2D(3, padding="same", depthwise_regularizer=keras.regularizers.L2(1e-4))(x)
x = L.Dropout(0.2, seed=1)(L.Add()([x, y]), training=False)
x = L.Conv2DTranspose(4, 2, strides=2, kernel_initializer=keras.initializers.HeNormal(3))(x)
z = L.Reshape((-1, 4))(L.Resizing(4, 4)(x) + 1.0)
z = L.LayerNormalization()(L.MultiHeadAttention(2, 4)(z, value=z))
z = L.Bidirectional(L.LSTM(2, return_sequences=True))(z)
z = L.TimeDistributed(L.Dense(3, activation=keras.activations.gelu))(z)
z = L.RNN(L.StackedRNNCells([L.GRUCell(3), L.SimpleRNNCell(2)]))(z)
z = L.EinsumDense("ab,bc->ac", output_shape=4)(z)
z = keras.Sequential([keras.Input((4,)), L.Dense(5, dtype="mixed_float16"), L.PReLU()])(z)
good = keras.Model({"pixels": taken}, {"a": L.Dense(2, activation="softmax")(z), "b": z})
good.compile("adam", "mse")
good.save(folder / "good.keras")
ASKING = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request")
shallow = keras.Sequential([taken, L.Conv2D(2, 3, padding="same"), L.Flatten(), L.Dense(2)])
shallow.save(folder / "good.h5")
asked, listening = [], True
sys.addaudithook(lambda event, _: listening and event in ASKING and asked.append(event))
report = {}
for path in sorted((*folder.glob("*.h5"), *folder.glob("*.keras"))):
    try:
        load_keras(path)
        report[path.name] = "loaded"
    except Exception as error:
        report[path.name] = str(error)
report["written"], report["asked"] = (folder / "written").exists(), len(asked)
for name in ("writes.keras", "downloads.keras"):
    try:
        keras.models.load_model(folder / name, compile=False, safe_mode=True)
    except Exception:
        pass
listening = False
report["without the gate"] = (folder / "written").exists(), len(asked)
(folder / "report.json").write_text(json.dumps(report))
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("keras")
    saved = str(folder / "saved")
    hostile = {
        "writes": calling(named("layers.TFSMLayer"), saved),
        "asks_a_bucket": calling(named("layers.TFSMLayer"), "gs://nobody-owns-this/model"),
        "downloads": calling(named("datasets.mnist.load_data"), "never-there.npz"),
        "dotted": network({**layer("Dense", "evil"), "class_name": "layers.Lambda"}),
    }
    for name, config in hostile.items():
        write(folder / f"{name}.keras", config)
        write(folder / f"{name}.h5", config)
    probe.run(PROBE, folder)
    made: Config = json.loads((folder / "report.json").read_text())
    return made


def test_what_a_file_would_write_or_ask_for_is_refused_and_does_not_happen(report):
    assert not report["written"]
    assert not report["asked"]
    refused = {name: text for name, text in report.items() if Path(name).suffix}
    assert refused.pop("good.keras") == refused.pop("good.h5") == "loaded"
    assert len(refused) == 8
    for name, text in refused.items():
        assert "layer '" in text, name
        assert "got " in text, name
        assert "expected " in text, name


def test_without_the_gate_it_does_happen(report):
    """Else the test above would prove nothing."""
    written, asked = report["without the gate"]
    assert written
    assert asked


# The grammar


def strange(config: Any) -> str | None:
    return next(gate._strange_config(config), None)


def test_a_network_of_known_layers_is_taken():
    assert strange(good()) is None


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("RandomErasing", {"factor": 1.0, "scale": [0.02, 0.33], "data_format": "channels_last"}),
        ("RandomPerspective", {"factor": 1.0, "interpolation": "bilinear", "fill_value": 0.0}),
        ("RandomHue", {"factor": 0.1, "value_range": [0, 255], "seed": None}),
        ("Log10", {}),
        ("Hypot", {}),
    ],
)
def test_augmentations_and_operators_of_one_value_are_taken(kind, settings):
    assert strange(network(layer(kind, "added", [call(tensor("taken"))], **settings))) is None


def test_a_layer_with_code_is_refused_with_other_formats():
    reason = strange(network(layer("Lambda", "own", [call(tensor("taken"))])))
    assert "class Lambda" in reason
    assert "SavedModel or an ONNX file" in reason


def change(path: str, value: Any) -> Callable[[], Config]:
    """Return the good network with another value somewhere."""

    def changed() -> Config:
        config = good()
        *outer, last = [int(key) if key.isdigit() else key for key in path.split("/")]
        inner: Any = config
        for key in outer:
            inner = inner[key]
        inner[last] = value
        return config

    return changed


def cut(start: Any) -> Config:
    """Return the slice `start:` of a tensor, as Keras writes it."""
    return {"class_name": "__slice__", "config": {"start": start, "stop": None, "step": None}}


def test_slices_of_tensors_are_taken():
    assert strange(change(f"{DENSE}/inbound_nodes/0/args/0", [cut(1), None, 0])()) is None


DENSE, ACT = "config/layers/1", "config/layers/2"
STRANGE = {
    "function of another module": change(f"{ACT}/config/activation", named("relu", "os")),
    "function by a dotted name": change(f"{ACT}/config/activation", named("layers.Lambda")),
    "loader": change(f"{ACT}/config/activation", named("get_file", "keras.utils")),
    "deserialize": change(f"{ACT}/config/activation", "deserialize"),
    "another registered name": change(
        f"{ACT}/config/activation", named("relu", registered_name="x>relu")
    ),
    "registered name of no text": change(f"{DENSE}/registered_name", ["Dense"]),
    "lambda": change(f"{ACT}/config/activation", {"class_name": "__lambda__", "config": {}}),
    "type": change(f"{DENSE}/config/units", {"class_name": "__typespec__", "config": []}),
    "CompositeTensor": change(f"{DENSE}/config/units", {"class_name": "CompositeTensor"}),
    "class": change(f"{DENSE}/class_name", "TFSMLayer"),
    "dotted class": change(f"{DENSE}/class_name", "layers.Dense"),
    "class of no text": change(f"{DENSE}/class_name", ["Dense"]),
    "module": change(f"{DENSE}/module", "keras.src.utils.file_utils"),
    "module of Keras Hub": change(f"{DENSE}/module", "keras_hub.layers"),
    "unknown key": change(f"{DENSE}/function_type", "lambda"),
    "key of a setting": change(f"{DENSE}/config/a:b", 1),
    "path": change(f"{DENSE}/config/units", "/etc/passwd"),
    "path as a name": change(f"{DENSE}/config/name", "/etc/passwd"),
    "address as a name": change(f"{DENSE}/name", "gs://bucket"),
    "name of no text": change(f"{DENSE}/config/name", {"class_name": "Lambda", "config": {}}),
    "argument": change(f"{DENSE}/inbound_nodes/0/args/0", "/etc"),
    "nested argument": change(f"{DENSE}/inbound_nodes/0/kwargs/mask", [[1, {"x": ["relu"]}]]),
    "object as argument": change(f"{DENSE}/inbound_nodes/0/args/0", named("relu")),
    "bytes as argument": change(
        f"{DENSE}/inbound_nodes/0/args/0", {"class_name": "__bytes__", "config": {"value": "/"}}
    ),
    "loop": change(f"{DENSE}/class_name", "WhileLoop"),
    "function over a tensor": change(f"{DENSE}/class_name", "Vectorize"),
    "slice of texts": change(f"{DENSE}/inbound_nodes/0/args/0", cut("/etc")),
    "slice of an object": change(f"{DENSE}/inbound_nodes/0/args/0", cut(named("relu"))),
    "slice with a class": change(
        f"{DENSE}/inbound_nodes/0/args/0", {"class_name": "__slice__", "config": named("relu")}
    ),
    "tensor with more": change(f"{DENSE}/inbound_nodes/0/args/0/config/x", "y"),
    "tensor of texts": change(f"{DENSE}/inbound_nodes/0/args/0/config/dtype", "string"),
    "tensor without a layer": change(f"{DENSE}/inbound_nodes/0/args/0/config/keras_history", None),
    "argument of Keras 2": change(f"{DENSE}/inbound_nodes/0", [["taken", 0, 0, {"mask": "/etc"}]]),
    "node of no list": change(f"{DENSE}/inbound_nodes/0", "/etc"),
    "nodes of no list": change(f"{DENSE}/inbound_nodes", "/etc"),
    "settings of no object": change(f"{DENSE}/config", "/etc"),
    "settings with a class": change(f"{DENSE}/config/class_name", "relu"),
    "settings with a module": change(f"{DENSE}/config/module", "relu"),
    "build_config": change(f"{DENSE}/build_config/input_shape", "/etc"),
    "policy": change(
        f"{DENSE}/config/dtype", {"class_name": "DTypePolicy", "config": {"name": "int8_from_x"}}
    ),
    "outputs": change("config/output_layers", "/etc"),
    "no network": lambda: {"class_name": "function", "config": "relu", "module": "builtins"},
}


@pytest.mark.parametrize("name", STRANGE)
def test_what_is_not_known_is_refused(name):
    reason = strange(STRANGE[name]())
    assert reason is not None
    assert "got " in reason
    assert "expected " in reason


TEXTS = st.sampled_from(
    ["relu", "Dense", "same", "/etc/passwd", "gs://x/y", "layers.Lambda", "Lambda", "TFSMLayer"]
) | st.text(max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["class_name", "config", "module", "name", "x"]), inner)
    ),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where each value of nested JSON lies."""
    yield path
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(item, (*path, key))


def texts(value: Any, key: Any = None) -> Iterator[tuple[Any, str]]:
    """Yield each text with the key that it stands under."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from texts(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from texts(item, key)


@given(st.data())
def test_a_changed_network_is_refused_or_holds_known_texts_alone(data):
    config = good()
    *outer, last = data.draw(st.sampled_from([path for path in places(config) if path]))
    inner: Any = config
    for key in outer:
        inner = inner[key]
    inner[last] = data.draw(VALUES)
    if strange(deepcopy(config)) is not None:
        return
    known = {
        "class_name": gate.CLASSES | {"__keras_tensor__", "__tuple__", "function"},
        "module": frozenset(gate.MODULES),
        "registered_name": gate.CLASSES | gate.FUNCTIONS | {"function"},
    }
    names = ("name", "keras_history", "input_layers", "output_layers", "inbound_nodes")
    for key, text in texts(config):
        if key in names:
            assert not set(text) & set("/:\\\0\n")
        else:
            assert text in known.get(key, gate.WORDS), key


# Two readers of one file


def test_what_keras_loads_is_what_was_checked(tmp_path):
    """A file that is an archive at its end and HDF5 after its first bytes, or the reverse."""
    hidden, shown = tmp_path / "hidden.keras", tmp_path / "shown.h5"
    write(hidden, STRANGE["class"]())
    write(shown, good())
    both = tmp_path / "model.keras"
    both.write_bytes(shown.read_bytes() + hidden.read_bytes())
    assert zipfile.is_zipfile(both)
    folder = tmp_path / "copy"
    folder.mkdir()
    copy = gate.read_keras(both).write(folder)
    assert copy.suffix == ".h5"
    with h5py.File(copy) as file:
        assert json.loads(file.attrs["model_config"]) == good()
    with zipfile.ZipFile(both, "w") as archive:
        archive.writestr("config.json", json.dumps(STRANGE["class"]()))
    archived = both.read_bytes()
    padded = archived + b"\0" * (512 - len(archived) % 512)
    while len(padded) & (len(padded) - 1):  # HDF5 may begin at 512, 1024, 2048, ...
        padded += b"\0" * 512
    both.write_bytes(padded + shown.read_bytes())
    assert h5py.is_hdf5(both)
    with pytest.raises(ModelError):
        gate.read_keras(both)


def test_of_an_archive_layers_and_weights_alone_reach_keras(tmp_path):
    path = write(tmp_path / "model.keras", {**good(), "compile_config": {"loss": "evil"}})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("assets/layers/dense/vocabulary.txt", "x")
    folder = tmp_path / "copy"
    folder.mkdir()
    with zipfile.ZipFile(gate.read_keras(path).write(folder)) as archive:
        assert set(archive.namelist()) == {"metadata.json", "config.json", "model.weights.h5"}
        assert json.loads(archive.read("config.json")) == good()


@pytest.mark.parametrize(
    ("members", "kind"),
    [
        (["a/data.pkl", "a/constants.pkl", "a/code/__torch__.py"], "a TorchScript file"),
        (["a/data.pkl", "a/data/0"], "pickled by torch.save"),
        (["a/archive_format", "a/models/model.json"], "an exported program"),
        (["x.txt"], "a zip archive without config.json"),
    ],
)
def test_an_archive_of_something_else_is_reported_by_its_kind(tmp_path, members, kind):
    path = tmp_path / "model.jit"
    with zipfile.ZipFile(path, "w") as archive:
        for name in members:
            archive.writestr(name, "x")
    with pytest.raises(ModelError, match=f"{kind}.*expected "):
        gate.read_keras(path)
