"""A TorchScript file, an exported program or a compiled package behind MLflow's pyfunc.

torch is imported when a file is loaded. MLflow imports this module to log it, and importing torch
would add two seconds to the end of a run.
"""

import json
import zipfile
from importlib import import_module
from pathlib import Path
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
            self.module = _load_package(path) or _load_program(path)
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


def _load_package(path: str) -> Any:
    """Load a package of AOTInductor; None for another file.

    Raises:
        RuntimeError: this CPU lacks features that the package was compiled for.
    """
    with zipfile.ZipFile(path) as archive:
        about = [n for n in archive.namelist() if n.endswith(".wrapper_metadata.json")]
        if not about:
            return None
        made_on = json.loads(archive.read(about[0]))
    lacking = sorted({*made_on["cpu_flags"].split()} - {*Path("/proc/cpuinfo").read_text().split()})
    if lacking:
        raise RuntimeError(f"compiled for {made_on['cpu']}; this CPU lacks {', '.join(lacking)}")
    import torch._inductor

    return torch._inductor.aoti_load_package(path)


mlflow.models.set_model(TorchModel())
