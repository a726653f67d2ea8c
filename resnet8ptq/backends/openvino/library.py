"""Imports OpenVINO without its telemetry, reads ONNX files, and compiles graphs for the CPU."""

import sys
from functools import cache
from pathlib import Path
from typing import Any

from resnet8ptq.backends.openvino import BACKEND
from resnet8ptq.core.errors import UnsupportedError, errors_as
from resnet8ptq.target.measure import F32, RefusalError, check_precision

_MISSING = "backend=openvino: got no package openvino; try pip install 'resnet8ptq[openvino]'"


@cache
def library() -> Any:
    """Return the module `openvino`.

    Importing OpenVINO sends telemetry to Intel, unless the import of `openvino_telemetry` fails.
    An entry None in `sys.modules` makes that import fail.

    Raises:
        UnsupportedError: OpenVINO is not installed.
    """
    if not BACKEND.is_installed:
        raise UnsupportedError(_MISSING)
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    import openvino

    return openvino


@cache
def core() -> Any:
    """Return OpenVINO's `Core`, the same object for the whole process."""
    return library().Core()


@cache
def open_front_end(name: str) -> Any:
    """Return OpenVINO's reader of one format."""
    library()
    from openvino.frontend import FrontEndManager

    return FrontEndManager().load_by_framework(name)


def read_graph(model: Path | bytes) -> Any:
    """Return OpenVINO's graph of an ONNX file, or of its content."""
    if isinstance(model, Path):
        return core().read_model(str(model))
    return core().read_model(model)


def refuse_missing(precision: str) -> None:
    """Raise `UnsupportedError` if OpenVINO does not list a float type for this CPU."""
    try:
        check_precision(core(), precision)
    except RefusalError as error:
        raise UnsupportedError(f"backend.inference_precision: {error}") from None


def compile_graph(
    graph: Any,
    threads: int,
    precision: str = F32,
    timed: bool = False,
    on_integers: bool = True,
) -> Any:
    """Return a graph compiled for the CPU.

    Args:
        threads: number of threads; 0 for every core.
        precision: the float type of the layers that are not quantized.
        timed: whether each node is timed.
        on_integers: whether integer kernels may run; otherwise QDQ is computed in float.

    Raises:
        UnsupportedError: OpenVINO cannot compile the graph, for example because it lacks a kernel.
    """
    settings = {
        "LP_TRANSFORMS_MODE": on_integers,
        "INFERENCE_PRECISION_HINT": precision,  # OpenVINO's default is bf16 on some CPUs
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,  # with pinning, several processes share the first core
        "PERF_COUNT": timed,
    }
    why = "backend=openvino: OpenVINO cannot compile the network for this CPU"
    with errors_as(UnsupportedError, why, "try backend=onnx"):
        return core().compile_model(graph, "CPU", settings)
