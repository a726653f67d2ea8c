"""Serves PyTorch files.

MLflow copies this module beside the file; `tracking.mlflow_store.served_model` calls it there.
This module must not import resnet8ptq, which may be missing on the server.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]
Batch = dict[str, Array]  # network inputs [n, ...] by name
Run = Callable[[Batch], list[Array]]  # returns the outputs [n, ...]
PARALLEL = True  # requests may run at the same time
_OPERATORS = "torch.ao.quantization.fx._decomposed"  # importing it registers a program's operators


def load(path: Path, engine: str | None) -> Run:
    """Load a TorchScript file, or a program (.pt2); quantized outputs become floats.

    Args:
        engine: torch's engine of the measured run, for which torch packs the weights; None keeps
            the current one.
    """
    import torch

    if engine is not None:
        torch.backends.quantized.engine = engine

    # A program needs its operators registered; a TorchScript file holds its code
    if path.suffix == ".pt2":
        import_module(_OPERATORS)
        module = torch.export.load(path).module()
    else:
        module = torch.jit.load(path, map_location="cpu")

    def run(batch: Batch) -> list[Array]:
        with torch.inference_mode():
            returned = module(*map(torch.from_numpy, batch.values()))
        outputs = returned if isinstance(returned, list | tuple) else [returned]
        return [_to_floats(output).numpy() for output in outputs]

    return run


def _to_floats(output: Any) -> Any:
    return output.dequantize() if output.is_quantized else output
