"""A TorchScript file or an exported program behind MLflow's pyfunc."""

from importlib import import_module
from typing import Any

import mlflow
import numpy as np
import torch

_OPERATORS = "torch.ao.quantization.fx._decomposed"  # importing it registers a program's


class TorchModel(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """The file, loaded."""

    def load_context(self, context: Any) -> None:
        """Load the file, its weights packed for the engine that it was measured on."""
        self.names = context.model_config["outputs"]
        engine, path = context.model_config.get("engine"), context.artifacts["model"]
        if engine is not None:
            torch.backends.quantized.engine = engine
        if path.endswith(".pt2"):
            import_module(_OPERATORS)

            self.module = torch.export.load(path).module()
        else:
            self.module = torch.jit.load(path, map_location="cpu")

    def predict(self, context: Any, model_input: np.ndarray, params: Any = None) -> dict[str, Any]:
        """Return each output [n, ...] by its name, for network inputs [n, ...]."""
        given: Any = model_input  # by the name that the signature has, where that names it
        values = next(iter(given.values())) if isinstance(given, dict) else given
        batch = torch.from_numpy(np.ascontiguousarray(values, np.float32))
        with torch.inference_mode():
            found = self.module(batch)
        outputs = found if isinstance(found, list | tuple) else [found]
        arrays = [(o.dequantize() if o.is_quantized else o).numpy() for o in outputs]
        return dict(zip(self.names, arrays, strict=True))


mlflow.models.set_model(TorchModel())
