"""A network and data of the user's own, on the command line; real ones where SHARED_DATA is."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from omegaconf import OmegaConf
from onnx import numpy_helper
from PIL import Image

from resnet8ptq import dispatch
from resnet8ptq.core.errors import PtqError
from resnet8ptq.experiment import run_warnings
from resnet8ptq.experiment.settings import resolve
from resnet8ptq.sweeps import identity
from resnet8ptq.tracking.run import start_run
from tests.helpers.calling import REPO, call
from tests.helpers.configs import make_config
from tests.helpers.own_data import QUICK, write_data, write_network


@pytest.fixture
def run(tmp_path, own_store):
    def run_with(*overrides):
        config = make_config("data=arrays", *QUICK, *overrides)
        folder = tmp_path / f"run{len(list(tmp_path.glob('run*')))}"
        folder.mkdir()
        with start_run(own_store, "own", folder) as opened:
            return dispatch.run_or_analyse(resolve(config), folder, opened)

    return run_with


@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_channels_first_and_logits(run, tmp_path, backend):
    """What the user's network takes and returns is found out, and scored as it should be."""
    data, network = write_data(tmp_path / "a.npz"), write_network(tmp_path / "own.onnx")
    result = run(
        f"data.root={data}", f"model.path={network}", f"backend={backend}", "preprocess=unit"
    )
    measurement = result.measurement
    assert measurement is not None, result.reason
    assert (measurement.comparison.model.correct, measurement.comparison.model.total) == (60, 60)
    np.testing.assert_allclose(measurement.comparison.model.probabilities.sum(1), 1, atol=1e-5)
    assert measurement.comparison.model.logits is not None
    assert measurement.comparison.sqnr_db > 20


def test_a_preprocessing_that_does_not_fit_is_named(run, tmp_path, caplog):
    """Raw pixels are all cut off at 1: each class looks like the first."""
    files = (f"data.root={write_data(tmp_path / 'a.npz')}", "dtype=fp32")
    files += (f"model.path={write_network(tmp_path / 'own.onnx')}",)
    run(*files)
    assert "FP32 ACCURACY NEAR CHANCE, 33.33% (20 of 60, 3 classes)" in caplog.text
    assert "preprocess=unit gets 100.00% on 60 training samples, this run 33.33%" in caplog.text
    caplog.clear()
    run(*files, "preprocess=unit", "report.expected_accuracy=0.95")
    assert "FP32 ACCURACY" not in caplog.text


@pytest.mark.parametrize(
    ("saturates", "settings"), [(False, "per_channel=true"), (True, "reduce_range=true")]
)
def test_without_labels_the_preprocessing_and_the_noise_are_reported(
    run, tmp_path, caplog, monkeypatch, saturates, settings
):
    caplog.set_level("INFO")
    monkeypatch.setattr(run_warnings.kernels, "saturates", lambda *_: saturates)
    monkeypatch.setattr(run_warnings, "LOW_SQNR_DB", 99)
    files = (f"data.root={write_data(tmp_path / 'a.npz')}", "data.labels=none", "preprocess=unit")
    run(*files, f"model.path={write_network(tmp_path / 'own.onnx')}")
    assert "no labels to test whether preprocess=unit (scale=0.00392157, " in caplog.text
    (noise,) = [line for line in caplog.messages if line.startswith("SQNR ")]
    assert noise.endswith(f" dB: far from FP32's outputs; {settings} may help")


def write_floats(path: Path) -> Path:
    """The same pictures, as floats from 0 to 1."""
    stored = np.load(write_data(path))
    np.savez(path, images=stored["images"].astype(np.float32) / 255, labels=stored["labels"])
    return path


@pytest.mark.slow
def test_float_pictures_that_the_network_takes_otherwise(run, tmp_path, caplog):
    """It takes 0 to 255: of pictures from 0 to 1 all is cut off, and each class looks the same."""
    data, network = write_floats(tmp_path / "a.npz"), write_network(tmp_path / "own.onnx")
    proto = onnx.load(network)
    for tensor in proto.graph.initializer:
        if tensor.name == "kernel":
            kernel = numpy_helper.to_array(tensor) / 255
            tensor.CopyFrom(numpy_helper.from_array(kernel.astype(np.float32), "kernel"))
        if tensor.name == "low":
            tensor.CopyFrom(numpy_helper.from_array(np.float32(0.01), "low"))
    onnx.save(proto, network)
    files = (f"data.root={data}", f"model.path={network}", "dtype=fp32")
    run(*files)
    assert "FP32 ACCURACY NEAR CHANCE" in caplog.text
    best = "preprocess=raw preprocess.scale=255 gets 100.00% on 60 training samples"
    assert best in caplog.text
    caplog.clear()
    run(*files, "preprocess.scale=255")
    assert "FP32 ACCURACY" not in caplog.text


REMARK = "preprocess=raw: the samples are float pictures from 0 to 1 and stay so"


@pytest.mark.slow
def test_float_pictures_are_remarked_only_where_nothing_tells(run, tmp_path, caplog):
    data, network = write_floats(tmp_path / "a.npz"), write_network(tmp_path / "own.onnx")
    files = (f"data.root={data}", f"model.path={network}", "dtype=fp32")
    run(*files)  # trained on such pictures: FP32 is right
    run(*files, "data.labels=none", "preprocess.scale=2", "preprocess.mean=[1]")
    assert "float pictures" not in caplog.text and "FP32 ACCURACY" not in caplog.text
    run(*files, "data.labels=none")
    [line] = [line for line in caplog.messages if "float pictures" in line]
    assert line.startswith(REMARK) and "preprocess.scale=255" in line


def write_pictures(folder: Path, sizes: int = 2) -> Path:
    """Pictures of one or two sizes in class folders, whose brighter channel is the class."""
    random = np.random.default_rng(0)
    for channel, name in enumerate("abc"):
        (folder / name).mkdir(parents=True)
        for number in range(20):
            pixels = random.integers(1, 100, (16 + number % sizes, 12, 3), dtype=np.uint8)
            pixels[..., channel] += 100
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


@pytest.mark.parametrize("sizes", [1, 2])
def test_the_networks_picture_size_is_taken(run, tmp_path, caplog, sizes):
    caplog.set_level("INFO")
    network = write_network(tmp_path / "own.onnx")
    folder = write_pictures(tmp_path / "pictures", sizes)
    settings = ("data=folder", f"data.root={folder}", f"model.path={network}", "preprocess=unit")
    settings += ("preprocess.resize=fit", "dtype=fp32")
    result = run(*settings)
    assert result.measurement.comparison.model.correct == 30
    [line] = [line for line in caplog.messages if line.startswith("preprocess.size: got null")]
    assert line.endswith("uses the network's, [8, 6], by preprocess.resize=fit")
    [path] = tmp_path.glob("run0/config.yaml")
    assert OmegaConf.load(path).preprocess.size == [8, 6]
    actual = identity.hash_run(resolve(make_config(*settings)))
    assert actual == identity.hash_run(resolve(make_config(*settings, "preprocess.size=[8,6]")))
    assert actual != identity.hash_run(resolve(make_config(*settings, "preprocess.size=[8,7]")))


def test_a_size_that_the_network_leaves_free_is_asked_for(run, tmp_path):
    network = write_network(tmp_path / "own.onnx")
    proto = onnx.load(network)
    proto.graph.input[0].type.tensor_type.shape.dim[3].dim_param = "W"
    onnx.save(proto, network)
    folder = write_pictures(tmp_path / "pictures")
    with pytest.raises(PtqError, match=r"^preprocess\.size: got null, but the pictures differ"):
        run("data=folder", f"data.root={folder}", f"model.path={network}")


# Real networks and data, as SHARED_DATA's DATA.md describes them


def fp32_accuracy(folder: Path, *args: str) -> float:
    done = call(folder, "dtype=fp32", *QUICK, *args)
    assert done.code == 0, done.err
    [path] = folder.glob("runs/*/*/result.json")
    return json.loads(path.read_text())["metrics"]["accuracy"]


@pytest.mark.slow
def test_keyword_spotting(shared, tmp_path):
    kws = shared / "kws"
    stored = ("data.offset=83", "data.scale=0.5847029")
    result = fp32_accuracy(
        tmp_path,
        *("data=arrays", f"data.root={kws / 'kws01.npz'}", *stored),
        f"model.path={kws / 'kws_ref_model'}",
    )
    assert abs(result - 0.913) < 0.04


@pytest.mark.slow
def test_mnist(shared, tmp_path):
    mnist = shared / "mnist"
    result = fp32_accuracy(
        tmp_path,
        *("data=arrays", f"data.root={mnist / 't10k-images-idx3-ubyte.gz'}"),
        f"data.labels={mnist / 't10k-labels-idx1-ubyte.gz'}",
        f"model.path={mnist / 'mnist.onnx'}",
    )
    assert abs(result - 0.9891) < 0.006


@pytest.mark.slow
def test_a_head_of_ones_own_on_a_folder_of_pictures(shared, tmp_path):
    for kind in ("glass", "paper"):
        (tmp_path / "pictures" / kind).mkdir(parents=True)
        for picture in sorted((shared / "trashnet" / kind).iterdir())[:12]:
            (tmp_path / "pictures" / kind / picture.name).symlink_to(picture)
    root, backbone = tmp_path / "pictures", shared / "networks" / "mobilenet_v1_0.25_224.h5"
    words = (f"root={root}", f"backbone={backbone}", f"output={tmp_path / 'own.keras'}")
    script = (sys.executable, str(REPO / "docs/examples/finetune_head.py"), *words, "epochs=50")
    done = subprocess.run(script, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "12 pictures of 2 classes" in done.stdout
    *_, command = done.stdout.splitlines()
    program, name, sweep, *settings, backend, per_channel = shlex.split(command)
    assert (program, name, sweep) == ("resnet8ptq", "run", "-m")
    assert (backend, per_channel) == ("backend=onnx,torch,tflite", "per_channel=true")
    result = fp32_accuracy(tmp_path, *settings)
    assert result >= 8 / 12
