"""The commands called from Python: the same runs as the command line, in a process of their own.

The first test has that process; it takes seconds to start, so the others answer in this one.
"""

import filecmp
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import resnet8ptq as ptq
from resnet8ptq.core import command_process
from tests.helpers.calling import answered_here
from tests.helpers.stores import new_store

QUICK = {"latency__enabled": False, "threads": 1, "quiet": True}


@pytest.fixture(scope="module")
def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 4)
    )


@pytest.fixture(scope="module")
def loader(network) -> DataLoader:
    x = torch.randn(200, 3, 8, 8)
    return DataLoader(TensorDataset(x, network(x).argmax(1)), batch_size=50)


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with an empty store, which MLflow takes seconds to make."""
    new_store(tmp_path / "mlruns")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def here() -> Iterator[None]:
    with answered_here():
        yield


@pytest.mark.slow
def test_a_module_and_a_loader_become_a_run_and_the_caller_stays_as_it_was(
    network, loader, in_folder
):
    network.train()
    environment = dict(os.environ)
    before = (logging.root.handlers[:], signal.getsignal(signal.SIGTERM))
    run = ptq.quantize(network, loader, dtype="u8s8", per_channel=True, **QUICK)
    assert (run.status, run.dtype, run.weights) == ("ok", "u8s8", "per channel")
    assert run.path is not None and onnx.load(run.path)
    assert {*os.environ.items()} ^ {*environment.items()} == set()
    assert (logging.root.handlers, signal.getsignal(signal.SIGTERM)) == before
    assert network.training and Path.cwd() == in_folder
    assert ptq.load_run(run.run_id).loss == run.loss  # in MLflow as from a command line


@pytest.mark.slow
@pytest.mark.usefixtures("in_folder", "here")
def test_a_sweep_has_a_frame_and_its_file_can_be_deployed(network, loader):
    sweep = ptq.sweep(network, loader, dtype=["int8", "u8s8"], **QUICK)
    assert list(sweep.to_frame().dtype) == ["int8", "u8s8"]
    assert "u8s8" in sweep._repr_html_()
    chosen = sweep.recommended("best")
    folder = chosen.deploy("exported", verify=False)
    assert filecmp.cmp(folder / "model.onnx", chosen.path, shallow=False)


@pytest.mark.slow
@pytest.mark.usefixtures("in_folder", "here")
def test_files_of_others_are_judged(network):
    x = np.random.default_rng(0).normal(size=(200, 3, 8, 8)).astype(np.float32)
    made = ptq.quantize(network, x, **QUICK)
    checked = ptq.judge(network, made.path, x, **QUICK)
    assert [run.verdict for run in checked.runs] == [made.verdict]


@pytest.mark.slow
@pytest.mark.usefixtures("in_folder")  # in a process of its own, as a user calls it
def test_a_damaged_file_is_a_failed_run_and_no_error_of_the_call(network, tmp_path):
    damaged = tmp_path / "damaged.onnx"
    damaged.write_bytes(b"\0" * 99)
    x = np.random.default_rng(0).normal(size=(200, 3, 8, 8)).astype(np.float32)
    [run] = ptq.judge(network, damaged, x, **QUICK).runs
    assert run.status == "failed" and "not an ONNX model" in run.why_none


@pytest.mark.slow
@pytest.mark.usefixtures("in_folder")  # in a process of its own, as a user calls it
def test_the_error_of_a_search_that_ends_before_its_first_job_is_raised(network):
    x = np.random.default_rng(0).normal(size=(200, 3, 8, 8)).astype(np.float32)
    too_many = np.arange(200) % 7  # classes, and the network has 4
    with pytest.raises(ptq.ModelError, match="returns 4 values"):
        ptq.ship(network, (x, too_many), minutes=1, **QUICK)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dtype": "int9"}, "dtype: got 'int9'"),
        ({"per_chanel": True}, "per_chanel: no such key"),
        ({"calib__percentil": 99}, "calib.percentil: no such key"),  # found by Hydra
        ({"dtype": ["int8", "u8s8"]}, "dtype: got a list.*; to run each: ptq.sweep$"),
    ],
)
def test_a_wrong_setting_is_the_error_of_the_command_line(tmp_path, monkeypatch, settings, text):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ptq.ConfigError, match=f"^{text}"):
        ptq.quantize(None, "shapes", quiet=True, **settings)
    assert not (tmp_path / "mlruns").exists()


def test_an_unknown_path_of_data_is_refused_before_a_process_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(command_process, "run", lambda *_: pytest.fail("started"))
    with pytest.raises(ptq.ConfigError, match="no such file or folder"):
        ptq.quantize(None, tmp_path / "missing.npz")


def test_settings_that_record_no_single_run_are_refused(tmp_path, monkeypatch):
    sweep = {"code": 0, "error": None, "sweep_folder": str(tmp_path)}
    monkeypatch.setattr(command_process, "run", lambda *_: sweep)
    with pytest.raises(ptq.ConfigError, match=r"^quantize: .*; try ptq\.sweep$"):
        ptq.quantize(None, "shapes", experiment="auto", quiet=True)


def test_judge_never_takes_a_quantized_file_as_the_network(monkeypatch):
    monkeypatch.setattr(command_process, "run", lambda *_: pytest.fail("started"))
    with pytest.raises(ptq.ConfigError, match=r"^model: got None"):
        ptq.judge(None, ["a.onnx", "b.onnx"], "shapes")


def test_of_ship_a_list_is_one_value_except_for_backends(monkeypatch):
    started = []
    monkeypatch.setattr(command_process, "run", lambda _, words, quiet: started.extend(words))
    with pytest.raises(TypeError):  # there is no sweep to return
        ptq.ship(None, "shapes", backend=["onnx", "tflite"], op_types=["Conv"], quiet=True)
    assert {"backend=onnx,tflite", "op_types=[Conv]"} <= set(started)


def test_a_process_without_an_answer_is_an_error(monkeypatch):
    monkeypatch.setattr(command_process, "_CODE", "raise SystemExit(7)")
    with pytest.raises(ptq.PtqError, match="ended with code 7"):
        command_process.run("run", [], quiet=True)


def test_importing_the_package_imports_no_framework():
    code = "import resnet8ptq, sys; print({'numpy', 'torch', 'mlflow', 'onnx'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
