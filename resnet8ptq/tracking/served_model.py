"""Serves a run's file through MLflow's pyfunc: TFLite, torch, ExecuTorch, OpenVINO.

MLflow copies this module beside the file. It does not import this package, and imports a framework
only when it loads a file: a server needs only that framework, and logging a model needs none.
"""

import sys
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

import mlflow
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Batch = dict[str, Array]  # network inputs [n, ...] by name
Run = Callable[[Batch], list[Array]]  # returns the outputs [n, ...]
_INTEGERS = (np.int8, np.int16)
_OPERATORS = "torch.ao.quantization.fx._decomposed"  # importing it registers a program's


class ServedModel(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """The loaded file."""

    def load_context(self, context: Any) -> None:
        """Load the logged artifact and its runtime; MLflow calls this before `predict`."""
        config, path = context.model_config, Path(context.artifacts["model"])
        self.names, self.inputs = config["outputs"], dict(config["inputs"])
        self.run = _LOADERS[path.suffix](path, config["engine"])

    def predict(self, context: Any, model_input: np.ndarray, params: Any = None) -> dict[str, Any]:
        """Return each output [n, ...] by its name, for network inputs [n, ...]."""
        values: Any = model_input  # by name, if the signature names the inputs
        if not isinstance(values, dict):
            values = {next(iter(self.inputs)): values}
        batch = {
            name: np.ascontiguousarray(values[name], kind) for name, kind in self.inputs.items()
        }
        return dict(zip(self.names, self.run(batch), strict=True))


def _one_at_a_time(run: Run) -> Run:
    """Let only one request run at a time."""
    lock = Lock()

    def run_alone(batch: Batch) -> list[Array]:
        with lock:
            return run(batch)

    return run_alone


def _load_torch(path: Path, engine: str | None) -> Run:
    """Load a file, with the weights packed for the engine on which it was measured."""
    import torch

    if engine is not None:
        torch.backends.quantized.engine = engine
    if path.suffix == ".pt2":
        import_module(_OPERATORS)
        module = torch.export.load(path).module()
    else:
        module = torch.jit.load(path, map_location="cpu")

    def run(batch: Batch) -> list[Array]:
        with torch.inference_mode():
            returned = module(*map(torch.from_numpy, batch.values()))
        outputs = returned if isinstance(returned, list | tuple) else [returned]
        return [(o.dequantize() if o.is_quantized else o).numpy() for o in outputs]

    return run


def _load_executorch(path: Path, engine: str | None) -> Run:
    import torch
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(path.read_bytes())
    method = program.load_method("forward")

    def run(batch: Batch, kept: Any = program) -> list[Array]:  # the method does not keep it
        samples = zip(*(torch.from_numpy(v).split(1) for v in batch.values()), strict=True)
        rows = [method.execute(sample) for sample in samples]
        return [np.concatenate([v.numpy() for v in part]) for part in zip(*rows, strict=True)]

    return _one_at_a_time(run)


def _load_openvino(path: Path, engine: str | None) -> Run:
    """Compile a file without OpenVINO's telemetry and without bfloat16, as it was measured."""
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    import openvino

    core = openvino.Core()
    if path.suffix == ".zip":  # OpenVINO's two files
        with zipfile.ZipFile(path) as files:
            graph = core.read_model(files.read("model.xml"), files.read("model.bin"))
    else:
        graph = core.read_model(path)
    network = core.compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    taken = [value.get_any_name() for value in network.inputs]

    def run(batch: Batch) -> list[Array]:
        if len(batch) == 1:  # the signature's name of a single input is not the file's
            batch = dict(zip(taken, batch.values(), strict=True))
        results = network({name: batch[name] for name in taken})
        return [results[number].copy() for number in range(len(network.outputs))]

    return _one_at_a_time(run)


def _load_tflite(path: Path, engine: str | None) -> Run:
    """Load a file with one input; inputs and outputs are floats for any file."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(path))
    interpreter.allocate_tensors()
    (taken,), outputs = interpreter.get_input_details(), interpreter.get_output_details()

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

    return _one_at_a_time(run)


_LOADERS: dict[str, Callable[[Path, str | None], Run]] = {
    **{".tflite": _load_tflite, ".pte": _load_executorch},
    **dict.fromkeys((".pt", ".pt2"), _load_torch),
    **dict.fromkeys((".onnx", ".zip"), _load_openvino),  # MLflow serves ONNX Runtime's files
}

mlflow.models.set_model(ServedModel())
