"""One word for one thing: no two public classes share a name."""

import ast
from collections import Counter
from pathlib import Path

import resnet8ptq

SHARED = {"Arguments"}  # the settings of a command, one for each


def test_no_two_public_classes_share_a_name():
    names: Counter[str] = Counter()
    for path in Path(resnet8ptq.__file__).parent.rglob("*.py"):
        classes = [
            node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)
        ]
        names.update(node.name for node in classes if not node.name.startswith("_"))
    assert {name for name, count in names.items() if count > 1} == SHARED
