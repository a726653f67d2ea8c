"""Serves a TFLite file through MLflow's pyfunc, with float inputs and outputs for any file."""

from threading import Lock
from typing import Any

import mlflow
import numpy as np
from ai_edge_litert.interpreter import Interpreter
from numpy.typing import NDArray

INTEGERS = (np.int8, np.int16)


class TfliteModel(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """The loaded file; its interpreter runs requests one at a time."""

    def load_context(self, context: Any) -> None:
        """Load the file."""
        self.names = context.model_config["outputs"]
        self.interpreter = Interpreter(model_path=context.artifacts["model"])
        self.interpreter.allocate_tensors()
        self.lock = Lock()

    def predict(self, context: Any, model_input: np.ndarray, params: Any = None) -> dict[str, Any]:
        """Return each output [n, ...] by its name, for network inputs [n, ...]."""
        inputs: Any = model_input  # by name, if the signature names the input
        values = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs
        with self.lock:
            rows = [self._run(sample) for sample in np.asarray(values, np.float32)]
        return {name: np.stack(values) for name, *values in zip(self.names, *rows, strict=True)}

    def _run(self, sample: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        (detail,) = self.interpreter.get_input_details()
        if detail["dtype"] in INTEGERS:
            scale, zero_point = detail["quantization"]
            ends = np.iinfo(detail["dtype"])
            levels = np.rint(sample / np.float32(scale)) + np.float32(zero_point)
            sample = np.clip(levels, ends.min, ends.max)
        self.interpreter.set_tensor(detail["index"], sample[np.newaxis].astype(detail["dtype"]))
        self.interpreter.invoke()
        return [self._read(output) for output in self.interpreter.get_output_details()]

    def _read(self, detail: Any) -> NDArray[np.float32]:
        value = self.interpreter.get_tensor(detail["index"])[0]
        if detail["dtype"] in INTEGERS:
            scale, zero_point = detail["quantization"]
            value = (value.astype(np.float32) - np.float32(zero_point)) * np.float32(scale)
        return value


mlflow.models.set_model(TfliteModel())
