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
    """Read an ONNX file; raise an error if it is damaged, or invalid for `onnx.checker`."""
    onnx.checker.check_model(onnx.load(path))


def load(path: Path, threads: int, provider: str = CPU) -> Predictor:
    """Load an ONNX file, to run on an execution provider.

    Args:
        threads: number of threads of the CPU.

    Raises:
        UnsupportedError: a provider other than the CPU's is missing, does not start, or refuses the
            file.
    """
    open_logits = partial(_open_logits, path, threads, provider)
    if provider == CPU:
        return Predictor(open_runner(str(path), threads, spins=True), open_logits)
    file = _open(provider, str(path), threads)
    return Predictor(partial(_run, file), open_logits, find_nodes=partial(_find_nodes, file))


def open_kernels(path: Path, threads: int, provider: str, without: Sequence[str] = ()) -> Predict:
    """Load a file as a function; see `load`.

    Args:
        without: names of ONNX Runtime's optimizers to disable.
    """
    if provider == CPU:
        return open_runner(str(path), threads, without=without)
    return partial(_run, _open(provider, str(path), threads, without))


def refuse_missing(provider: str) -> None:
    """Raise `UnsupportedError` if ONNX Runtime on this machine lacks an execution provider."""
    with _refusals(provider):
        check_provider(provider)


def _open(provider: str, model: str | bytes, threads: int, without: Sequence[str] = ()) -> OnnxFile:
    with _refusals(provider):
        return OnnxFile(model, threads, provider, without)


@contextmanager
def _refusals(provider: str) -> Iterator[None]:
    """Raise a library's error or a `RefusalError` in the block as `UnsupportedError`."""
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
