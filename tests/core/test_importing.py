"""Modules of the current folder are found, behind the standard library and installed packages."""

import subprocess
import sys

import pytest

from resnet8ptq.core import importing, isolation
from resnet8ptq.core.errors import ModelError
from tests.helpers.calling import REPO, clean_environment, kept_globals
from tests.helpers.originals import call_isolated, start_isolated


def test_modules_of_the_folder_are_found_last(tmp_path):
    with kept_globals():
        importing.allow(tmp_path)
        importing.allow(tmp_path)
        assert sys.path[-1] == str(tmp_path)
        assert sys.path.count(str(tmp_path)) == 1


@pytest.mark.parametrize("started", [("-m", "resnet8ptq"), ("-P", "-m", "resnet8ptq")])
def test_a_file_here_does_not_shadow_a_library(tmp_path, started):
    for name in ("secrets", "omegaconf", "hydra"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    done = subprocess.run(
        [sys.executable, *started, "run", "--cfg", "job"],
        cwd=tmp_path,
        env=clean_environment(PYTHONPATH=str(REPO)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "shadowed" not in done.stderr


def test_the_process_that_reads_networks_finds_them_too(tmp_path, monkeypatch):
    monkeypatch.setattr(isolation, "start", start_isolated)
    (tmp_path / "ours_alone.py").write_text("def answer():\n    return 'from here'\n")
    (tmp_path / "json.py").write_text("raise ImportError('shadowed')")
    with kept_globals():
        importing.allow(tmp_path)
        import ours_alone

        assert call_isolated(ours_alone.answer, crashed=ModelError("crashed")) == "from here"
