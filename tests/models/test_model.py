"""Which network is taken, what is refused, and what conversion promises.

TensorFlow is only imported by processes of their own, as in the package.
"""

import json
import os
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pooch
import pytest
import torch
from numpy.typing import NDArray

from resnet8ptq.config.schema import ModelConfig
from resnet8ptq.core import files, isolation
from resnet8ptq.core.errors import ModelError
from resnet8ptq.data import registry, shapes
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.graph import torch_module, torch_operators
from resnet8ptq.graph.torch_module import load_torch_module
from resnet8ptq.models import conversion, model, normalization
from resnet8ptq.models.network_path import SHA256, URL
from resnet8ptq.tasks.scoring.outputs import PROBABILITIES
from tests.helpers import probe
from tests.helpers.configs import make_config
from tests.helpers.converted import record_of

# Makes Keras files, tries to convert each, and writes down what came of it.
PROBE = """
import json, os, sys, zipfile
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
from pathlib import Path
import h5py
import keras
import numpy as np
from tests.helpers.converted import attempt
from resnet8ptq.core.errors import PtqError

keras.utils.clear_session()  # which numbers the layers
folder = Path(sys.argv[1])
target = folder / "target"
layers = keras.layers
# Evaluated, so that it has neither closure nor defaults: Keras can then store and load it.
hostile = eval(f"lambda x: (__import__('pathlib').Path({str(target)!r}).touch(), x)[1]")


def build(shape=(32, 32, 3), classes=10, first=None):
    return keras.Sequential([
        keras.Input(shape),
        *([first] if first is not None else []),
        layers.GlobalAveragePooling2D(),
        layers.Dense(classes, activation="softmax"),
    ])


def with_value(value):
    model = build()
    kernel, bias = model.get_weights()
    kernel[0, 0] = value
    model.set_weights([kernel, bias])
    return model


def with_two_inputs():
    inputs = [keras.Input((32, 32, 3)), keras.Input((32, 32, 3))]
    return keras.Model(inputs, build()(layers.Add()(inputs)))


def with_two_outputs():
    taken = keras.Input((32, 32, 3))
    mean = layers.GlobalAveragePooling2D(name="mean")(taken)
    return keras.Model(taken, [layers.Dense(4, activation="softmax", name="kind")(mean), mean])


def trained():  # a part of it alone: Keras compiles that as it loads it
    inner = build()
    inner.compile("adam", "categorical_crossentropy", metrics=["accuracy"])
    taken = keras.Input((32, 32, 3))
    return keras.Model(taken, inner(taken))


def with_hostile_loss(folder):
    parts = {}
    for name in ("trained.keras", "lambda.keras"):
        with zipfile.ZipFile(folder / name) as archive:
            parts[name] = {each: archive.read(each) for each in archive.namelist()}
    config, code = (json.loads(part["config.json"]) for part in parts.values())
    [function] = [
        layer["config"]["function"]
        for layer in code["config"]["layers"] if layer["class_name"] == "Lambda"
    ]
    config["config"]["layers"][1]["compile_config"]["loss"] = function
    with zipfile.ZipFile(folder / "trained_by_code.keras", "w") as archive:
        for name, content in parts["trained.keras"].items():
            changed = json.dumps(config) if name == "config.json" else content
            archive.writestr(name, changed)


def as_keras_2(path):  # `groups` where Keras 2 wrote it
    grouped = keras.Sequential(name="net_0.25", layers=[
        keras.Input((32, 32, 3)),
        layers.DepthwiseConv2D(3),
        layers.Conv2DTranspose(4, 3),
        layers.GlobalAveragePooling2D(),
        layers.Dense(10, activation="softmax"),
    ])
    grouped.save(path)
    with h5py.File(path, "r+") as file:
        config = json.loads(file.attrs["model_config"])
        for layer in config["config"]["layers"][1:3]:
            layer["config"]["groups"] = 1
        file.attrs["model_config"] = json.dumps(config)


models = {
    "good.h5": build(),
    "good.keras": build(),
    "small_images.keras": build(shape=(28, 28, 3)),
    "grey.keras": build(shape=(32, 32, 1)),
    "logits.keras": keras.Sequential([
        keras.Input((32, 32, 3), name="pixels"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(9, name="scores"),
    ]),
    "free_sizes.keras": build(shape=(None, None, 3)),
    "fixed_batch.keras": keras.Sequential([
        keras.Input(batch_shape=(4, 32, 32, 3)),
        layers.GlobalAveragePooling2D(),
        layers.Dense(10, activation="softmax"),
    ]),
    "two_outputs.keras": with_two_outputs(),
    "trained.keras": trained(),
    "nan.h5": with_value(np.nan),
    "infinite.keras": with_value(np.inf),
    "two_inputs.keras": with_two_inputs(),
    "without_shape.keras": keras.Sequential([
        layers.GlobalAveragePooling2D(), layers.Dense(10, activation="softmax")
    ]),
    "loop.keras": keras.Sequential([  # a loop in ONNX, which onnx2torch does not know
        keras.Input((32, 32, 3)),
        layers.AveragePooling2D(8),
        layers.Reshape((16, 3)),
        layers.GRU(2),
        layers.Dense(10, activation="softmax"),
    ]),
    "lambda.h5": build(first=layers.Lambda(hostile)),
    "lambda.keras": build(first=layers.Lambda(hostile)),
}
for name, built in models.items():
    built.save(folder / name)
as_keras_2(folder / "keras_2.h5")
with_hostile_loss(folder)
models["good.h5"].save_weights(folder / "only.weights.h5")
mixed = keras.Sequential([
    keras.Input((32, 32, 3)),
    layers.GlobalAveragePooling2D(dtype="mixed_float16"),
    layers.Dense(10, dtype="mixed_float16"),
])
mixed.save(folder / "mixed.keras")
(folder / "cut.h5").write_bytes((folder / "good.h5").read_bytes()[:5000])
(folder / "cut.keras").write_bytes((folder / "good.keras").read_bytes()[:500])

images = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3)).astype(np.float32)
report = {}
for path in sorted([*folder.glob("*.h5"), *folder.glob("*.keras")]):
    target.unlink(missing_ok=True)
    report[path.name] = [*attempt(path, images), target.exists()]

for name in ("lambda.h5", "lambda.keras"):  # unguarded, it does act
    target.unlink(missing_ok=True)
    keras.models.load_model(folder / name, compile=False, safe_mode=False)
    report[f"{name}, unguarded"] = ["", "", target.exists()]
(folder / "report.json").write_text(json.dumps(report))
"""

Report = dict[str, tuple[str, str, bool]]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the files that PROBE made."""
    folder = tmp_path_factory.mktemp("keras")
    probe.run(PROBE, folder)
    return folder


@pytest.fixture(scope="module")
def report(kept: Path) -> Report:
    """What came of each file: the error's class and message, and whether hostile code ran."""
    return json.loads((kept / "report.json").read_text())


def load(shapes: Dataset, cache_root: Path, path: Path | str) -> model.Fp32Model:
    return model.load_network(ModelConfig(name="resnet8", path=str(path)), shapes, cache_root)


def test_a_conversion_is_announced(shapes, shapes_model, cache_root, tmp_path, monkeypatch, caplog):
    """And what is taken from the cache is not."""

    def stop(*_: object, **__: object) -> None:
        raise ModelError("stopped")

    caplog.set_level("INFO")
    monkeypatch.setattr(model.isolation, "call", stop)
    load(shapes, cache_root, shapes_model.source)
    assert "converting" not in caplog.text
    with pytest.raises(ModelError, match="stopped"):
        load(shapes, tmp_path, shapes_model.source)
    assert f"converting the network: {shapes_model.source}" in caplog.messages


def one_line(error: pytest.ExceptionInfo[ModelError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# Refused before Keras sees it


def test_a_missing_file_is_refused_by_its_key(shapes, cache_root, tmp_path):
    with pytest.raises(ModelError) as caught:
        load(shapes, cache_root, tmp_path / "gone.h5")
    assert one_line(caught).startswith(f"model.path: got {tmp_path / 'gone.h5'}, no such file")


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "is empty"), (b"weights = 1\n", "is not a model"), (b"\x89HDF", "is not a model")],
)
def test_a_file_that_is_no_model_is_refused_by_its_key(shapes, cache_root, tmp_path, content, says):
    path = tmp_path / "model.h5"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        load(shapes, cache_root, path)
    message = one_line(caught)
    assert message.startswith(f"model.path: {path} ")
    assert says in message


def test_a_file_of_weights_alone_is_refused_with_the_settings_that_take_it(
    shapes, cache_root, tmp_path
):
    weights = torch.nn.Linear(2, 2).state_dict()
    torch.save(weights, tmp_path / "weights.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ModelError, match=r"is not a model; .*model\.module=.*model\.state_dict="):
        load(shapes, cache_root, tmp_path / "weights.pt")


def test_values_of_inputs_are_refused_for_other_formats(cache_root, tmp_path):
    """The check of a Keras file takes no values, and ended in a TypeError."""
    path = tmp_path / "network.h5"
    path.write_bytes(b"\x89HDF\r\n\x1a\n")
    config = ModelConfig(path=str(path), inputs={"rate": 16000})
    with pytest.raises(ModelError, match=r"model\.inputs: .*expected an \.onnx file"):
        model.check_file(config, path, cache_root)


def test_a_folder_is_refused_by_its_key(shapes, cache_root, tmp_path):
    with pytest.raises(ModelError, match=r"^model\.path: "):
        load(shapes, cache_root, tmp_path)


def cifar10_of(shapes: Dataset) -> Dataset:
    """The embedded set under the other's name, which asks for the other's network."""
    return Dataset("cifar10", shapes.class_names, shapes.train, shapes.test)


def test_a_variable_that_names_no_file_is_refused_by_its_name(
    shapes, cache_root, tmp_path, monkeypatch
):
    monkeypatch.setenv("RESNET8_H5", str(tmp_path / "gone.h5"))
    with pytest.raises(ModelError, match=r"^\$RESNET8_H5: got .*gone\.h5, no such file"):
        model.load_network(ModelConfig(name="resnet8"), cifar10_of(shapes), cache_root)


def test_the_setting_wins_over_the_variable(shapes, cache_root, tmp_path, monkeypatch):
    monkeypatch.setenv("RESNET8_H5", str(tmp_path / "variable.h5"))
    config = ModelConfig(name="resnet8", path=str(tmp_path / "setting.h5"))
    with pytest.raises(ModelError, match=r"setting\.h5"):
        model.load_network(config, cifar10_of(shapes), cache_root)


def test_without_any_the_message_says_how_to_have_one(shapes, cache_root, monkeypatch):
    def refuse(*_: object, **__: object) -> str:
        raise ConnectionError("no network\nin tests")

    monkeypatch.delenv("RESNET8_H5", raising=False)
    monkeypatch.setattr(pooch, "retrieve", refuse)
    with pytest.raises(ModelError) as caught:
        model.load_network(ModelConfig(name="resnet8"), cifar10_of(shapes), cache_root)
    message = one_line(caught)
    for part in ("model.path", "$RESNET8_H5", URL, "data=shapes"):
        assert part in message


# Refused by the conversion


@pytest.mark.slow
def test_random_bytes_behind_the_magic_are_refused_in_one_line(shapes, cache_root, tmp_path):
    path = tmp_path / "model.h5"
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + np.random.default_rng(0).bytes(4096))
    with pytest.raises(ModelError) as caught:
        load(shapes, cache_root, path)
    assert str(path) in one_line(caught)


@pytest.mark.slow
def test_sound_models_are_converted(kept, report):
    for name in ("good.h5", "good.keras"):
        assert report[name] == ["", "", False]
        made = {path.name for path in (kept / f"{name}.converted").iterdir()}
        assert made == {conversion.UNFOLDED, conversion.FOLDED, conversion.RECORD}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("small_images.keras", "takes (28, 28, 3), the samples are (32, 32, 3)"),
        ("grey.keras", "takes (32, 32, 1), the samples are (32, 32, 3)"),
        ("nan.h5", "NaN or infinity in"),
        ("infinite.keras", "NaN or infinity in"),
        (
            "two_inputs.keras",
            ", and the samples are one array; expected an array for each (data=arrays)",
        ),
        ("without_shape.keras", ""),
        ("only.weights.h5", "holds weights and no layers"),
        ("cut.h5", "Keras refuses it"),
        ("cut.keras", "Keras refuses it"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_by_its_file(kept, report, name, says):
    kind, message, _ = report[name]
    assert kind == "ModelError"
    assert message.startswith(f"{kept / name}: ")
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "takes", "gives", "final"),
    [
        ("good.keras", "input [32, 32, 3] float32", ["probabilities [10] float32"], PROBABILITIES),
        (
            "trained.keras",
            "input [32, 32, 3] float32",
            ["probabilities [10] float32"],
            PROBABILITIES,
        ),
        (
            "trained_by_code.keras",
            "input [32, 32, 3] float32",
            ["probabilities [10] float32"],
            PROBABILITIES,
        ),
        ("keras_2.h5", "input [32, 32, 3] float32", ["probabilities [10] float32"], PROBABILITIES),
        ("free_sizes.keras", "input [32, 32, 3] float32", ["probabilities [10] float32"], None),
        ("fixed_batch.keras", "input [32, 32, 3] float32", ["probabilities [10] float32"], None),
        ("logits.keras", "pixels [32, 32, 3] float32", ["scores [9] float32"], "logits"),
        (
            "two_outputs.keras",
            "input [32, 32, 3] float32",
            ["kind [4] float32", "mean [3] float32"],
            "values",
        ),
    ],
)
def test_a_model_keeps_its_own_outputs(report, kept, name, takes, gives, final):
    assert report[name] == ["", "", False]
    record = record_of(kept, name)
    assert [str(output) for output in record.contract.inputs] == [takes]
    assert [str(output) for output in record.contract.outputs] == gives
    assert record.contract.batch is record.why_fixed is None
    assert record.final == (final or PROBABILITIES)
    assert len(record.parity) == 4
    for path in (kept / f"{name}.converted").glob("*.onnx"):  # torch's names have none
        assert not any("." in node.name for node in onnx.load(path).graph.node)


def test_a_model_in_16_bits_is_taken_in_float32(report, kept):
    assert report["mixed.keras"] == ["", "", False]
    assert record_of(kept, "mixed.keras").original_dtype == "float16"
    graph = graph_of(kept / "mixed.keras.converted" / conversion.UNFOLDED)
    assert onnx.TensorProto.FLOAT16 not in {tensor.data_type for tensor in graph.initializer}


def test_a_model_that_only_onnx_can_run_is_converted_for_it(kept, report):
    assert report["loop.keras"] == ["", "", False]
    record = record_of(kept, "loop.keras")
    assert set(record.parity) == {"onnx, folded", "onnx, unfolded"}
    assert "onnx2torch cannot convert the network" in record.without_torch[conversion.FOLDED]


@pytest.mark.parametrize("name", ["lambda.h5", "lambda.keras"])
def test_a_model_with_code_in_it_is_refused_before_it_runs(report, name):
    kind, message, acted = report[name]
    assert not acted
    assert kind == "ModelError"
    assert "Lambda" in message
    assert report[f"{name}, unguarded"][2]  # or the test above could not fail


# The converted network


def graph_of(path: Path) -> onnx.GraphProto:
    return onnx.load(path).graph


def test_the_network_takes_and_gives_what_it_says(shapes_model):
    proto = onnx.load(shapes_model.onnx_path)
    opset = {entry.domain: entry.version for entry in proto.opset_import}
    assert opset[""] == normalization.OPSET == 17
    [taken], [given] = proto.graph.input, proto.graph.output
    dims = [
        [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (taken, given)
    ]
    assert (taken.name, given.name) == ("input", "probabilities")
    assert dims == [["N", 32, 32, 3], ["N", 10]]


def test_folding_leaves_nothing_of_batch_normalization(shapes, shapes_model, cache_root):
    unfolded = model.load_network(ModelConfig(name="resnet8", fold=False), shapes, cache_root)
    assert shapes_model.fold
    assert not unfolded.fold
    assert unfolded.onnx_path != shapes_model.onnx_path
    before, after = (
        Counter(node.op_type for node in graph_of(path).node)
        for path in (unfolded.onnx_path, shapes_model.onnx_path)
    )
    assert before["Mul"] + before["BatchNormalization"] >= 7  # one behind each convolution
    assert after["Mul"] + after["BatchNormalization"] == 0
    assert after["Add"] == 3  # the residual connections
    assert before["Conv"] == after["Conv"] == 9


def test_the_network_is_no_more_than_its_layers(shapes_model):
    """Above all, its one Reshape has a constant shape, however the conversion went about it."""
    result = Counter(node.op_type for node in graph_of(shapes_model.onnx_path).node)
    layers = {"Conv": 9, "Relu": 7, "Add": 3, "AveragePool": 1, "Gemm": 1, "Softmax": 1}
    assert result == {**layers, "Transpose": 1, "Reshape": 1}


def test_parity_was_found_for_each_framework_and_file(shapes_model):
    assert set(shapes_model.conversion.parity) == {
        *("onnx, unfolded", "onnx, folded", "torch, folded")
    }
    assert all(0 <= value <= 1e-4 for value in shapes_model.conversion.parity.values())


def test_torch_is_checked_only_where_it_is_needed(shapes_model, shapes, tmp_path):
    config = ModelConfig(name="own", path=str(shapes_model.onnx_path))
    alone = model.load_network(config, shapes, tmp_path, torch=False)
    assert set(alone.conversion.parity) == {"onnx, unfolded", "onnx, folded"}
    assert not (tmp_path / "torch_checks").exists()
    both = model.load_network(config, shapes, tmp_path)
    assert both.conversion.parity["torch, folded"] <= 1e-4
    assert both.onnx_path == alone.onnx_path  # one conversion


def test_an_operator_that_torch_computes_otherwise_is_named(shapes_model, monkeypatch):
    right = torch_operators.find_modules

    def wrong(proto: onnx.ModelProto) -> dict[str, torch.nn.Module]:
        (softmax,) = (node.name for node in proto.graph.node if node.op_type == "Softmax")
        return right(proto) | {softmax: torch.nn.Softmin(1)}

    monkeypatch.setattr(torch_operators, "find_modules", wrong)
    samples = np.random.default_rng(0).uniform(0, 255, (20, 32, 32, 3)).astype(np.float32)
    result = json.loads(
        conversion.check_torch(shapes_model.onnx_path, samples, final=PROBABILITIES)
    )
    (reason,) = result["without_torch"].values()
    assert re.fullmatch(r"onnx2torch converts Softmax \S+ wrongly \(torch, folded: .*\)", reason)
    assert "parity" not in result


def test_an_unexpected_error_of_torch_is_named_with_its_class(shapes_model, monkeypatch):
    def fail(proto: onnx.ModelProto) -> Any:
        raise KeyError(2)

    monkeypatch.setattr(torch_module, "to_torch_module", fail)
    samples = np.zeros((2, 32, 32, 3), np.float32)
    result = json.loads(conversion.check_torch(shapes_model.onnx_path, samples))
    assert result == {"without_torch": {conversion.FOLDED: "KeyError: 2"}}


def test_the_source_is_reported_with_its_hash(shapes_model):
    assert shapes_model.source.name == "resnet8.h5"
    assert shapes_model.sha256 == files.sha256(shapes_model.source)


def test_a_conversion_is_done_once(shapes, shapes_model, cache_root, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("converts again")

    monkeypatch.setattr(isolation, "call", refuse)
    config = make_config("data=shapes").model
    assert model.load_network(config, shapes, cache_root) == shapes_model


def test_other_images_are_another_conversion(shapes, shapes_model, cache_root, monkeypatch):
    """The gate is over the images: agreement on others says nothing."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("converts")

    monkeypatch.setattr(isolation, "call", refuse)
    other = Split(shapes.train.stored[::-1], shapes.train.labels[::-1], "here")
    with pytest.raises(RuntimeError, match="converts"):
        load(Dataset("shapes", shapes.class_names, other, shapes.test), cache_root, WEIGHTS)


WEIGHTS = shapes.WEIGHTS


def run_onnx(path: Path, images: NDArray[np.float32]) -> NDArray[np.float32]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(["probabilities"], {"input": images})[0]


def test_the_cache_is_left_alone_while_onnx2torch_reads_it(shapes_model, monkeypatch):
    """Another job would find a file too many in the entry, and make it again under this one."""
    folders = []
    real = tempfile.NamedTemporaryFile

    def watch(*args, **kwargs):
        folders.append(kwargs.get("dir"))
        return real(*args, **kwargs)

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", watch)
    load_torch_module(shapes_model.onnx_path)
    assert shapes_model.onnx_path.parent not in folders


def test_the_torch_module_is_set_to_evaluate_and_can_be_traced(shapes_model):
    module = load_torch_module(shapes_model.onnx_path)
    assert isinstance(module, torch.fx.GraphModule)
    assert not any(part.training for part in module.modules())


# The real network


@pytest.mark.slow
@pytest.mark.usefixtures("real_files")
def test_the_real_network(cache_root):
    real = registry.load("cifar10", os.environ["CIFAR10_DIR"])
    loaded = model.load_network(make_config().model, real, cache_root)
    assert loaded.sha256 == SHA256
    assert max(loaded.conversion.parity.values()) <= 1e-4
    [images] = real.test.take(np.arange(1000)).batches(1000)
    right = (run_onnx(loaded.onnx_path, images).argmax(1) == real.test.labels[:1000]).mean()
    assert 0.84 < right < 0.90
