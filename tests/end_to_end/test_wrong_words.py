"""Sixty command lines of a tired person: each is refused in one line with key, value and mend."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from PIL import Image

from tests.helpers.assembling import assemble
from tests.helpers.calling import NO_REAL_FILES, call_beside
from tests.helpers.own_data import write_data, write_network

RUN = "run model.path=my.onnx "
GOOD = "run model.path=my.onnx data.root=a.npz "
CASES = {
    # The network's file
    "run model.path=My.onnx data.root=a.npz": "model.path: got My.onnx|my.onnx",
    "run model.path=my.onx data.root=a.npz": "model.path: got my.onx|my.onnx",
    "run model.path= data.root=a.npz": "model.path: got nothing|expected a file",
    "run model=my.onnx data.root=a.npz": "model: got 'my.onnx'|try model.path=my.onnx",
    "run mdoel.path=my.onnx": "mdoel: no such key|nearest: model",
    "run other.onnx": "other.onnx: got a word without a key|no such file; try model.path=FILE",
    "run --model my.onnx data.root=a.npz": "--model: |model.path=my.onnx",
    "run --model=my.onnx data.root=a.npz": "--model=my.onnx: |model.path=my.onnx",
    "run model_path=my.onnx": "model_path: no such key|model.path=",
    "run model.file=my.onnx": "model.file: no such key|path",
    "run my.onnx report.reference=mine.csv": "report.reference: no such key|studies/tools.md",
    "run truncated.onnx a.npz": "truncated.onnx: not an ONNX model|",
    "run empty.onnx a.npz": "model.path: |empty.onnx is empty",
    "run model.path=notes.txt data.root=a.npz": "model.path: |notes.txt is not a model",
    "run model.path=weights.pt data.root=a.npz": "model.path: |model.module=PACKAGE.CLASS",
    "run quantized.onnx a.npz": "quantized.onnx: already quantized|resnet8ptq judge FP32 FILE",
    "run model.path=theirs.xml data.root=a.npz": "theirs.xml is not a model|judge FP32 theirs.xml",
    "run misshapen.onnx a.npz": "misshapen.onnx: |ONNX Runtime cannot run it",
    # The data
    RUN: "data: not set|data=folder data.root=FOLDER",
    "ship model.path=my.onnx": "data: not set|data=arrays",
    "run -m model.path=my.onnx dtype=int8,uint8": "data: not set|data=table",
    RUN + "data=picturs": "data: got 'picturs'|data.root=pictures",
    RUN + "data=pictures": "data: got 'pictures'|data.root=pictures",
    RUN + "data=a.npz": "data: got 'a.npz'|data.root=a.npz",
    RUN + "data=folders": "data: got 'folders'|nearest: folder",
    RUN + "data=csv": "data: got 'csv'|data=table",
    RUN + "data.root=picturs": "data.root: got picturs|pictures",
    RUN + "data.root=nowhere": "data.root: got nowhere (not there)|expected a file or folder",
    RUN + "data.root=notes.txt": "data.root: got notes.txt|data=arrays",
    RUN + "data=folder": "data.root: got null|a folder with one folder of pictures",
    RUN + "data=folder data.root=a.npz": "data.root: got a.npz|a folder with one folder",
    RUN + "data=arrays data.root=pictures/cat": "pictures/cat|",
    RUN + "data.root=boxes.json": "data.root: got boxes.json|data.annotations=boxes.json",
    RUN + "data=coco data.images=flat": "data.annotations: got null|.json file",
    RUN + "data.rot=a.npz data=arrays": "data.rot: no such key|nearest: root",
    RUN + "data_dir=pictures": "data_dir: no such key|data.root=",
    RUN + "--data pictures": "--data: |data.root=pictures",
    "run -m model.path=my.onnx data.root=a.npz,pictures": "data.root: got paths of|data=",
    # Keys
    GOOD + "device=gpu": "device: got 'gpu'|cuda",
    GOOD + "--gpu": "--gpu: |device=cuda",
    GOOD + "batch_size=8": "batch_size: no such key|evaluate.batch_size=",
    GOOD + "samples_per_class=8": "samples_per_class: no such key|calib.samples_per_class=",
    GOOD + "size=96": "size: no such key|preprocess.size=",
    GOOD + "per_chanel=true": "per_chanel: no such key|nearest: per_channel",
    GOOD + "Dtype=int8": "Dtype: no such key|nearest: dtype",
    GOOD + "--threads 1": "--threads: |threads=1",
    GOOD + "--backend=torch": "--backend=torch: |backend=torch",
    GOOD + "preprocess.sise=96": "preprocess.sise: no such key|nearest: size",
    # Values
    GOOD + "dtype=int4": "dtype: got 'int4'|dtype=w4a8",
    GOOD + "device=gpu": "device: got 'gpu'|device=cuda",
    GOOD + "dtype=8": "dtype: got '8'|dtype=int8",
    GOOD + "backend=null": "backend: got 'null'|onnx",
    GOOD + "data=true": "data: got 'true'|arrays",
    GOOD + "latency=false": "latency: got false|try latency.enabled=false",
    GOOD + "evaluate=test": "evaluate: got test|try evaluate.split=test",
    GOOD + "symmetric=true": "symmetric: got true|a key of it: symmetric.",
    GOOD + "dtype=INT8": "dtype: got 'INT8'|nearest: int8",
    GOOD + "dtype=float32": "dtype: got 'float32'|dtype=fp32",
    GOOD + "backend=tensorrt": "backend: got 'tensorrt'|backend=onnx",
    GOOD + "backend=pytorch": "backend: got 'pytorch'|backend=torch",
    GOOD + "backend=onxx": "backend: got 'onxx'|nearest: onnx",
    GOOD + "calib=kl": "calib: got 'kl'|calib=entropy",
    GOOD + "preprocess=imagenet": "preprocess: got 'imagenet'|preprocess=torchvision_imagenet",
    GOOD + "per_channel=yess": "per_channel: got 'yess'|true",
    GOOD + "seed=1.5": "seed: got '1.5'|an integer",
    GOOD + "report.max_drop=1": "report.max_drop: got 1|0.01",
    GOOD + "calib.percentile=0.999": "calib.percentile: got 0.999|50 < p",
    GOOD + "dtype=int8,uint8": "dtype: got several values|-m dtype=int8,uint8",
    GOOD + "backend=onnx, torch": "torch: got a word without a key|backend=onnx,torch",
    GOOD + "experiment=gird": "experiment: got 'gird'|nearest: grid",
    GOOD + "threads=999": "threads: got 999|CPUs of this machine",
    GOOD + "max_drop=1%": "max_drop: got '1%'|try max_drop=0.01",
    GOOD + "preprocess.size=8x6": "preprocess.size: got '8x6'|try preprocess.size=[8,6]",
    GOOD + "preprocess=imagnet": "preprocess: got 'imagnet'|nearest: torchvision_imagenet",
    GOOD + "calib.samples=9": "calib.samples: no such key|nearest: samples_per_class",
    "run model.path my.onnx data.root=a.npz": "model.path: got a word|try model.path=my.onnx",
    "run modelpath=my.onnx": "modelpath: no such key|model.path=",
    RUN + "data=folder data.root=my pics": "pics: got a word|'data.root=my pics'",
    RUN + "data=folder data.root=pics.zip": "data.root: got pics.zip|try unpacking it",
    # Other commands
    "inspect model.path=my.onnx": "inspect: no such command|run +analysis=inspect model.path",
    "sweep my.onnx a.npz dtype=int8,u8s8": "sweep: no such command|run -m my.onnx a.npz",
    "ship my.onnx a.npz minutes=30s": "minutes: got '30s'|try minutes=0.5",
    "judge my.onnx pictures": "judge: got my.onnx|FP32 FILE",
    "rnu model.path=my.onnx": "rnu: no such command|nearest: run",
    "my.onnx data.root=a.npz": "my.onnx: no such command|resnet8ptq run my.onnx",
    "advise My.onnx": "model.path: got My.onnx|my.onnx",
    "deploy uze=best": "uze|use=",
    "verdict format=jsn": "format: got 'jsn'|nearest: json",
    "judge my.onnx": "judge: got my.onnx|FP32 FILE",
    "judge my.onnx quantized.onnx": "data: not set|data=folder",
    "run --help bakend": "--help: got 'bakend'|nearest: backend",
    "deploy": "no run|resnet8ptq run model.path=FILE data.root=PATH",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a network, data, and files that are neither."""
    path = tmp_path_factory.mktemp("tired")
    good = write_network(path / "my.onnx").read_bytes()
    write_data(path / "a.npz", 12)
    (path / "truncated.onnx").write_bytes(good[:200])
    for name in ("empty.onnx", "notes.txt", "weights.pt", "theirs.xml", "pics.zip"):
        (path / name).write_text("" if name == "empty.onnx" else "text")
    for name in ("pictures/cat/1.png", "pictures/dog/1.png", "my pics/a/1.png", "flat/1.png"):
        (path / name).parent.mkdir(parents=True)
        Image.new("RGB", (6, 8)).save(path / name)
    (path / "boxes.json").write_text("{}")
    write_graph(path / "quantized.onnx", "DequantizeLinear", ["weights", "scale"])
    write_graph(path / "misshapen.onnx", "Transpose", ["wide"])
    return path


def write_graph(path: Path, operator: str, inputs: list[str]) -> None:
    """A matrix product whose weights an operator makes."""
    nodes = [
        helper.make_node(operator, inputs, ["w"], "weights"),
        helper.make_node("MatMul", ["x", "w"], ["y"], "product"),
        helper.make_node("MatMul", ["y", "square"], ["z"], "last"),
    ]
    constants = {
        "weights": np.ones((4, 3), np.int8),
        "scale": np.float32(1),
        "wide": np.ones((7, 5), np.float32),
        "square": np.ones((3, 3), np.float32),
    }
    used = {name: constants[name] for name in (*inputs, "square")}
    onnx.save(assemble(nodes, {"x": ["N", 4]}, {"z": ["N", 3]}, used, opset=13), path)


@pytest.mark.parametrize("line", CASES)
def test_it_is_one_line_with_its_mend(folder, line):
    named, mend = CASES[line].split("|")
    done = call_beside(folder, *line.split(), **NO_REAL_FILES)
    assert done.code == 2, done.err
    [error] = done.errors
    assert done.err.splitlines()[-1] == error
    assert named in error
    assert mend in error
    assert "Traceback" not in done.err
    if line.split()[0] in ("run", "ship", "judge"):
        assert not (folder / "mlruns").exists()
