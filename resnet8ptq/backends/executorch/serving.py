"""Serves ExecuTorch files.

MLflow copies this module beside the file; `tracking.mlflow_store.served_model` calls it there.
This module must not import resnet8ptq, which may be missing on the server.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]
Batch = dict[str, Array]  # network inputs [n, ...] by name
Run = Callable[[Batch], list[Array]]  # returns the outputs [n, ...]
PARALLEL = False


def load(path: Path, engine: str | None) -> Run:
    """Load a program, which runs one sample at a time.

    Args:
        engine: has no effect; other backends need it.
    """
    import torch
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(path.read_bytes())
    method = program.load_method("forward")

    def run(batch: Batch, kept: Any = program) -> list[Array]:  # `method` needs `program` alive
        inputs = [torch.from_numpy(values).split(1) for values in batch.values()]
        rows = [method.execute(sample) for sample in zip(*inputs, strict=True)]

        # Join the samples of each output
        joined = []
        for part in zip(*rows, strict=True):
            joined.append(torch.cat(part).numpy())
        return joined

    return run
