"""Runs a .pte file in ExecuTorch's runtime."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.backends.contract import Predictor
from resnet8ptq.core.console import silenced
from resnet8ptq.graph.torch_module import as_tensors


def load(path: Path, threads: int) -> Predictor:
    """Load a file of `lowering.lower`; its logits are not available."""
    return Predictor(LoadedProgram(path.read_bytes(), threads), lambda: None)


@dataclass
class _Pool:
    """XNNPACK's threads, which all programs of a process share.

    A new number of threads replaces the pool. Loaded programs point to the old pool, so they must
    be loaded again.

    Attributes:
        threads: number of threads; 0 before the runtime is imported.
        replaced: how often the number of threads was set.
    """

    threads: int = 0
    replaced: int = 0

    def resize(self, threads: int) -> None:
        if threads == self.threads:
            return
        with silenced(), _without_stderr():
            from executorch.extension.pybindings import portable_lib

            portable_lib._unsafe_reset_threadpool(threads)
        self.threads = threads
        self.replaced = self.replaced + 1


_POOL = _Pool()


@dataclass
class LoadedProgram:
    """Runs a program on batches, in parts that fit its planned memory.

    A program with a fixed batch size takes only multiples of it.
    """

    content: bytes
    threads: int
    _method: Any = field(default=None, init=False)
    _most: int = field(default=1, init=False)
    _pool: int = field(default=0, init=False)  # the pool that the program was loaded with

    def __post_init__(self) -> None:
        self._load()

    def __call__(self, batch: NDArray[Any]) -> tuple[NDArray[np.float32], ...]:
        """Return each output [n, ...] for a batch [n, ...]."""
        if (self.threads, self._pool) != (_POOL.threads, _POOL.replaced):
            self._load()
        starts = range(0, len(batch), self._most)
        parts = [self._run(batch[start : start + self._most]) for start in starts]
        return tuple(np.concatenate(outputs) for outputs in zip(*parts, strict=True))

    @property
    def metadata(self) -> Any:
        """ExecuTorch's description of the inputs and outputs."""
        return self._method.metadata

    def _run(self, batch: NDArray[Any]) -> list[NDArray[np.float32]]:
        outputs = self._method.execute(as_tensors(np.ascontiguousarray(batch)))
        return [output.numpy() for output in outputs]

    def _load(self) -> None:
        _POOL.resize(self.threads)
        from executorch.runtime import Runtime

        program = Runtime.get().load_program(self.content)
        self._method = program.load_method("forward")
        self._pool = _POOL.replaced
        self._most = program.metadata("forward").input_tensor_meta(0).sizes()[0]


def find_missing(content: bytes) -> list[str]:
    """Return a program's operators that the runtime lacks; it loads only a program without them."""
    _POOL.resize(_POOL.threads or 1)
    from executorch.exir._serialize._program import deserialize_pte_binary
    from executorch.runtime import Runtime

    [plan] = deserialize_pte_binary(content).program.execution_plan
    names = {f"{kernel.name}.{kernel.overload}".rstrip(".") for kernel in plan.operators}
    return sorted(names - Runtime.get().operator_registry.operator_names)


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Drop stderr, where the runtime's C++ code logs missing CPU files and new threads."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
