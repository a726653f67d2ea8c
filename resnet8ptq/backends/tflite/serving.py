"""Serves TensorFlow Lite files.

MLflow copies this module beside the file, and calls it from `tracking.mlflow_store.served_model`.
This module must not import resnet8ptq, which may be missing there.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Batch = dict[str, Array]  # network inputs [n, ...] by name
Run = Callable[[Batch], list[Array]]  # returns the outputs [n, ...]
PARALLEL = False
_INTEGERS = (np.int8, np.int16)


def load(path: Path, engine: str | None) -> Run:
    """Load a file with one input; callers pass and get floats, even if the file takes integers."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(path))
    interpreter.allocate_tensors()
    (taken,) = interpreter.get_input_details()
    outputs = interpreter.get_output_details()

    def run(batch: Batch) -> list[Array]:
        (samples,) = batch.values()
        rows = [run_one(sample) for sample in np.asarray(samples, np.float32)]
        return [np.stack(part) for part in zip(*rows, strict=True)]

    def run_one(sample: Array) -> list[Array]:
        if taken["dtype"] in _INTEGERS:
            scale, zero_point = taken["quantization"]
            ends = np.iinfo(taken["dtype"])
            levels = np.rint(sample / np.float32(scale)) + np.float32(zero_point)
            sample = np.clip(levels, ends.min, ends.max)
        interpreter.set_tensor(taken["index"], sample[np.newaxis].astype(taken["dtype"]))
        interpreter.invoke()
        return [read(detail) for detail in outputs]

    def read(detail: Any) -> Array:
        value = interpreter.get_tensor(detail["index"])[0]
        if detail["dtype"] in _INTEGERS:
            scale, zero_point = detail["quantization"]
            value = (value.astype(np.float32) - np.float32(zero_point)) * np.float32(scale)
        return value

    return run
