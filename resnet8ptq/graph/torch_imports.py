"""Imports torchvision and onnx2torch; plain imports may fail with a CPU build of torch."""

import importlib
import sys
import types
from functools import cache
from typing import Any, NoReturn

import torch

from resnet8ptq.graph.torch_lowering import OWN

# torchvision registers shape functions for these operators even if the operators are missing.
_TORCHVISION_OPERATORS = {
    "torchvision::nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "torchvision::qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


@cache
def import_torchvision() -> None:
    """Import torchvision, if installed, so that a user's module can import it too.

    With a CPU build of torch, the compiled operators of pip's torchvision may not load. The import
    of torchvision then fails on `nms` or `qnms`, so both are declared here without a kernel. If a
    network calls `torchvision.ops.nms`, torchvision's error says to reinstall torchvision.

    Raises:
        Exception: the import fails for a reason other than these operators or a missing module.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if not any(name in str(error) for name in _TORCHVISION_OPERATORS):
            raise
        for name, schema in _TORCHVISION_OPERATORS.items():
            torch.library.define(name, schema)
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        pass  # a module that needs torchvision fails with its own message


@cache
def import_onnx2torch() -> types.ModuleType:
    """Import onnx2torch without torchvision, unless torchvision is already imported.

    onnx2torch imports torchvision for two operators of object detectors, RoiAlign and
    NonMaxSuppression. The import takes a second and may fail (see `import_torchvision`). Without
    torchvision, both operators raise NotImplementedError.
    """
    # Stand-ins for the modules and functions that onnx2torch imports
    torchvision = types.ModuleType("torchvision")
    operators = types.ModuleType("torchvision.ops")
    torchvision.__dict__["ops"] = operators
    for operator in ("roi_align", "nms", "box_convert"):
        operators.__dict__[operator] = _refuse
    stubs = {}
    for stub in (torchvision, operators):
        if stub.__name__ not in sys.modules:
            stubs[stub.__name__] = stub
    sys.modules.update(stubs)
    try:
        onnx2torch = importlib.import_module("onnx2torch")
        _add_converters()
        return onnx2torch
    finally:
        for name in stubs:
            del sys.modules[name]


def _add_converters() -> None:
    """Register a placeholder for nodes of the domain `OWN`, and two comparisons of opset 16."""
    from onnx2torch.node_converters.registry import add_converter, get_converter
    from onnx2torch.utils.common import OperationConverterResult, onnx_mapping_from_node

    for kind in ("GreaterOrEqual", "LessOrEqual"):
        add_converter(operation_type=kind, version=16)(get_converter(kind, 12))

    @add_converter(operation_type=OWN, version=1, domain=OWN)  # type: ignore[untyped-decorator]
    def _(node: Any, graph: Any) -> Any:
        return OperationConverterResult(torch.nn.Identity(), onnx_mapping_from_node(node))


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError("RoiAlign and NonMaxSuppression are not supported")
