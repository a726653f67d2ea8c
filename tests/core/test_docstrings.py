"""The examples in docstrings run, and give what they show."""

import doctest
import importlib
from pathlib import Path

import pytest

import resnet8ptq

PACKAGE = Path(resnet8ptq.__file__).parent
WITH_EXAMPLES = sorted(path for path in PACKAGE.rglob("*.py") if ">>> " in path.read_text("utf-8"))


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.stem)
def test_examples_give_what_they_show(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed
