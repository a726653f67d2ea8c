"""The commands that the program prints begin as the command line did."""

import shlex
import sys
from pathlib import Path

import pytest

from resnet8ptq.core import invocation

PYTHON = str(Path(sys.executable).absolute())


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder of PATH, alone there, with `resnet8ptq` and `python`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("resnet8ptq", "python"):
        (folder / name).write_text("#!/bin/sh")
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("called", "run", "deploy"),
    [
        ("BIN/resnet8ptq", "resnet8ptq run", "resnet8ptq deploy"),
        ("/other/bin/resnet8ptq", "/other/bin/resnet8ptq run", "/other/bin/resnet8ptq deploy"),
        ("run.py", "python run.py", "python -m resnet8ptq deploy"),
        ("../a clone/run.py", "python '../a clone/run.py'", "python -m resnet8ptq deploy"),
        ("/x/resnet8ptq/__main__.py", "python -m resnet8ptq run", "python -m resnet8ptq deploy"),
    ],
)
def test_a_command_begins_as_this_one_did(monkeypatch, programs, called, run, deploy):
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setattr(sys, "argv", [called.replace("BIN", str(programs))])
    assert invocation.command("run") == run
    assert invocation.command("deploy", "root=my runs") == f"{deploy} 'root=my runs'"


def test_a_python_that_is_not_on_path_is_named_whole(monkeypatch, programs):
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(sys, "argv", ["run.py"])
    assert invocation.command("run", "-m") == f"{shlex.quote(PYTHON)} run.py -m"
