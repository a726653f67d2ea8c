"""A TFLite file behind MLflow's pyfunc: floats in and out, whatever integers the file takes."""

from threading import Lock
from typing import Any

import mlflow
import numpy as np
from ai_edge_litert.interpreter import Interpreter
from numpy.typing import NDArray


class TfliteModel(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """The file, loaded; its interpreter runs one request after another."""

    def load_context(self, context: Any) -> None:
        """Load the file."""
        self.names = context.model_config["outputs"]
        self.interpreter = Interpreter(model_path=context.artifacts["model"])
        self.interpreter.allocate_tensors()
        self.lock = Lock()

    def predict(self, context: Any, model_input: np.ndarray, params: Any = None) -> dict[str, Any]:
        """Return each output [n, ...] by its name, for network inputs [n, ...]."""
        given: Any = model_input  # by the name that the signature has, where that names it
        values = next(iter(given.values())) if isinstance(given, dict) else given
        with self.lock:
            found = [self._run(sample) for sample in np.asarray(values, np.float32)]
        return {name: np.stack(values) for name, *values in zip(self.names, *found, strict=True)}

    def _run(self, sample: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        (taken,) = self.interpreter.get_input_details()
        if taken["dtype"] == np.int8:
            scale, zero_point = taken["quantization"]
            levels = np.rint(sample / np.float32(scale)) + np.float32(zero_point)
            sample = np.clip(levels, -128, 127)
        self.interpreter.set_tensor(taken["index"], sample[np.newaxis].astype(taken["dtype"]))
        self.interpreter.invoke()
        return [self._read(given) for given in self.interpreter.get_output_details()]

    def _read(self, given: Any) -> NDArray[np.float32]:
        value = self.interpreter.get_tensor(given["index"])[0]
        if given["dtype"] == np.int8:
            scale, zero_point = given["quantization"]
            value = (value.astype(np.float32) - np.float32(zero_point)) * np.float32(scale)
        return value


mlflow.models.set_model(TfliteModel())
