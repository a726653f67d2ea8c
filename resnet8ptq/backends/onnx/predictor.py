"""Runs an ONNX file in ONNX Runtime."""

from functools import partial
from pathlib import Path

import onnx

from resnet8ptq.backends.contract import Predictor, Run
from resnet8ptq.graph.session import end_at_logits, open_runner


def check(path: Path) -> None:
    """Check that an ONNX file is valid: its structure, operators, attributes and names.

    Raises:
        onnx.checker.ValidationError: the file is invalid.
    """
    onnx.checker.check_model(onnx.load(path))


def load(path: Path, threads: int) -> Predictor:
    """Load an ONNX file; it runs on `threads` threads."""
    return Predictor(
        open_runner(str(path), threads, spins=True), partial(_open_logits, path, threads)
    )


def _open_logits(path: Path, threads: int) -> Run | None:
    proto = onnx.load(path)
    return open_runner(proto, threads, spins=True) if end_at_logits(proto) else None
