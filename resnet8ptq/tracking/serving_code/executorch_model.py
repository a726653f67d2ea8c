"""Serves an ExecuTorch program through MLflow's pyfunc."""

from pathlib import Path
from threading import Lock
from typing import Any

import mlflow
import numpy as np


class ExecutorchModel(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """The loaded program; it runs requests one at a time."""

    def load_context(self, context: Any) -> None:
        """Load the file."""
        from executorch.runtime import Runtime

        self.names = context.model_config["outputs"]
        self.inputs = dict(context.model_config["inputs"])
        content = Path(context.artifacts["model"]).read_bytes()
        self.program = Runtime.get().load_program(content)
        self.method, self.lock = self.program.load_method("forward"), Lock()

    def predict(self, context: Any, model_input: np.ndarray, params: Any = None) -> dict[str, Any]:
        """Return each output [n, ...] by its name, for network inputs [n, ...]."""
        import torch

        values: Any = model_input  # by name, if the signature names the inputs
        if not isinstance(values, dict):
            values = {next(iter(self.inputs)): values}
        batch = [np.ascontiguousarray(values[name], kind) for name, kind in self.inputs.items()]
        samples = zip(*(torch.from_numpy(array).split(1) for array in batch), strict=True)
        with self.lock:
            rows = [self.method.execute(sample) for sample in samples]
        arrays = [
            np.concatenate([value.numpy() for value in part]) for part in zip(*rows, strict=True)
        ]
        return dict(zip(self.names, arrays, strict=True))


mlflow.models.set_model(ExecutorchModel())
