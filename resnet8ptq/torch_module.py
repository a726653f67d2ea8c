"""From an ONNX file to a torch module, by onnx2torch."""

import types
import warnings
from pathlib import Path
from typing import Any

from resnet8ptq.errors import ModelError
from resnet8ptq.onnx_file import one_line


def load_torch_module(onnx_path: Path) -> Any:
    """Return the network as a `torch.fx.GraphModule`, [N, H, W, C] to [N, classes], to evaluate.

    Raises:
        ModelError: onnx2torch does not know an operator of the graph.
    """
    onnx2torch = _import_onnx2torch()
    try:
        return onnx2torch.convert(onnx_path).eval()
    except Exception as error:  # NotImplementedError, KeyError, RuntimeError, its own
        raise ModelError(
            f"{onnx_path}: onnx2torch cannot convert it ({one_line(error)}); backend=onnx takes it"
        ) from error


def _import_onnx2torch() -> types.ModuleType:
    """Import onnx2torch, which imports torchvision.

    Beside a CPU build of torch, pip installs a torchvision whose compiled ops do not load; its
    import then dies because `torchvision::nms` does not exist. Nothing here calls those ops, so
    declaring them is enough. Only then: where the compiled ops load, a second declaration fails.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision's, about its missing compiled ops
        try:
            import onnx2torch
        except RuntimeError as error:
            if "torchvision::nms" not in str(error):
                raise
            from torch import library

            ops = library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                ops.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _keep_alive.append(ops)
            import onnx2torch
    return onnx2torch


_keep_alive: list[Any] = []  # a torch Library takes its operators along when it is collected
