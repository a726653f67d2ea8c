"""`resnet8ptq judge`: its words, and files of others beside their FP32 network."""

import json
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import pytest

from resnet8ptq.core import background, figures
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.judging import Arguments, main
from studies.judge import take_unit
from tests.helpers.calling import EMPTY, QUICK, call_beside, handed_over_here


def test_words_become_a_sweep():
    asked = Arguments.parse(["fp32.h5", "it's a.onnx", "b.tflite", "max_drop=0.05", "data=shapes"])
    assert asked.to_sweep()[3:] == [
        "model.path=fp32.h5",
        "backend.path='it\\'s a.onnx','b.tflite'",
        "report.max_drop=0.05",
        "data=shapes",
    ]


def test_a_setting_may_name_the_network():
    asked = Arguments.parse(["a.onnx", "model.path=fp32.onnx", "format=json"])
    assert asked.to_sweep()[3:] == ["backend.path='a.onnx'", "model.path=fp32.onnx"]
    assert asked.format == "json"


@pytest.mark.parametrize("setting", ["model.fold=false", "model.outputs=[scores]", "model.name=a"])
def test_other_settings_of_the_network_leave_the_first_file_fp32(setting):
    asked = Arguments.parse(["fp32.onnx", "a.onnx", setting])
    assert [*asked.judged] == ["a.onnx"]
    assert "model.path=fp32.onnx" in asked.to_sweep()


def test_a_path_may_hold_an_equals_sign(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("dtype=int8").mkdir()
    Path("dtype=int8", "a.onnx").touch()
    assert Arguments.parse(["fp32.onnx", "dtype=int8/a.onnx"]).files[1:] == ["dtype=int8/a.onnx"]


def test_data_need_no_key(tmp_path, monkeypatch):
    """As in `run` and `advise`, which take the plain path as data.root."""
    monkeypatch.chdir(tmp_path)
    Path("pictures").mkdir()
    Path("rows.csv").touch()
    for data in ("pictures", "rows.csv"):
        asked = Arguments.parse(["fp32.onnx", "int8.onnx", data])
        assert asked.judged == ["int8.onnx"]
        assert asked.to_sweep()[-1] == data


def test_a_folder_may_be_the_fp32_network(tmp_path):
    asked = Arguments.parse([str(tmp_path), "int8.tflite", "data=shapes"])
    assert asked.files == [str(tmp_path), "int8.tflite"]


def test_missing_data_are_named_with_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pictures").mkdir()
    with pytest.raises(ConfigError, match=r"got picturs \(not there\).*nearest: pictures"):
        main(["fp32.onnx", "int8.onnx", "picturs"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["fp32.onnx"], r"^judge: got fp32\.onnx, expected FP32 FILE"),
        (["data=shapes"], r"^judge: got no files, expected FP32 FILE"),
        (["a", "b", "format=xml"], r"^format: got 'xml', expected text \| json \| markdown"),
    ],
)
def test_missing_words_are_named(words, says):
    with pytest.raises(ConfigError, match=says):
        Arguments.parse(words)


@pytest.mark.parametrize("name", ["theirs.h5", "theirs.pt"])
def test_a_file_that_cannot_be_scored_is_wrong_input_before_any_job(name):
    with pytest.raises(ConfigError, match=rf"^judge: got {name}"):
        main(["fp32.onnx", "other.onnx", name])


def test_without_words_it_explains_itself(tmp_path):
    done = call_beside(tmp_path, "judge")
    assert done.code == 2
    assert "resnet8ptq judge FP32 FILE..." in done.out


@pytest.mark.slow
def test_a_broken_file_fails_and_its_cause_is_named(quantize, shapes_model, tmp_path):
    good, broken = quantize("backend=onnx", "dtype=u8s8").artifact.path, tmp_path / "broken.onnx"
    onnx.save(take_unit(onnx.load(good)), broken)
    files = map(str, (shapes_model.onnx_path, good, broken))
    with (
        mock.patch.object(background, "allowed", handed_over_here),
        mock.patch.object(figures, "to_png", lambda _: EMPTY),
    ):
        words = ("max_drop=0.05", "format=json")
        done = call_beside(tmp_path, "judge", *files, *QUICK, *words)
    assert done.code == 3, done.err
    first, second = json.loads(done.out)
    assert (first["verdict"], second["verdict"]) == ("pass", "fail")
    assert first["choice"]["framework"] == f"onnx file {good.name}"
    assert first["choice"]["dtype"] == "u8s8"
    assert first["commands"]["deploy"] is None
    said = " ".join(done.err.split())
    assert "the file fits best with preprocess=unit (" in said


@pytest.mark.slow
def test_a_file_that_cannot_be_read_is_wrong_input_and_named_once(shapes_model, tmp_path):
    truncated = tmp_path / "truncated.onnx"
    truncated.write_bytes(shapes_model.onnx_path.read_bytes()[:5000])
    with mock.patch.object(background, "allowed", handed_over_here):
        done = call_beside(tmp_path, "judge", str(shapes_model.onnx_path), str(truncated), *QUICK)
    reason = "truncated.onnx: not an ONNX model, or a truncated one"
    assert done.code == 2
    assert done.err.count(reason) == 1  # in the log
    assert done.out.count(reason) == 1  # the answer
    assert done.out.splitlines()[-1].startswith("error: onnx file truncated.onnx: ")
    assert "accuracy" not in done.out  # no table without a measured file


@pytest.mark.slow
def test_wrong_input_is_worse_than_a_fail_and_stops_no_other_file(quantize, shapes_model, tmp_path):
    good = quantize("backend=onnx", "dtype=u8s8").artifact.path
    files = map(str, (shapes_model.onnx_path, good, shapes_model.onnx_path))
    with (
        mock.patch.object(background, "allowed", handed_over_here),
        mock.patch.object(figures, "to_png", lambda _: EMPTY),
    ):
        words = ("min_accuracy=1.0", "format=json")
        done = call_beside(tmp_path, "judge", *files, *QUICK, *words)
    first, second = json.loads(done.out)
    assert (first["verdict"], second["verdict"]) == ("fail", "unsupported")
    assert "expected a quantized file" in second["because"]
    assert done.code == 2


@pytest.mark.slow
@pytest.mark.parametrize("task", ["agreement", "deviation", "classification"])
def test_a_file_that_answers_nothing_fails_in_words(task, quantize, shapes_model, tmp_path):
    good, silent = quantize("backend=onnx", "dtype=u8s8").artifact.path, tmp_path / "silent.onnx"
    proto = onnx.load(good)
    [output] = proto.graph.output
    [last] = [node for node in proto.graph.node if output.name in node.output]
    last.output[0] = "answer"
    zero = onnx.numpy_helper.from_array(np.float32(0), "zero")
    proto.graph.initializer.append(zero)
    proto.graph.node.append(onnx.helper.make_node("Mul", ["answer", "zero"], [output.name]))
    onnx.save(proto, silent)
    with mock.patch.object(background, "allowed", handed_over_here):
        words = (*QUICK, f"task={task}", "max_drop=0.5", "min_sqnr_db=-9", "format=json")
        files = (str(shapes_model.onnx_path), str(silent))
        done = call_beside(tmp_path, "judge", *files, *words)
    [answer] = json.loads(done.out)
    assert (done.code, answer["verdict"]) == (3, "fail"), done.err
    assert f"output {output.name} is zero for every sample" in done.err
