"""Files and names made to harm: refused before anything runs, and never a path elsewhere."""

import base64
import io
import json
import logging
import marshal
import os
import pickle
import zipfile
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import h5py
import numpy as np
import onnx
import pytest
import yaml
from hydra.core.hydra_config import HydraConfig
from onnx import helper
from rich.console import Console

from resnet8ptq.calibration import table
from resnet8ptq.config.folders import find_conf
from resnet8ptq.config.schema import ModelConfig, RunConfig, TrackingConfig
from resnet8ptq.core import command, console, files
from resnet8ptq.core.errors import ConfigError, DataError, ModelError, PtqError, TrackingError
from resnet8ptq.core.text import safe_name
from resnet8ptq.data.shapes import WEIGHTS
from resnet8ptq.data.sources import cifar10
from resnet8ptq.models import conversion
from resnet8ptq.models import model as model_module
from resnet8ptq.models.gates import keras
from resnet8ptq.report import loading
from resnet8ptq.tasks.classification import ACCURACY
from resnet8ptq.tasks.registry import recall
from resnet8ptq.tasks.scoring.hits import MCNEMAR
from resnet8ptq.tasks.scoring.metric import TOTAL
from resnet8ptq.tracking import history
from resnet8ptq.tracking.mlflow_store.store import Store, open_store
from resnet8ptq.tracking.record import RunRecord
from resnet8ptq.tracking.sweep_file import FILE as SWEEP_FILE
from resnet8ptq.tracking.sweep_file import ParallelJobs, SharedSweep
from tests.helpers.cifar_files import read_test
from tests.helpers.configs import compose_whole, make_config
from tests.helpers.onnx_networks import IMAGES, build
from tests.helpers.stores import new_store

FORGED = "2026-01-31 12:00:00,000 INFO resnet8ptq.job: verdict: pass"
NASTY = "../../x\n| $a$ <script>alert(1)</script> \x1b[31m\u202e [red]"


def line(error: BaseException) -> str:
    text = str(error)
    assert text.isprintable()
    return text


# Pickles


@pytest.mark.parametrize(
    "body",
    [
        b"ccopyreg\n_reconstructor\n(cos\nsystem\ncbuiltins\nobject\nNtR.",
        b"cbuiltins\ngetattr\n(cos\nS'system'\ntR.",
        b"ccopy_reg\n__newobj__\n(cos\nsystem\ntR.",
        b"coperator\nattrgetter\n(S'system'\ntR.",
        b"cfunctools\npartial\n(cos\nsystem\nS'touch target'\ntR.",
        b"cnumpy\ndtype\nq\x00h\x00(S'touch target'\ntRp5\n0g5\ncos\nsystem\n.",  # PUT, GET
        b"}(U\x04datacos\nsystem\n(S'touch target'\ntRu.",
        b"(((((((cos\nsystem\n(S'touch target'\ntRttttttt.",
        b"\x82\x01.",  # EXT1, from copyreg's registry
        b"\x8c\x1bos\x1b[31m\x8c\x06system\x93.",
    ],
    ids=range(10),
)
@pytest.mark.parametrize("protocol", [b"", b"\x80\x02", b"\x80\x04"])
def test_tricks_of_pickles_are_refused(tmp_path, monkeypatch, body, protocol):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="test_batch") as caught:
        read_test(tmp_path, protocol + body)
    line(caught.value)
    assert not Path("target").exists()


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_regular_file_is_not_waited_for(tmp_path, kind):
    path = tmp_path / "test_batch"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
    with pytest.raises(DataError, match="test_batch"):
        cifar10.read_split(tmp_path, "test")
    path.rename(tmp_path / "calibration.json")
    with pytest.raises(ConfigError, match=r"calib\.table"):
        table.load_ranges(str(tmp_path / "calibration.json"), {})


def test_a_deeply_nested_pickle_is_one_error(tmp_path):
    for body in (b"(" * 50_000 + b"t" * 50_000, b"]" * 50_000 + b"a" * 49_999):
        with pytest.raises(DataError):
            read_test(tmp_path, b"\x80\x02" + body + b".")


# Keras files


def lambda_code(target: Path) -> str:
    code = compile(f"__import__('pathlib').Path({str(target)!r}).touch()", "x", "exec")
    return base64.b64encode(marshal.dumps(code)).decode()


def layer(**changes: Any) -> dict[str, Any]:
    return {"class_name": "Dense", "module": "keras.layers", "config": {"units": 10}, **changes}


def evil_layers(target: Path) -> dict[str, dict[str, Any]]:
    code = {"class_name": "__lambda__", "config": {"code": lambda_code(target)}}
    return {
        "lambda": layer(class_name="Lambda", config={"function": code}),
        "legacy lambda": layer(
            class_name="Lambda",
            module=None,
            config={"function": [lambda_code(target), None, None], "function_type": "lambda"},
        ),
        "custom object": layer(registered_name="evil>Layer"),
        "module of no text": layer(module=["os"]),
        "escapes": layer(module="os\x1b[31m"),
    }


def write_keras(path: Path, config: Any, weights: bytes | None = None) -> Path:
    """Write a file with these layers as Keras would, in the form that its name says."""
    whole = json.dumps({"class_name": "Sequential", "config": {"layers": config}})
    if weights is None:
        empty = io.BytesIO()
        h5py.File(empty, "w").close()
        weights = empty.getvalue()
    if path.suffix == ".h5":
        with h5py.File(path, "w") as file:
            file.attrs["model_config"] = whole
            file["weights"] = np.zeros(3)
        return path
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.json", "{}")
        archive.writestr("config.json", whole)
        archive.writestr("model.weights.h5", weights)
    return path


@pytest.mark.parametrize("suffix", [".h5", ".keras"])
@pytest.mark.parametrize("name", evil_layers(Path("x")))
def test_a_layer_that_is_code_is_refused_before_keras_sees_it(tmp_path, name, suffix):
    target = tmp_path / "target"
    path = write_keras(tmp_path / f"model{suffix}", [layer(), evil_layers(target)[name]])
    with pytest.raises(ModelError) as caught:
        keras.read_keras(path)
    assert line(caught.value).startswith(f"{path}: ")
    assert "refuses" not in str(caught.value)
    assert not target.exists()


def test_layers_of_keras_are_taken(tmp_path):
    for suffix in (".h5", ".keras"):
        keras.read_keras(write_keras(tmp_path / f"model{suffix}", [layer()]))
    keras.read_keras(WEIGHTS)


def test_as_the_model_it_is_refused_by_the_setting(tmp_path, shapes, cache_root):
    target = tmp_path / "target"
    path = write_keras(tmp_path / "model.keras", [evil_layers(target)["lambda"]])
    with pytest.raises(ModelError, match="class Lambda"):
        model_module.load_network(ModelConfig("own", str(path)), shapes, cache_root)
    assert not target.exists()


def test_a_pickle_of_torch_is_no_model(tmp_path, shapes, cache_root):
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(1))
    with pytest.raises(ModelError, match=r"model\.pt: pickled by torch\.save; expected a \.pt2"):
        model_module.load_network(ModelConfig("own", str(path)), shapes, cache_root)


def external(file: h5py.File) -> None:
    file.create_dataset("stolen", (8,), "u1", external=[("/etc/passwd", 0, 8)])


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((8,), "u1")
    layout[:] = h5py.VirtualSource("/etc/other.h5", "x", (8,))
    file.create_virtual_dataset("stolen", layout)


def linked(file: h5py.File) -> None:
    file["stolen"] = h5py.ExternalLink("/etc/other.h5", "/x")


def soft(file: h5py.File) -> None:
    file["stolen"] = h5py.SoftLink("/weights")


def huge(file: h5py.File) -> None:
    file.create_dataset("stolen", (10**12,), "f4", chunks=(1024,))  # nothing of it is written


@pytest.mark.parametrize("plant", [external, virtual, linked, soft, huge])
def test_weights_outside_of_the_file_are_refused(tmp_path, plant):
    path = write_keras(tmp_path / "model.h5", [layer()])
    with h5py.File(path, "a") as file:
        plant(file.create_group("deep"))
    with pytest.raises(ModelError, match=r"stolen|claims"):
        keras.read_keras(path)
    inside = write_keras(tmp_path / "model.keras", [layer()], path.read_bytes())
    with pytest.raises(ModelError, match=r"stolen|claims"):
        keras.read_keras(inside)


def test_a_group_that_holds_itself_is_looked_through_once(tmp_path):
    path = write_keras(tmp_path / "model.h5", [layer()])
    with h5py.File(path, "a") as file:
        file["again"] = file["/"]
    keras.read_keras(path)


def test_a_bomb_is_refused_before_it_unpacks(tmp_path):
    path = tmp_path / "model.keras"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("config.json", "w") as config,
    ):
        for _ in range(17):
            config.write(b" " * 2**20)
    with pytest.raises(ModelError, match="unpacks to"):
        keras.read_keras(path)


# ONNX files that claim more than they hold


def test_a_claim_of_many_weights_is_refused(tmp_path):
    proto = build()
    proto.graph.initializer[0].dims[:] = [10**6, 10**6, 3, 3]
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    with pytest.raises(ModelError) as caught:
        conversion.convert(path, tmp_path, IMAGES.astype(np.float32), ModelConfig())
    line(caught.value)


def test_a_constant_larger_than_the_machine_is_refused(tmp_path, shapes, cache_root):
    nodes = [
        helper.make_node("ConstantOfShape", ["size"], ["zeros"]),
        helper.make_node("ReduceMax", ["zeros"], ["most"], keepdims=0),
        helper.make_node("Add", ["relu", "most"], ["middle"]),
    ]
    path = tmp_path / "model.onnx"
    onnx.save(build(middle=nodes, constants={"size": np.array([10**13], np.int64)}), path)
    with pytest.raises(ModelError) as caught:
        model_module.load_network(ModelConfig("own", str(path)), shapes, cache_root)
    line(caught.value)


# Calibration tables


def forge_table(folder: Path, text: str) -> None:
    (folder / "calibration.json").write_text(text)
    hashes = {"calibration.json": files.sha256(folder / "calibration.json")}
    (folder / table.PROVENANCE_FILE).write_text(json.dumps({"sha256": hashes}))


@pytest.mark.parametrize(
    "text",
    [
        '{"data": {"a": {"lowest": 0, "highest": 1' + "0" * 5000 + "}}}",
        '{"data": {"a": {"lowest": 0, "highest": 1}, "a": {"lowest": 0, "highest": 9}}}',
        '{"data": {"a": {"lowest": 0, "lowest": -9, "highest": 1}}}',
        '{"data": {"../../x\\u001b[31m\\n": {"lowest": 1, "highest": 0}}}',
        '{"data": {"\\ud800": {"lowest": "0", "highest": 1}}}',
        "[" * 200_000,
        '{"data":' * 50_000,
    ],
    ids=range(7),
)
def test_a_table_that_holds_no_ranges_is_refused_in_one_line(tmp_path, text):
    forge_table(tmp_path, text)
    with pytest.raises(ConfigError, match=r"calib\.table: ") as caught:
        table.load_ranges(str(tmp_path), {})
    assert len(line(caught.value)) < 1000


def test_provenance_is_quoted_without_control_characters(tmp_path):
    forge_table(tmp_path, '{"data": {"a": {"lowest": 0, "highest": 1}}}')
    path = tmp_path / table.PROVENANCE_FILE
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "model": NASTY, "method": {"name": NASTY, NASTY: 1}}))
    with pytest.raises(ConfigError, match="made from") as caught:
        table.load_ranges(str(tmp_path), {"model": "0" * 64, "method": {"name": "mse"}})
    line(caught.value)


# sweep.json, and what is read back from MLflow


STORE = {"uri": "sqlite:///x", "experiment_id": "1", "experiment_name": "x"}
PARALLEL = {"at_once": 2, "threads": 1, "folder": "x", "variables": {"MLFLOW_X": "y"}}
SOUND = {"store": STORE, "parent_id": "0" * 32, "resume": False, "jobs": None, "parallel": PARALLEL}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "null",
        "[]",
        "[" * 100_000,
        "{}",
        *(json.dumps({key: SOUND[key] for key in SOUND if key != left_out}) for left_out in SOUND),
        json.dumps({**SOUND, "store": {"uri": "x"}}),
        " " * 2**21,
    ],
)
def test_a_damaged_sweep_file_is_one_error(tmp_path, content):
    (tmp_path / SWEEP_FILE).write_text(content)
    with pytest.raises(TrackingError, match=SWEEP_FILE) as caught:
        SharedSweep.load(tmp_path)
    line(caught.value)


def test_a_sound_sweep_file_is_read(tmp_path):
    (tmp_path / SWEEP_FILE).write_text(json.dumps(SOUND))
    assert SharedSweep.load(tmp_path) == SharedSweep(
        Store("sqlite:///x", "1", "x"), "0" * 32, tmp_path, parallel=ParallelJobs(**PARALLEL)
    )


def of_objects(path: Path) -> None:
    np.savez(path, predictions=np.array([print, 1], dtype=object))


def of_two_lengths(path: Path) -> None:
    np.savez(path, predictions=[1, 2], baseline_predictions=[1], labels=[1, 2])


def of_text(path: Path) -> None:
    path.write_text("x")


def of_huge_arrays(path: Path) -> None:
    header = b"\x93NUMPY\x01\x00v\x00{'descr': '<i8', 'fortran_order': False, 'shape': (%d,), }"
    content = (header % 10**13).ljust(128) + b"\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("predictions", "baseline_predictions", "labels"):
            archive.writestr(f"{name}.npy", content)


@pytest.mark.parametrize("write", [of_objects, of_two_lengths, of_text, of_huge_arrays])
def test_hostile_predictions_are_one_error(tmp_path, write):
    path = tmp_path / "predictions.npz"
    write(path)
    record = RunRecord.of("id", {}, {}, {}, artifact_uri=str(tmp_path), in_folder=True)
    reader = partial(loading._read_predictions, MCNEMAR, kept={})
    with pytest.raises(TrackingError, match=r"predictions\.npz is damaged") as caught:
        history.read_artifact(Store("", "", ""), record, path.name, reader)
    line(caught.value)


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", "[1]", "null", NASTY])
def test_class_names_of_a_store_are_names_or_one_error(text):
    with pytest.raises(TrackingError, match="class_names"):
        _ = RunRecord.of("id", {}, {}, {"class_names": text}).class_names


# Names


def test_a_safe_name_is_one_part_of_a_path(tmp_path):
    for text in ("", ".", "..", "/", "../../x", NASTY, "a" * 1000, "*", "a\0b", "~", "C:\\x", " "):
        name = safe_name(text)
        assert (tmp_path / name).parent == tmp_path
        assert (tmp_path / name).resolve().parent == tmp_path
        (tmp_path / name).write_text("")
        assert name.isprintable()
    assert safe_name("onnx-int8-minmax_1.5=a,b") == "onnx-int8-minmax_1.5=a,b"
    (tmp_path / safe_name("\u6570" * 100)).touch()  # 300 bytes, more than a file system takes


@pytest.mark.parametrize("key", ["backend.name", "dtype.name", "calib.name"])
def test_folders_of_runs_stay_below_the_sweep(key):
    cfg = compose_whole(f"{key}='../../../x\n*'")
    cfg.hydra.job.num = 3
    cfg.hydra.runtime.cwd = "/here"
    HydraConfig.instance().set_config(cfg)
    try:
        subdir, folder = cfg.hydra.sweep.subdir, cfg.hydra.run.dir
    finally:
        HydraConfig.instance().cfg = None
    assert "/" not in subdir
    assert subdir.startswith("3_")
    assert folder.startswith("/here/runs/")
    assert ".." not in folder.split("/")
    assert len(folder.split("/")) == 5


def text_keys(node: object, prefix: str = "") -> list[str]:
    """The settings that take free text, or a list of it."""
    result = []
    for item in fields(node):
        value, key = getattr(node, item.name), f"{prefix}{item.name}"
        if is_dataclass(value):
            result += text_keys(value, f"{key}.")
        elif "str" in str(item.type) and "dict" not in str(item.type):
            result.append(key)
    return result


ALL: RunConfig = make_config("backend=torch")
LISTS = ("op_types", "nodes_to_quantize", "nodes_to_exclude", "report.columns", "model.outputs")


@pytest.mark.parametrize("key", [*text_keys(ALL), "nodes_to_exclude"])
@pytest.mark.parametrize("bad", ["a\x1b[31m", "a\u202eb"])
def test_no_setting_takes_control_characters(key, bad):
    value = f'["{bad}"]' if key in LISTS else f'"{bad}"'
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")) as caught:
        make_config("backend=torch", "+analysis=sensitivity", f"{key}={value}")
    line(caught.value)


@pytest.mark.parametrize("name", ["../../../x", "/tmp/x_of_experiment"])
def test_artifacts_of_an_experiment_stay_in_the_store(tmp_path, name):
    import mlflow

    root = tmp_path / "a" / "b" / "mlruns"
    new_store(root)
    store = open_store(TrackingConfig(root=str(root), experiment_name=name))
    client = mlflow.MlflowClient(tracking_uri=store.uri)
    location = client.get_experiment(store.experiment_id).artifact_location
    assert Path(location.removeprefix("file://")).parent == root / "artifacts"


# Errors and logs


def test_every_error_of_ours_is_one_printable_line():
    for kind in (PtqError, *PtqError.__subclasses__(), *DataError.__subclasses__()):
        line(kind(NASTY))
        line(pickle.loads(pickle.dumps(kind(NASTY))))


@pytest.mark.parametrize("terminal", [True, False])
def test_a_log_line_does_not_steer_the_terminal(monkeypatch, capsys, terminal):
    screen = Console(file=io.StringIO(), force_terminal=terminal, color_system=None, width=200)
    monkeypatch.setattr(console, "stderr", lambda: screen)
    handler = console.LogHandler()
    handler.emit(logging.LogRecord("x", logging.INFO, "x", 1, "layer %s", (NASTY,), None))
    shown = screen.file.getvalue() + capsys.readouterr().err
    assert "<script>" in shown
    assert "\x1b[31m" not in shown
    assert "\u202e" not in shown


def test_a_log_file_holds_one_record_a_message_and_nothing_that_steers_a_terminal(tmp_path):
    """By the formatter of the file in the configuration, whatever name it has there."""
    described = yaml.safe_load((find_conf() / "hydra/job_logging/rich.yaml").read_text("utf-8"))
    settings = described["formatters"][described["handlers"]["file"]["formatter"]]
    path = tmp_path / "run.log"
    handler = logging.FileHandler(path)
    handler.setFormatter(resolve_name(settings["class"])(settings["format"]))
    text = f"{NASTY}\n{FORGED}"
    handler.emit(logging.LogRecord("x", logging.INFO, "x", 1, "%s: no picture", (text,), None))
    handler.close()
    lines = path.read_text("utf-8").splitlines()
    assert [line for line in lines if not line.startswith(" ")] == lines[:1]
    assert all(line.isprintable() for line in lines)
    assert lines[-1].strip().startswith(FORGED)


def test_a_traceback_steers_no_terminal(capsys):
    command.print_error(RuntimeError(NASTY))
    shown = capsys.readouterr().err
    assert "RuntimeError" in shown
    assert all(line.isprintable() for line in shown.splitlines())


@pytest.mark.parametrize("total", [float("nan"), float("inf"), -1.0])
def test_a_run_with_an_impossible_number_of_samples_was_not_measured(total):
    metrics = {ACCURACY.name: 0.9, TOTAL: total}
    record = RunRecord.of("1", {}, metrics, {"status": "ok"})
    cell = loading._load_cell(Store("", "", ""), recall({}), record, "onnx", {})
    assert cell.paired is None  # and its files are not read
