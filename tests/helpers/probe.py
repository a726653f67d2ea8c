"""A test's own code in the process that converts networks, where TensorFlow has started already."""

import sys
from pathlib import Path

from resnet8ptq.core import isolation
from resnet8ptq.core.errors import ModelError


def run(code: str, *words: object) -> None:
    """Run `code` there with these command-line arguments."""
    isolation.call(_run, code, list(map(str, words)), crashed=ModelError("the probe crashed"))


def _run(code: str, words: list[str]) -> None:
    sys.argv = [str(Path(__file__)), *words]
    exec(code, {"__name__": "__probe__"})
