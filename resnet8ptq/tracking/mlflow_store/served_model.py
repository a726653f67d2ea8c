"""Serves a run's file through MLflow's pyfunc, by the module `serving` of its backend.

MLflow copies this module and `serving` into the model's folder. They do not import resnet8ptq, and
import a framework only when they load a file. A server therefore needs only the framework of the
file, and logging a model needs none.
"""

from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import Lock
from typing import Any

import mlflow
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Batch = dict[str, Array]  # network inputs [n, ...] by name
Run = Callable[[Batch], list[Array]]  # returns the outputs [n, ...]


class ServedModel(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """MLflow's model: the loaded file, the names of its outputs, and the dtypes of its inputs."""

    def load_context(self, context: Any) -> None:
        """Load the logged artifact and its runtime; MLflow calls this before `predict`."""
        config = context.model_config
        path = Path(context.artifacts["model"])
        self.names = config["outputs"]
        self.inputs = dict(config["inputs"])
        serving = _import(Path(context.artifacts["serving"]))
        run: Run = serving.load(path, config["engine"])
        self.run = run if serving.PARALLEL else _one_at_a_time(run)

    def predict(self, context: Any, model_input: np.ndarray, params: Any = None) -> dict[str, Any]:
        """Return each output [n, ...] by name, for network inputs [n, ...]."""
        values: Any = model_input  # by name, if the signature names the inputs
        if not isinstance(values, dict):
            values = {next(iter(self.inputs)): values}
        batch = {}
        for name, kind in self.inputs.items():
            batch[name] = np.ascontiguousarray(values[name], kind)
        return dict(zip(self.names, self.run(batch), strict=True))


def _import(path: Path) -> Any:
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # the path is a Python file
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _one_at_a_time(run: Run) -> Run:
    """Return `run` with a lock, for a framework that runs one request at a time."""
    lock = Lock()

    def run_alone(batch: Batch) -> list[Array]:
        with lock:
            return run(batch)

    return run_alone


mlflow.models.set_model(ServedModel())
