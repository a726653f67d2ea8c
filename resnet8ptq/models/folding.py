"""Shape inference, graph optimization and folding before quantization, and what they changed.

All three are one switch, `model.fold`.
"""

import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from resnet8ptq.core.text import one_line


@dataclass(frozen=True)
class Preprocessing:
    """A graph before and after.

    Attributes:
        operators_before, operators_after: how often each operator is in the graph.
        failure: why there is no preprocessed graph; None if there is one.
    """

    operators_before: dict[str, int] = field(default_factory=dict)
    operators_after: dict[str, int] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0
    failure: str | None = None

    def describe(self) -> dict[str, str]:
        """Return what changed, by the name it is logged under."""
        before, after = Counter(self.operators_before), Counter(self.operators_after)
        changes = [
            f"{name} {before[name]} -> {after[name]}"
            for name in sorted(before | after)
            if before[name] != after[name]
        ]
        return {
            "preprocess_nodes": f"{before.total()} -> {after.total()}",
            "preprocess_bytes": f"{self.bytes_before} -> {self.bytes_after}",
            "preprocess_operators": ", ".join(changes) or "unchanged",
        }


def preprocess(unfolded: Path, folded: Path) -> Preprocessing:
    """Fold batch normalization into the convolutions, by ONNX Runtime's own preprocessing.

    Keras 3 exports it as Mul and Add, which quantization would otherwise leave as they are. A
    graph that ONNX Runtime fails on is not an error yet: it can be quantized as it is.
    """
    from onnxruntime.quantization.shape_inference import quant_pre_process

    unfolded, folded = unfolded.absolute(), folded.absolute()
    try:
        # ONNX Runtime leaves a graph whose shapes it does not know in the working folder.
        with _strict(), tempfile.TemporaryDirectory() as folder, chdir(folder):
            try:
                quant_pre_process(unfolded, folded)
            except Exception:  # of a free batch it may not know each shape; ONNX's own may do
                quant_pre_process(unfolded, folded, skip_symbolic_shape=True)
    except Exception as error:  # symbolic shape inference raises Exception itself
        folded.unlink(missing_ok=True)
        return Preprocessing(failure=one_line(error))
    return Preprocessing(
        operators_before=_operators(unfolded),
        operators_after=_operators(folded),
        bytes_before=unfolded.stat().st_size,
        bytes_after=folded.stat().st_size,
    )


@contextmanager
def _strict() -> Iterator[None]:
    """Where its optimization fails, `quant_pre_process` only logs it and goes on without."""

    def refuse(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            raise RuntimeError(f"optimization failed: {sys.exc_info()[1]}")
        return True

    log = logging.getLogger("onnxruntime.quantization.shape_inference")
    log.addFilter(refuse)
    try:
        yield
    finally:
        log.removeFilter(refuse)


def _operators(path: Path) -> dict[str, int]:
    return dict(Counter(node.op_type for node in onnx.load(path).graph.node))
