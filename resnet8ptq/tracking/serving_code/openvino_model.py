"""Serves an ONNX file, or an archive of OpenVINO's two files, through MLflow's pyfunc.

OpenVINO runs it without bfloat16, as it was measured.
"""

import sys
import zipfile
from threading import Lock
from typing import Any

import mlflow
import numpy as np


class OpenvinoModel(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """The compiled file; it runs requests one at a time."""

    def load_context(self, context: Any) -> None:
        """Compile the file, without OpenVINO's telemetry."""
        sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
        import openvino

        self.names = context.model_config["outputs"]
        self.inputs = dict(context.model_config["inputs"])
        settings = {"INFERENCE_PRECISION_HINT": "f32"}
        core, path = openvino.Core(), context.artifacts["model"]
        if path.endswith(".zip"):  # OpenVINO's two files
            with zipfile.ZipFile(path) as files:
                graph = core.read_model(files.read("model.xml"), files.read("model.bin"))
        else:
            graph = core.read_model(path)
        self.network = core.compile_model(graph, "CPU", settings)
        self.taken = [value.get_any_name() for value in self.network.inputs]
        self.lock = Lock()

    def predict(self, context: Any, model_input: np.ndarray, params: Any = None) -> dict[str, Any]:
        """Return each output [n, ...] by its name, for network inputs [n, ...]."""
        values: Any = model_input  # by name, if the signature names the inputs
        if not isinstance(values, dict):
            values = {next(iter(self.inputs)): values}
        batch = {
            name: np.ascontiguousarray(values[name], kind) for name, kind in self.inputs.items()
        }
        if len(batch) == 1:  # the signature's name of a single input is not the file's
            batch = dict(zip(self.taken, batch.values(), strict=True))
        with self.lock:
            results = self.network({name: batch[name] for name in self.taken})
            return {name: results[number].copy() for number, name in enumerate(self.names)}


mlflow.models.set_model(OpenvinoModel())
