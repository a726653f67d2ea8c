"""Replaces modules that read constants at run time by modules with fixed parameters."""

from collections.abc import Collection, Mapping
from inspect import signature
from operator import attrgetter
from typing import Any

import torch

from resnet8ptq.graph.embeddings import round_rows
from resnet8ptq.graph.torch_operators import Fixed

_PASSING = (  # operators that only reshape or cast a number
    "OnnxCast",
    "OnnxSqueezeStaticAxes",
    "OnnxSqueezeDynamicAxes",
    "_squeeze",
    "OnnxUnsqueezeStaticAxes",
)
_CONSTANTS = "initializers"  # onnx2torch's module of constants
_TO_THE_END = 2**31 - 1  # the end of a Slice from which on it means the end of the axis


def fix_constants(module: Any, floats: Collection[str]) -> None:
    """Replace modules that read constants at run time by modules with fixed parameters, in place.

    `torch.export` cannot trace onnx2torch's Reshape, Slice and Squeeze, which read their shape,
    bounds and axes at run time. FX cannot trace its Div, which reads the type of the operands.

    Quantized kernels also need other forms. A constant becomes the second operand of an Add or Mul,
    a Clip with two bounds becomes a Hardtanh, and a MatMul by one constant matrix becomes a Linear.
    The bias of a Linear gets one value for each output.

    Args:
        floats: names of the nodes with float outputs.
    """
    for node in list(module.graph.nodes):
        if node.op != "call_module":
            continue
        layer = module.get_submodule(node.target)
        constants = _find_constants(module, layer, node)
        if isinstance(layer, torch.nn.Linear) and layer.bias is not None:
            bias = layer.bias.expand(layer.out_features)  # a Gemm may broadcast a single value
            layer.bias = torch.nn.Parameter(bias.contiguous())

        # Replace the module, or else only its operation
        fixed = _find_fixed(module, layer, node, constants)
        if fixed is not None:
            replacement, source = fixed
            module.set_submodule(node.target, replacement)
            node.args = (source,)
            node.kwargs = {}
        elif node.target in floats or any(map(torch.is_floating_point, constants.values())):
            _fix_arithmetic(layer, node, constants)
    _remove_unused(module)


def _find_fixed(
    module: Any, layer: Any, node: Any, constants: Mapping[int, torch.Tensor]
) -> tuple[torch.nn.Module, Any] | None:
    """Return a module with fixed parameters, and the only tensor that it takes.

    Returns None if there is no such module for `layer`.
    """
    kind = type(layer).__name__
    if kind == "OnnxGather" and 0 in constants and layer._axis == 0:
        return _Lookup(constants[0]), node.args[1]

    # Fix constants that are cut, repeated or counted by the size of another tensor
    measured = None
    if kind == "OnnxRange":
        measured = _find_counted(module, node, constants)
    elif kind == "OnnxSlice":
        measured = _find_cut(module, node, constants)
    elif kind == "OnnxExpand" and set(constants) == {0}:
        measured = _find_repeat(module, node, constants[0])
        measured = measured or _find_like(module, node, constants[0])
    if measured is not None:
        return measured

    others = len(node.args) + len(node.kwargs) - 1
    all_constant = 0 not in constants and len(constants) == others
    first = _fix_first(kind, layer, constants, all_constant)
    return None if first is None else (first, node.args[0])


def _fix_arithmetic(layer: Any, node: Any, constants: Mapping[int, torch.Tensor]) -> None:
    """Make a Div call `torch.div`; swap operands of an Add or Mul if only the first is constant."""
    operation = getattr(layer, "math_op_function", None)
    if getattr(operation, "__name__", "") == "_onnx_div":
        layer.math_op_function = torch.div
    if operation in (torch.add, torch.mul) and set(constants) == {0}:
        node.args = node.args[::-1]  # quantized kernels return the first operand's shape


def _remove_unused(module: Any) -> None:
    """Remove unused nodes, modules and constants, such as weights that a Linear has copied."""
    module.graph.eliminate_dead_code()
    module.delete_all_unused_submodules()
    used = {node.target for node in module.graph.find_nodes(op="get_attr")}
    for name, _ in list(module.named_buffers()):
        if name.startswith(_CONSTANTS) and name not in used:
            delattr(module.get_submodule(_CONSTANTS), name.removeprefix(f"{_CONSTANTS}."))
    module.recompile()


def _find_constants(module: Any, layer: Any, node: Any) -> dict[int, Any]:
    """Return the constant inputs of a node that calls `layer`, by the input's index."""
    inputs = dict(enumerate(node.args))
    if node.kwargs:  # onnx2torch names the inputs that follow an empty one
        names = list(signature(layer.forward).parameters)
        for name, argument in node.kwargs.items():
            inputs[names.index(name)] = argument
    constants = {}
    for index, argument in inputs.items():
        if argument.op == "get_attr":
            constants[index] = attrgetter(argument.target)(module)
    return constants


def _fix_first(
    kind: str, layer: Any, constants: Mapping[int, torch.Tensor], all_constant: bool
) -> "torch.nn.Module | None":
    """Return a module that takes only the first input; None if there is none for `layer`.

    Args:
        kind: the name of onnx2torch's class of `layer`.
        constants: the constant inputs of `layer`, by index.
        all_constant: whether the first input is computed, and all others are constant.
    """
    if kind == "OnnxReshape" and 1 in constants:
        return Fixed(_reshape, shape=constants[1].tolist())
    if kind == "OnnxFlatten" and layer.axis:
        # onnx2torch returns one axis if all are flattened; a new last axis prevents this
        end = layer.axis - 1 if layer.axis > 0 else layer.axis - 2
        return Fixed(lambda v: v.unsqueeze(-1).flatten(end_dim=end).flatten(start_dim=1))
    if kind == "OnnxExpand" and 1 in constants:
        # A size of 1 keeps the input's size in ONNX, a size of -1 in torch
        shape = constants[1].masked_fill(constants[1] == 1, -1).tolist()
        return Fixed(lambda values: values.expand(shape))
    if kind == "OnnxSlice" and all_constant:
        return _fix_slice(constants)
    if kind == "OnnxTile" and all_constant:
        repeats = constants[1].tolist()
        return Fixed(lambda values: values.repeat(repeats))
    if kind == "OnnxSqueezeDynamicAxes" and all_constant:
        axes = tuple(constants[1].tolist()) if 1 in constants else None
        return Fixed(_squeeze, axes=axes)
    if kind in ("OnnxSplit", "OnnxSplit13") and all_constant:
        sizes = constants[1].tolist() if 1 in constants else getattr(layer, "split", None)
        return _fix_split(layer.axis, layer.num_splits, sizes)
    if kind == "OnnxPReLU" and 1 in constants and _is_by_channel(constants[1]):
        return _to_prelu(constants[1])
    if kind == "OnnxClip" and None not in (layer.min_val, layer.max_val):
        # XNNPACK fuses a Hardtanh, but no clamp
        return torch.nn.Hardtanh(layer.min_val, layer.max_val)
    if kind == "OnnxMatMul" and 1 in constants and constants[1].ndim == 2:
        return _to_linear(constants[1])
    if kind == "OnnxGather" and 1 in constants:
        return _fix_gather(layer._axis, constants[1])
    return None


def _to_linear(weights: torch.Tensor) -> torch.nn.Linear:
    """Return a module that multiplies by weights [inputs, outputs]."""
    linear = torch.nn.Linear(*weights.shape, bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weights.T.contiguous())
    return linear


def _is_by_channel(slopes: torch.Tensor) -> bool:
    """Return whether only the first or only the second axis of slopes may be larger than 1."""
    return slopes.numel() in (*slopes.shape[:2], 1)


def _to_prelu(slopes: torch.Tensor) -> torch.nn.PReLU:
    """Return the activation with one slope for each channel, or one for all."""
    prelu = torch.nn.PReLU(slopes.numel())
    prelu.weight = torch.nn.Parameter(slopes.reshape(-1).clone())
    return prelu


def quantize_tables(module: Any, names: Collection[str]) -> None:
    """Store the tables of the Gather nodes `names` in 8 bits, in place; see `graph.embeddings`."""
    for name, layer in list(module.named_modules()):
        if isinstance(layer, _Lookup) and name in names:
            levels, scale = map(torch.from_numpy, round_rows(layer.weights.detach().numpy()))
            module.set_submodule(name, Fixed(_look_up_rows, levels=levels, scale=scale))


def _fix_split(axis: int, count: int, sizes: list[int] | None) -> Fixed:
    """Return a Split into `count` parts of these sizes.

    Without sizes, the parts are equal, or the last one is smaller. ExecuTorch would fix the batch
    size if the module called torch's split.
    """

    def split(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        length = values.shape[axis]
        known = sizes or [-(-length // count)] * (count - 1)
        starts = [sum(known[:number]) for number in range(count)]
        ends = [*starts[1:], length]
        parts = []
        for start, end in zip(starts, ends, strict=True):
            parts.append(values.narrow(axis, start, end - start))
        return tuple(parts)

    return Fixed(split)


def _fix_slice(constants: Mapping[int, Any]) -> Fixed:
    """Return a Slice with fixed bounds, along axes that may count from the start and the end.

    Args:
        constants: starts, ends, axes and steps by input index, from 1; axes and steps may be
            missing.
    """
    parts = {index: constant.tolist() for index, constant in constants.items()}
    starts = parts[1]
    ends = parts[2]
    axes = parts.get(3, list(range(len(starts))))
    steps = parts.get(4, [1] * len(starts))

    # torch has no negative steps, so such an axis is reversed first
    turned = []
    slices = {}
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        slices[axis] = _part(start, end, step)
        if step < 0:
            turned.append(axis)

    # Index the axes that count from the start, then those that count from the end
    whole = slice(None)
    highest = max(*axes, -1)
    lowest = min(*axes, 0)
    first = [slices.get(axis, whole) for axis in range(highest + 1)]
    last = [slices.get(axis, whole) for axis in range(lowest, 0)]
    indices: list[Any] = []
    if first:
        indices.append(tuple(first))
    if last:
        indices.append((..., *last))

    def cut(values: torch.Tensor) -> torch.Tensor:
        if turned:
            values = values.flip(turned)
        for index in indices:
            values = values[index]
        return values

    return Fixed(cut)


def _part(start: int, end: int, step: int) -> slice:
    """Return the slice of an axis; for a negative `step`, that of the reversed axis."""
    if step < 0:
        start = -start - 1
        end = -end - 1
        step = -step
    if end >= _TO_THE_END:  # a number would bound the batch in `torch.export`
        return slice(start, None, step)
    return slice(start, end, step)


def _fix_gather(axis: int, indices: torch.Tensor) -> Fixed | None:
    """Return a Gather of fixed indices.

    Returns None unless `indices` is a scalar, or has one axis and no negative values.
    """
    if indices.ndim == 0:
        return Fixed(_select, axis=axis, index=int(indices))
    if indices.ndim == 1 and (indices >= 0).all():
        return Fixed(_take, axis=axis, indices=indices)
    return None


def _find_counted(
    module: Any, node: Any, constants: Mapping[int, torch.Tensor]
) -> tuple[Fixed, Any] | None:
    """Return a Range of the positions (0, 1, ...) along a tensor's axis, and the tensor.

    Returns None for other Ranges.
    """
    if set(constants) != {0, 2} or (constants[0], constants[2]) != (0, 1):
        return None
    measured = _find_axis(module, node.args[1])
    if measured is None:
        return None
    source, axis = measured
    return Fixed(_positions, axis=axis, dtype=constants[2].dtype), source


def _find_cut(
    module: Any, node: Any, constants: Mapping[int, torch.Tensor]
) -> tuple[Fixed, Any] | None:
    """Return a Slice that cuts constant values to the length of a tensor's axis, and the tensor.

    Returns None for other Slices, and for a Slice without axes.
    """
    if 0 not in constants or 2 in constants or 3 not in constants:
        return None

    # The slice must begin at 0, and keep every value
    unset = torch.ones(1)
    starts = constants.get(1, unset).tolist()
    steps = constants.get(4, unset).tolist()
    if starts != [0] or steps != [1]:
        return None
    measured = _find_axis(module, node.args[2])
    if measured is None:
        return None
    source, counted = measured
    axes = constants[3].tolist()
    return Fixed(_cut, table=constants[0], axis=axes[0], counted=counted), source


def _find_axis(module: Any, size: Any) -> tuple[Any, int] | None:
    """Return the tensor and its axis whose size `size` computes; None for other values.

    Args:
        size: a node of the traced graph.
    """
    axis = 0
    while kind := _kind(module, size):
        layer = module.get_submodule(size.target)
        if kind == "OnnxShape":
            # So far, `axis` counts within the part of the shape that the node returns
            if axis < 0 and layer._end is not None:
                return None
            if axis >= 0:
                axis += layer._start
            return size.args[0], axis
        if kind == "_select":
            axis = layer.index
        elif kind == "_take" and len(layer.indices) == 1:
            axis = int(layer.indices)
        elif kind not in _PASSING:
            return None
        size = size.args[0]
    return None


def _find_repeat(module: Any, expand: Any, values: torch.Tensor) -> tuple[Fixed, Any] | None:
    """Return an Expand of constant values to a batch size, and the tensor of that batch size.

    Returns None unless the shape joins constants and one batch size.
    """
    joined = expand.args[1]
    if _kind(module, joined) == "OnnxWhere":  # exporters replace -1 by 1
        joined = joined.args[2]
    while _kind(module, joined) == "_reshape":
        joined = joined.args[0]
    if _kind(module, joined) != "OnnxConcat":
        return None

    # Collect the constant sizes, with a 1 in place of the batch size
    sizes: list[int] = []
    batches = []
    for part in joined.args:
        if part.op == "get_attr":
            sizes += attrgetter(part.target)(module).clamp(min=1).tolist()
        else:
            batches.append(_find_batch(module, part))
            batch_axis = len(sizes)
            sizes.append(1)
    if len(batches) != 1 or batches[0] is None:
        return None
    shape = torch.broadcast_shapes(values.shape, sizes)
    row = values.expand(shape).contiguous()
    return Fixed(_repeat, row=row, axis=len(shape) - len(sizes) + batch_axis), batches[0]


def _find_batch(module: Any, size: Any) -> Any:
    """Return the tensor whose batch size `size` computes; None for other values.

    Args:
        size: a node of the traced graph.
    """
    is_alone = False  # whether a node picks one size of the shape
    while (kind := _kind(module, size)) in ("_take", "_select", "OnnxUnsqueezeStaticAxes"):
        layer = module.get_submodule(size.target)
        is_alone = is_alone or kind != "OnnxUnsqueezeStaticAxes"
        index = layer.indices.tolist() if kind == "_take" else getattr(layer, "index", 0)
        if index not in (0, [0]):
            return None
        size = size.args[0]
    if kind != "OnnxShape":
        return None
    layer = module.get_submodule(size.target)
    if layer._start or not (is_alone or layer._end == 1):
        return None
    return size.args[0]


def _kind(module: Any, node: Any) -> str:
    """Return the name of a called module's class, or of its function if it is a `Fixed`.

    The name is empty if `node` calls no module, and `?` if the function has no name.
    """
    if node.op != "call_module":
        return ""
    layer = module.get_submodule(node.target)
    named = layer.function if isinstance(layer, Fixed) else type(layer)
    return getattr(named, "__name__", "?")


def _find_like(module: Any, expand: Any, values: torch.Tensor) -> tuple[Fixed, Any] | None:
    """Return an Expand of constant values to the whole shape of a tensor, and the tensor.

    Returns None for other Expands.
    """
    shape = expand.args[1]
    if _kind(module, shape) != "OnnxShape":
        return None
    layer = module.get_submodule(shape.target)
    if layer._start or layer._end:
        return None
    return Fixed(lambda like, values: values.expand_as(like), values=values), shape.args[0]


class _Lookup(torch.nn.Module):  # type: ignore[misc]
    """Looks up rows of fixed `weights`, such as an embedding table."""

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(weights, requires_grad=False)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.weights[indices]


# Functions for `Fixed`.


def _look_up_rows(indices: torch.Tensor, levels: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return rows of an 8-bit table as floats; each row has a scale, see `graph.embeddings`."""
    return levels[indices].to(torch.float32) * scale[indices]


def _select(values: torch.Tensor, axis: int, index: int) -> torch.Tensor:
    return values.select(axis, index)


def _take(values: torch.Tensor, axis: int, indices: torch.Tensor) -> torch.Tensor:
    return values.index_select(axis, indices)


def _squeeze(values: torch.Tensor, axes: tuple[int, ...] | None) -> torch.Tensor:
    return values.squeeze() if axes is None else values.squeeze(axes)


def _positions(values: torch.Tensor, axis: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return the positions 0, 1, ... along an axis, [size].

    The size stays dynamic in FX, export and tracing.
    """
    return torch.cumsum(torch.ones_like(_line(values, axis), dtype=dtype), 0, dtype=dtype) - 1


def _cut(values: torch.Tensor, table: torch.Tensor, axis: int, counted: int) -> torch.Tensor:
    """Return a table, such as embeddings of positions, cut to the size of an axis of `values`.

    Args:
        axis: the axis of `table` to cut.
        counted: the axis of `values`.
    """
    return table.index_select(axis, _positions(values, counted))


def _line(values: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the values along an axis, at index 0 of all other axes: [size]."""
    rows = values.transpose(0, axis)
    return rows.reshape(rows.shape[0], -1).select(1, 0)


def _repeat(values: torch.Tensor, row: torch.Tensor, axis: int) -> torch.Tensor:
    """Return a row, such as a class token, repeated along `axis` for each sample of `values`.

    Args:
        row: a tensor of size 1 along `axis`.
    """
    return row.index_select(axis, torch.zeros_like(_line(values, 0), dtype=torch.int64))


def _reshape(values: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Reshape values; a size of 0 copies the input's size on that axis."""
    sizes = []
    for axis, size in enumerate(shape):
        sizes.append(size or values.shape[axis])
    return torch.reshape(values, sizes)
