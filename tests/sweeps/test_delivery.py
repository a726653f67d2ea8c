"""The file of a search: the best model so far."""

import shutil
from pathlib import Path

import pytest

from resnet8ptq.sweeps.delivery import Delivery
from resnet8ptq.sweeps.winner import announce
from resnet8ptq.tracking.record import RunRecord


def make_run(folder: Path, backend: str, name: str, content: bytes) -> RunRecord:
    folder.mkdir()
    (folder / name).write_bytes(content)
    return RunRecord.of("id", {"backend": backend}, {}, {"status": "ok", "folder": str(folder)})


def test_the_file_is_replaced_by_that_of_a_better_model(tmp_path):
    kept = Delivery(tmp_path)
    kept.keep(make_run(tmp_path / "a", "onnx", "model.onnx", b"one"), "the first")
    assert (tmp_path / "winner.onnx").read_bytes() == b"one"
    kept.keep(make_run(tmp_path / "b", "tflite", "model.tflite", b"two"), "better")
    assert [path.name for path in tmp_path.glob("winner*")] == ["winner.tflite"]
    assert kept.path is not None and kept.path.read_bytes() == b"two"
    kept.keep_fp32()
    assert kept.path.read_bytes() == b"two"


def test_a_kill_while_the_better_file_is_copied_leaves_the_one_before(tmp_path, monkeypatch):
    kept = Delivery(tmp_path)
    kept.keep(make_run(tmp_path / "a", "onnx", "model.onnx", b"one"), "the first")
    better = make_run(tmp_path / "b", "tflite", "model.tflite", b"two")

    def killed(*paths: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "copyfile", killed)
    with pytest.raises(KeyboardInterrupt):
        kept.keep(better, "better")
    assert (tmp_path / "winner.onnx").read_bytes() == b"one"


def test_a_network_that_nothing_quantizes_stays_in_fp32(tmp_path):
    (tmp_path / "network.onnx").write_bytes(b"fp32")
    kept = Delivery(tmp_path, tmp_path / "network.onnx")
    kept.keep_fp32()
    assert (tmp_path / "winner.onnx").read_bytes() == b"fp32"


def test_a_run_whose_folder_is_gone_keeps_the_file_before(tmp_path):
    kept = Delivery(tmp_path)
    kept.keep(make_run(tmp_path / "a", "onnx", "model.onnx", b"one"), "the first")
    gone = RunRecord.of("id", {"backend": "onnx"}, {}, {"folder": str(tmp_path / "missing")})
    kept.keep(gone, "better")
    assert (tmp_path / "winner.onnx").read_bytes() == b"one"


def test_the_file_before_is_not_printed_as_that_of_a_run_whose_folder_is_gone(tmp_path, capsys):
    kept = Delivery(tmp_path)
    kept.keep(make_run(tmp_path / "a", "onnx", "model.onnx", b"one"), "the first")
    gone = RunRecord.of("id", {"backend": "onnx"}, {}, {"folder": str(tmp_path / "missing")})
    kept.keep(gone, "better")
    announce([], kept, "fastest")
    printed = capsys.readouterr().out
    assert "better" in printed and "winner.onnx" not in printed
