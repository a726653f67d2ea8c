"""`docs/examples/task_data.py` writes the files that commands of the documents name."""

import importlib.util
import re
import sys
from types import ModuleType

import pytest

from tests.helpers.calling import REPO

SCRIPT = REPO / "docs/examples/task_data.py"
PAGES = [REPO / f"docs/{page}.md" for page in ("tasks", "detection", "data")]
NEEDS = {"tokens": "tokenizers"}


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("task_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["task_data"] = module  # for its dataclasses
    spec.loader.exec_module(module)
    return module


task_data = load_script()


def take_one_step(network, loss_of, steps, rate):
    loss_of().backward()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning")  # its export
@pytest.mark.parametrize("name", sorted(task_data.MAKERS))
def test_the_files_of_an_example_are_those_that_a_command_names(name, tmp_path, monkeypatch):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(task_data, "learn", take_one_step)
    task_data.MAKERS[name]()
    shown = " ".join(path.read_text() for path in PAGES)
    named = {*re.findall(r"my_\w+(?:\.\w+)?", shown)}
    written = {path.name for path in tmp_path.iterdir()}
    assert written
    assert written <= named
