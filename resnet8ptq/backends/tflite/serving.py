"""Serves TensorFlow Lite files.

MLflow copies this module beside the file; `tracking.mlflow_store.served_model` calls it there.
This module must not import resnet8ptq, which may be missing on the server.
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
    """Load a file with one input; where it takes or returns int8 or int16, callers use floats.

    Args:
        engine: has no effect; other backends need it.
    """
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(path))
    interpreter.allocate_tensors()
    [details] = interpreter.get_input_details()
    outputs = interpreter.get_output_details()

    # The file takes one sample at a time
    def run(batch: Batch) -> list[Array]:
        [samples] = batch.values()
        rows = [run_one(sample) for sample in np.asarray(samples, np.float32)]
        return [np.stack(part) for part in zip(*rows, strict=True)]

    def run_one(sample: Array) -> list[Array]:
        if details["dtype"] in _INTEGERS:  # round to the levels of the input
            scale, zero_point = details["quantization"]
            ends = np.iinfo(details["dtype"])
            levels = np.rint(sample / np.float32(scale)) + np.float32(zero_point)
            sample = np.clip(levels, ends.min, ends.max)
        interpreter.set_tensor(details["index"], sample[np.newaxis].astype(details["dtype"]))
        interpreter.reset_all_variables()  # recurrent operators keep their state
        interpreter.invoke()
        return [read(output) for output in outputs]

    def read(output: Any) -> Array:
        value = interpreter.get_tensor(output["index"])[0]
        if output["dtype"] in _INTEGERS:
            scale, zero_point = output["quantization"]
            value = (value.astype(np.float32) - np.float32(zero_point)) * np.float32(scale)
        return value

    return run
