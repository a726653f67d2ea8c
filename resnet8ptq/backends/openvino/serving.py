"""Serves OpenVINO files.

MLflow copies this module beside the file; `tracking.mlflow_store.served_model` calls it there.
This module must not import resnet8ptq, which may be missing on the server.
"""

import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]
Batch = dict[str, Array]  # network inputs [n, ...] by name
Run = Callable[[Batch], list[Array]]  # returns the outputs [n, ...]
PARALLEL = False


def load(path: Path, engine: str | None) -> Run:
    """Compile a file without OpenVINO's telemetry, for the float type of `engine`.

    The function warns if this CPU computes in another type.

    Args:
        engine: the engine of the measured run: `openvino` or None (float32), `openvino bf16` or
            `openvino f16`.
    """
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    import openvino

    # Read one ONNX file, or OpenVINO's two files
    precision = (engine or "").partition(" ")[2] or "f32"
    core = openvino.Core()
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as files:
            graph = core.read_model(files.read("model.xml"), files.read("model.bin"))
    else:
        graph = core.read_model(path)

    # OpenVINO may compute in another type than the hint's
    network = core.compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": precision})
    used = network.get_property("INFERENCE_PRECISION_HINT").to_string()
    if used != precision:
        warnings.warn(f"this CPU has no {precision}: computes in {used}", stacklevel=2)
    names = [value.get_any_name() for value in network.inputs]

    def run(batch: Batch) -> list[Array]:
        if len(batch) == 1:  # a signature names a single input differently
            batch = dict(zip(names, batch.values(), strict=True))
        results = network({name: batch[name] for name in names})
        return [results[number].copy() for number in range(len(network.outputs))]

    return run
