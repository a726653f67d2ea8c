"""Serves a TorchScript file or an exported program through MLflow's pyfunc.

It imports torch only when a file is loaded: MLflow imports this module to log it, and importing
torch would add two seconds to a run.
"""

from importlib import import_module
from typing import Any

import mlflow
import numpy as np

_OPERATORS = "torch.ao.quantization.fx._decomposed"  # importing it registers a program's


class TorchModel(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """The loaded file."""

    def load_context(self, context: Any) -> None:
        """Load the file, with the weights packed for the engine on which it was measured."""
        import torch

        self.names = context.model_config["outputs"]
        config = context.model_config  # older models have one input, and its dtype
        self.inputs = dict(config.get("inputs", [["input", config.get("dtype", "float32")]]))
        engine, path = context.model_config.get("engine"), context.artifacts["model"]
        if engine is not None:
            torch.backends.quantized.engine = engine
        if path.endswith(".pt2"):
            self.module = _load_program(path)
        else:
            self.module = torch.jit.load(path, map_location="cpu")

    def predict(self, context: Any, model_input: np.ndarray, params: Any = None) -> dict[str, Any]:
        """Return each output [n, ...] by its name, for network inputs [n, ...]."""
        import torch

        values: Any = model_input  # by name, if the signature names the inputs
        if not isinstance(values, dict):
            values = {next(iter(self.inputs)): values}
        batch = [np.ascontiguousarray(values[name], kind) for name, kind in self.inputs.items()]
        with torch.inference_mode():
            returned = self.module(*map(torch.from_numpy, batch))
        outputs = returned if isinstance(returned, list | tuple) else [returned]
        arrays = [(o.dequantize() if o.is_quantized else o).numpy() for o in outputs]
        return dict(zip(self.names, arrays, strict=True))


def _load_program(path: str) -> Any:
    import torch

    import_module(_OPERATORS)
    return torch.export.load(path).module()


mlflow.models.set_model(TorchModel())
