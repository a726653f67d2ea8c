"""`resnet8ptq init`: the first files of a project."""

import pytest

from resnet8ptq.starter.folder import FILES
from tests.helpers.calling import QUICK, call, call_beside

METRIC = "task.metric._target_=my_metrics.probability_of_the_label"


def test_the_next_commands_are_printed(tmp_path):
    done = call_beside(tmp_path, "init", "1.20 Ördner")
    assert done.code == 0
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {
        f"1.20 Ördner/{name}" for name in FILES
    }
    assert [line.strip() for line in done.out.splitlines()[2:]] == [
        "cd '1.20 Ördner'",
        "resnet8ptq run experiment=mine",
        "resnet8ptq deploy",
        "resnet8ptq ui",
    ]


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_overwritten(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    done = call_beside(tmp_path, "init")
    assert (done.code, len(done.errors)) == (2, 1)
    assert f"has {name}, expected a folder without them; try resnet8ptq init" in done.errors[0]
    assert path.read_text() == "mine"
    assert [item for item in tmp_path.rglob("*") if item.is_file()] == [path]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    done = call_beside(tmp_path, "init", "file")
    assert (done.code, len(done.errors)) == (2, 1)
    assert done.errors[0].startswith(f"error: folder: cannot write to {tmp_path / 'file'}")


@pytest.mark.slow
def test_its_sweep_and_its_metric_run(tmp_path):
    assert call_beside(tmp_path, "init").code == 0
    sweep = call(tmp_path, "experiment=mine", "backend=onnx", *QUICK, installed=True)
    assert sweep.code == 0, sweep.err
    assert [row["dtype"] for row in sweep.table] == ["fp32", "int8", "u8s8"]
    own = call(tmp_path, "task=custom", METRIC, *QUICK, installed=True)
    assert own.code == 0, own.err
    assert "probability_of_the_label" in own.out
