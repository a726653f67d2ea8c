"""From an ONNX file to a torch module, by onnx2torch; and the way back from names to names."""

import copy
import importlib
import sys
import types
from collections.abc import Collection, Mapping
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

import onnx
import torch

from resnet8ptq.core.errors import ModelError
from resnet8ptq.core.text import one_line

_OPSET = 17  # the newest of which onnx2torch knows every operator that networks are made of


def load_torch_module(onnx_path: Path) -> Any:
    """Return the network as a `torch.fx.GraphModule`, [N, H, W, C] to [N, classes], to evaluate.

    Raises:
        ModelError: onnx2torch does not know an operator of the graph.
    """
    # Given a path it writes beside the file, where other processes check the cache's entry.
    return to_torch_module(onnx.load(onnx_path), onnx_path)


def to_torch_module(proto: onnx.ModelProto, source: Path) -> Any:
    """Return a graph as a `torch.fx.GraphModule`; `source` is named in errors, as above."""
    onnx2torch = _import_onnx2torch()
    try:
        module = onnx2torch.convert(_lower(proto))
    except Exception as error:  # NotImplementedError, KeyError, RuntimeError, its own
        raise ModelError(
            f"{source}: onnx2torch cannot convert it ({one_line(error)}); backend=onnx takes it"
        ) from error
    _settle_constants(module)
    _return_tuple(module)
    return module.eval()


def _return_tuple(module: Any) -> None:
    """Return several outputs as a tuple: FX's own list can neither be traced nor be read back."""
    (output,) = module.graph.find_nodes(op="output")
    if isinstance(output.args[0], list):
        output.args = (tuple(output.args[0]),)
        module.recompile()


def _lower(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a graph in the newest opset that onnx2torch knows, where it means the same in that.

    Most operators only take more types since; reductions take their axes as an input.
    """
    lowered = copy.deepcopy(proto)
    version = max(entry.version for entry in lowered.opset_import if not entry.domain)
    if version <= _OPSET:
        return proto
    for entry in lowered.opset_import:
        entry.version = entry.version if entry.domain else _OPSET
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    for node in lowered.graph.node:
        axes = constants.get(node.input[1]) if len(node.input) > 1 else None
        if node.op_type.startswith("Reduce") and node.op_type != "ReduceSum" and axes is not None:
            values = onnx.numpy_helper.to_array(axes).tolist()
            kept = [each for each in node.attribute if each.name == "keepdims"]
            del node.attribute[:], node.input[1:]
            node.attribute.extend([*kept, onnx.helper.make_attribute("axes", values)])
    try:
        onnx.checker.check_model(lowered)
    except onnx.checker.ValidationError:  # uses what the older opset lacks
        return proto
    return lowered


def name_tensors(
    traced: Any, paths: Mapping[str, str], graph: onnx.GraphProto, fused: Collection[str] = ()
) -> dict[str, str]:
    """Return the ONNX name of the tensor that each node of a traced graph makes.

    onnx2torch names a module by its ONNX node; the last node traced in it makes the output. A
    convolution with padding of its own is a module of two, `name.0` and `name.1`; what the padding
    makes goes by the name of what it takes.

    Args:
        traced: a `torch.fx.Graph`.
        paths: the module that each of its nodes comes from, by the node's name.
        graph: the ONNX graph.
        fused: nodes that do the Relu behind them as well.
    """
    outputs = {node.name: node.output[0] for node in graph.node}
    relus = {node.input[0]: node.output[0] for node in graph.node if node.op_type == "Relu"}
    last: dict[str, str] = {}  # tensor -> node
    for node in traced.nodes:
        path = paths.get(node.name, "")
        tensor = outputs.get(path) or outputs.get(path.removesuffix(".1"))
        if node.op == "placeholder":
            tensor = graph.input[0].name
        if tensor is not None:
            last[relus[tensor] if node.name in fused else tensor] = node.name
    names = {name: tensor for tensor, name in last.items()}
    for node in traced.nodes:
        if paths.get(node.name, "").endswith(".0"):
            source = node.args[0]
            while source.name not in names:  # an observer
                source = source.args[0]
            names[node.name] = names[source.name]
    return names


def _settle_constants(module: Any) -> None:
    """Decide for good what onnx2torch's modules decide as they run, where constants tell.

    A Reshape looks at the values of its shape, a Resize and a Slice at theirs, and a Div whether it
    divides floats: neither `torch.export` nor FX can trace that.
    """
    for node in list(module.graph.nodes):
        layer: Any = module.get_submodule(node.target) if node.op == "call_module" else None
        constants = {
            place: attrgetter(given.target)(module)
            for place, given in enumerate(node.args)
            if layer is not None and given.op == "get_attr"
        }
        kind, settled = type(layer).__name__, None
        if kind == "OnnxReshape" and 1 in constants:
            settled = _Reshape([int(size) for size in constants[1]])
        elif kind == "OnnxResize" and len(constants) == len(node.args) - 1:
            settled = _settle_resize(layer, constants)
        elif kind == "OnnxSlice" and len(constants) == len(node.args) - 1:
            settled = _settle_slice(constants)
        if settled is not None:
            module.set_submodule(node.target, settled)
            node.args = node.args[:1]
        elif _is_division(layer) and any(c.is_floating_point() for c in constants.values()):
            layer.math_op_function = torch.div
    module.graph.eliminate_dead_code()
    module.delete_all_unused_submodules()
    module.recompile()


def _is_division(layer: Any) -> bool:
    return getattr(getattr(layer, "math_op_function", None), "__name__", "") == "_onnx_div"


def _settle_resize(layer: Any, constants: Mapping[int, Any]) -> "_Resize | None":
    """Return a Resize by known scales or to known sizes; None where a region is cut out as well."""
    roi, scales, sizes = (constants.get(place, torch.empty(0)).tolist() for place in (1, 2, 3))
    if (roi and not layer.ignore_roi) or bool(scales) == bool(sizes):
        return None
    if scales and scales[:2] != [1, 1]:
        return None
    axes = len(scales or sizes) - 2
    mode = {"linear": ["linear", "bilinear", "trilinear"], "cubic": ["", "bicubic", ""]}
    found = mode.get(layer.onnx_mode, ["nearest"] * 3)[axes - 1]
    return _Resize(scales[2:] or None, sizes[2:] or None, found, layer.align_corners)


def _settle_slice(constants: Mapping[int, Any]) -> "_Slice | None":
    """Return a Slice of known parts; None where it counts axes from both ends, or backwards."""
    parts = [constants[place].tolist() for place in sorted(constants)]
    starts, ends, *more = parts
    axes = more[0] if more else list(range(len(starts)))
    steps = more[1] if len(more) > 1 else [1] * len(starts)
    if min(steps) < 1 or min(axes) < 0 <= max(axes):
        return None
    slices = dict(zip(axes, map(slice, starts, ends, steps), strict=True))
    if min(axes) < 0:
        return _Slice((..., *(slices.get(axis, slice(None)) for axis in range(min(axes), 0))))
    return _Slice(tuple(slices.get(axis, slice(None)) for axis in range(max(axes) + 1)))


class _Resize(torch.nn.Module):  # type: ignore[misc]
    """ONNX's Resize as onnx2torch has it, with known scales or sizes."""

    def __init__(
        self,
        scales: list[float] | None,
        sizes: list[int] | None,
        mode: str,
        align_corners: bool | None,
    ) -> None:
        super().__init__()
        self.scales = scales
        self.sizes = sizes
        self.mode = mode
        self.align_corners = align_corners

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values` [N, C, ...] resized."""
        return torch.nn.functional.interpolate(
            values, self.sizes, self.scales, self.mode, self.align_corners
        )


class _Slice(torch.nn.Module):  # type: ignore[misc]
    """ONNX's Slice of known parts."""

    def __init__(self, parts: tuple[Any, ...]) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the parts of `values`."""
        return values[self.parts]


class _Reshape(torch.nn.Module):  # type: ignore[misc]
    """ONNX's Reshape to a known shape; 0 stands for the input's own size."""

    def __init__(self, shape: list[int]) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values` in that shape."""
        sizes = [size or values.shape[i] for i, size in enumerate(self.shape)]
        return torch.reshape(values, sizes)


# The operators that torchvision gives shapes to without looking whether its compiled ones loaded.
_TORCHVISION_OPERATORS = {
    "torchvision::nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "torchvision::qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


@cache
def import_torchvision() -> None:
    """Import torchvision where it is installed, so that a module of the user's own can.

    Beside a CPU build of torch, the compiled operators of the torchvision that pip installs may not
    load, and its import then fails on two of them. They are declared here, without a kernel: where
    a network calls one, torchvision says what to install.
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
        pass  # a module that needs it says so


@cache
def _import_onnx2torch() -> types.ModuleType:
    """Import onnx2torch without torchvision, unless that is imported already.

    It imports torchvision for two operators of object detectors, RoiAlign and NonMaxSuppression.
    That takes a second, and may fail (see `import_torchvision`). A graph with those operators is
    refused.
    """
    stands_in = {name: types.ModuleType(name) for name in ("torchvision", "torchvision.ops")}
    absent = [name for name in stands_in if name not in sys.modules]
    stands_in["torchvision"].__dict__["ops"] = stands_in["torchvision.ops"]
    for operator in ("roi_align", "nms", "box_convert"):
        stands_in["torchvision.ops"].__dict__[operator] = _refuse
    sys.modules.update({name: stands_in[name] for name in absent})
    try:
        onnx2torch = importlib.import_module("onnx2torch")
        _add_space_to_depth()
        return onnx2torch
    finally:
        for name in absent:
            del sys.modules[name]


class _SpaceToDepth(torch.nn.Module):  # type: ignore[misc]
    """ONNX's SpaceToDepth, which ONNX Runtime makes of slices; onnx2torch lacks it."""

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block = block

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return [N, C, H, W] as [N, block * block * C, H / block, W / block]."""
        count, channels, height, width = values.shape
        height, width = height // self.block, width // self.block
        parts = values.reshape(count, channels, height, self.block, width, self.block)
        return parts.permute(0, 3, 5, 1, 2, 4).reshape(count, -1, height, width)


def _add_space_to_depth() -> None:
    from onnx2torch.node_converters.registry import add_converter
    from onnx2torch.utils.common import OperationConverterResult, onnx_mapping_from_node

    @add_converter(operation_type="SpaceToDepth", version=1)  # type: ignore[untyped-decorator]
    @add_converter(operation_type="SpaceToDepth", version=13)  # type: ignore[untyped-decorator]
    def _(node: Any, graph: Any) -> Any:
        module = _SpaceToDepth(node.attributes["blocksize"])
        return OperationConverterResult(module, onnx_mapping_from_node(node))


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError("RoiAlign and NonMaxSuppression are not supported")
