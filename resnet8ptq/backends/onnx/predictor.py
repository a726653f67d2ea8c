"""Runs an ONNX file in ONNX Runtime."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray

from resnet8ptq.backends.contract import Nodes, Predict, Predictor
from resnet8ptq.core.errors import UnsupportedError, errors_as
from resnet8ptq.core.records import feed
from resnet8ptq.graph.session import end_at_logits, open_runner
from resnet8ptq.target.measure import CPU, OnnxFile, RefusalError, check_provider


def check_file(path: Path) -> None:
    """Check that an ONNX file is valid: its structure, operators, attributes and names.

    Raises:
        onnx.checker.ValidationError: the file is invalid.
    """
    onnx.checker.check_model(onnx.load(path))


def load(path: Path, threads: int, provider: str = CPU) -> Predictor:
    """Load an ONNX file, to run on `threads` threads of an execution provider.

    Raises:
        UnsupportedError: the provider is missing, does not start, or refuses the file.
    """
    open_logits = partial(_open_logits, path, threads, provider)
    if provider == CPU:
        return Predictor(open_runner(str(path), threads, spins=True), open_logits)
    file = _open(provider, str(path), threads)
    return Predictor(partial(_run, file), open_logits, find_nodes=partial(_find_nodes, file))


def open_kernels(path: Path, threads: int, provider: str, without: Sequence[str] = ()) -> Predict:
    """Load a file as a function, with some optimizers disabled; see `load`."""
    if provider == CPU:
        return open_runner(str(path), threads, without=without)
    return partial(_run, _open(provider, str(path), threads, without))


def refuse_missing(provider: str) -> None:
    """Raise `UnsupportedError` if ONNX Runtime lacks an execution provider here."""
    with _refusals(provider):
        check_provider(provider)


def _open(provider: str, model: str | bytes, threads: int, without: Sequence[str] = ()) -> OnnxFile:
    with _refusals(provider):
        return OnnxFile(model, threads, provider, without)


@contextmanager
def _refusals(provider: str) -> Iterator[None]:
    with errors_as(UnsupportedError, f"backend.provider={provider}: it refuses the file"):
        try:
            yield
        except RefusalError as error:
            raise UnsupportedError(f"backend.provider: {error}") from None


def _run(file: OnnxFile, batch: NDArray[Any]) -> list[NDArray[Any]]:
    return file.run([*feed(batch, file.names).values()])


def _find_nodes(file: OnnxFile, batch: NDArray[Any]) -> Nodes:
    return file.find_nodes([*feed(batch, file.names).values()])


def _open_logits(path: Path, threads: int, provider: str) -> Predict | None:
    proto = onnx.load(path)
    if not end_at_logits(proto):
        return None
    if provider == CPU:
        return open_runner(proto, threads, spins=True)
    return partial(_run, _open(provider, proto.SerializeToString(), threads))
