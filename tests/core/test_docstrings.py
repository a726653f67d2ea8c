"""The examples in docstrings run, and give what they show."""

import doctest
import importlib
from pathlib import Path

import pytest

import resnet8ptq

PACKAGE = Path(resnet8ptq.__file__).parent
OF_FILES = ("calibration/coco_reader.py", "calibration/reader.py", "evaluation/coco_evaluator.py")


def find_examples():
    """Yield the modules with examples, without those whose examples need the user's files."""
    skipped = {PACKAGE / name for name in OF_FILES}
    for path in sorted(PACKAGE.rglob("*.py")):
        if ">>> " in path.read_text("utf-8") and path not in skipped:
            yield path


@pytest.mark.parametrize("path", list(find_examples()), ids=lambda path: path.stem)
def test_examples_give_what_they_show(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed
