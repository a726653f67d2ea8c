"""Torch modules for ONNX operators that onnx2torch lacks or converts wrongly.

Each takes the node's first input, and its other inputs must be constants; a `Joint` takes several.
"""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch.nn import functional

from resnet8ptq.graph import torch_recurrent
from resnet8ptq.graph.layers import attribute
from resnet8ptq.graph.session import open_runner
from resnet8ptq.graph.shapes import find_sizes

_POOLS = {1: functional.avg_pool1d, 2: functional.avg_pool2d, 3: functional.avg_pool3d}
_TRANSPOSED = dict(
    enumerate((torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d), 1)
)
_FUNCTIONS = {
    **{"Acosh": torch.acosh, "Asinh": torch.asinh, "Atanh": torch.atanh},
    **{"Cosh": torch.cosh, "Sinh": torch.sinh},
}


class Fixed(torch.nn.Module):  # type: ignore[misc]
    """A function of tensors with fixed settings; tensors among them are buffers.

    Attributes:
        takes: the inputs of its node that it takes.
    """

    takes: ClassVar[Collection[int]] = (0,)

    def __init__(self, function: Callable[..., Any], **settings: Any) -> None:
        super().__init__()
        self.function, self.names = function, tuple(settings)
        for name, value in settings.items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *values: torch.Tensor) -> Any:
        """Return the function's result."""
        return self.function(*values, **{name: getattr(self, name) for name in self.names})


class InFloat(Fixed):
    """A module of several operators, none of which may be rounded by itself."""


class Joint(InFloat):
    """A module that takes all inputs of its node."""

    takes: ClassVar[Collection[int]] = range(sys.maxsize)


class _Recurrent(InFloat):
    takes: ClassVar[Collection[int]] = (0, 5, 6)


@dataclass(frozen=True)
class Node:
    """An ONNX node with what its graph says about its inputs.

    Attributes:
        sizes: of the first input; empty: unknown; 0: a free size.
        depth: the last size of the second input; None: unknown or free.
        constants: the constant inputs, by index.
        opset: the opset of the graph.
    """

    proto: onnx.NodeProto
    sizes: list[int]
    depth: int | None
    constants: Mapping[int, NDArray[Any]]
    opset: onnx.OperatorSetIdProto

    def __call__(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or `default`."""
        return attribute(self.proto, name, default)


def find_modules(proto: onnx.ModelProto) -> dict[str, torch.nn.Module]:
    """Return the modules of the nodes that onnx2torch does not convert, by the nodes' names."""
    nodes = [node for node in proto.graph.node if not node.domain and node.op_type in _CONVERTERS]
    if not nodes:
        return {}
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    sizes, opset = find_sizes(proto), next(o for o in proto.opset_import if not o.domain)
    modules = {}
    for node in nodes:
        values = {
            index: onnx.numpy_helper.to_array(constants[name])
            for index, name in enumerate(node.input)
            if name in constants
        }
        given = [index for index, name in enumerate(node.input) if name][1:]
        if values.keys() == {*given} or node.op_type in _OF_SEVERAL:
            second = sizes.get([*node.input, "", ""][1], [])
            depth = (second and second[-1]) or None
            known = Node(node, sizes.get(node.input[0], []), depth, values, opset)
            modules[node.name] = _CONVERTERS[node.op_type](known)
    return {name: module for name, module in modules.items() if module is not None}


# The functions of the modules, by their operators in ONNX.


def _gather_along(values: torch.Tensor, indices: torch.Tensor, axis: int) -> torch.Tensor:
    return values[(*[slice(None)] * axis, indices.long())]


def _gather_elements(values: torch.Tensor, indices: torch.Tensor, axis: int) -> torch.Tensor:
    return torch.gather(values, axis, indices.long() % values.shape[axis])


def _gather_nd(values: torch.Tensor, indices: torch.Tensor, depth: int) -> torch.Tensor:
    return values[tuple(indices.select(-1, axis) for axis in range(depth))]


def _scatter_elements(
    values: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor, axis: int, adds: bool
) -> torch.Tensor:
    scatter = torch.scatter_add if adds else torch.scatter
    return scatter(values, axis, indices.long() % values.shape[axis], updates)


def _scatter_nd(
    values: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor, depth: int, adds: bool
) -> torch.Tensor:
    places = tuple(indices.select(-1, axis) for axis in range(depth))
    return torch.index_put(values, places, updates, adds)


def _one_hot_along(
    indices: torch.Tensor, classes: torch.Tensor, off: torch.Tensor, on: torch.Tensor, axis: int
) -> torch.Tensor:
    hot = indices.long().unsqueeze(-1) % len(classes) == classes  # below 0: from the end
    inside = ((indices >= -len(classes)) & (indices < len(classes))).unsqueeze(-1)
    return torch.where(hot & inside, on, off).movedim(-1, axis)


def _cumulate(values: torch.Tensor, axis: int, exclusive: bool, reverse: bool) -> torch.Tensor:
    turned = values.flip(axis) if reverse else values
    sums = torch.cumsum(turned, axis, dtype=values.dtype)
    sums = sums - turned if exclusive else sums
    return sums.flip(axis) if reverse else sums


def _space_to_depth(values: torch.Tensor, block: int) -> torch.Tensor:
    """Return [N, C, H, W] as [N, block * block * C, H / block, W / block].

    ONNX Runtime fuses slices into it. FX would leave a convolution behind the methods of a tensor
    in float, but not behind functions.
    """
    count, channels, height, width = values.shape
    height, width = height // block, width // block
    shape = [count, channels, height, block, width, block]
    parts = torch.permute(torch.reshape(values, shape), [0, 3, 5, 1, 2, 4])
    return torch.reshape(parts, [count, -1, height, width])


def _blocks_first(values: torch.Tensor, block: int) -> torch.Tensor:
    """Return [N, C, H, W] as [N, C / block / block, H * block, W * block], in DCR order."""
    count, channels, height, width = values.shape
    channels = channels // block**2
    parts = values.reshape(count, block, block, channels, height, width)
    turned = parts.permute(0, 3, 4, 1, 5, 2)
    return turned.reshape(count, channels, height * block, width * block)


def _extremes(
    values: torch.Tensor, find: Callable[..., torch.Tensor], axes: Sequence[int], keeps: bool
) -> torch.Tensor:
    extremes = find(values, axes, keepdim=True)  # XNNPACK only knows axes that stay
    return extremes if keeps else extremes.squeeze(axes)


def _crop_and_pad(
    values: torch.Tensor, kept: tuple[slice, ...], widths: list[int], mode: str, value: float | None
) -> torch.Tensor:
    """Pad by `widths`: before and after each axis, the last axis first; `kept` is empty for all."""
    values = values[kept] if kept else values
    return functional.pad(values, widths, mode, value)


def _wrap(values: torch.Tensor, widths: Mapping[int, tuple[int, int]]) -> torch.Tensor:
    """Pad with values of the other end, by the widths (before, after) of each axis."""
    for axis, (before, after) in widths.items():
        size = values.shape[axis]
        first = values.narrow(axis, size - before, before)
        values = torch.cat([first, values, values.narrow(axis, 0, after)], axis)
    return values


def _convolve_and_crop(values: torch.Tensor, layer: Any, kept: tuple[Any, ...]) -> torch.Tensor:
    return layer(values)[kept]


def _pad_and_average(
    values: torch.Tensor, pool: Callable[..., torch.Tensor], widths: list[int], share: torch.Tensor
) -> torch.Tensor:
    """Return the means of windows, of which a share [1, 1, ...] counts."""
    return pool(functional.pad(values, widths)) / share


def _pool_norms(
    values: torch.Tensor,
    pool: Callable[..., torch.Tensor],
    widths: list[int],
    power: int,
    count: int,
) -> torch.Tensor:
    """Return the norms of windows of `count` values; torch's LpPool takes no padding."""
    powers = functional.pad(values.abs().pow(power), widths)
    return (pool(powers) * count).pow(1 / power)


def _standardize(values: torch.Tensor, axes: list[int]) -> torch.Tensor:
    deviation = values.std(axes, correction=0, keepdim=True)
    return (values - values.mean(axes, keepdim=True)) / (deviation + 1e-9)


def _slope(values: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    return torch.where(values < 0, values * slopes, values)


def _topk(values: torch.Tensor, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = torch.topk(values, **settings)
    return chosen[0], chosen[1]


def _recur(
    values: torch.Tensor,
    *states: torch.Tensor,
    weights: Any,
    network: Callable[..., Any],
    is_reverse: bool,
    count: int,
) -> Any:
    """Return [steps, directions, N, width] and the last states [directions, N, width].

    Args:
        states: 0 by default.
        network: torch's function.
        is_reverse: whether it starts at the last step.
        count: number of outputs.
    """
    weights = [*weights]
    ways, width = len(weights) // 4, weights[1].shape[1]
    if not states:
        zeros = values.new_zeros(ways, values.shape[1], width)
        states = (zeros,) * (2 if network is torch.lstm else 1)
    given = values.flip(0) if is_reverse else values
    options = True, 1, 0.0, False, ways == 2, False  # biases, layers, dropout, training, ...
    first = states if network is torch.lstm else states[0]
    outputs = network(given, first, weights, *options)
    steps, last = outputs[0], [outputs[i] for i in range(1, count)]
    steps = steps.flip(0) if is_reverse else steps
    steps = steps.unflatten(-1, (ways, width)).transpose(1, 2)
    return (steps, *last) if last else steps


def _resample(values: torch.Tensor, axes: list[int], **matrices: torch.Tensor) -> torch.Tensor:
    """Resize by a product with a matrix [size, new size] along each axis."""
    for axis, matrix in zip(axes, matrices.values(), strict=True):
        values = torch.matmul(values.transpose(axis, -1), matrix).transpose(axis, -1)
    return values


# The converters: the module of a node, or None for onnx2torch's.


def _always(kind: type[Fixed], function: Callable[..., Any]) -> "_Converter":
    return lambda node: kind(function)


def _make_pool(node: Node) -> tuple[Any, list[int]] | None:
    """Return a mean without padding, and the padding; None for other windows."""
    kernel, rank = node("kernel_shape"), len(node("kernel_shape"))
    ones, pads = [1] * rank, node("pads", [0] * 2 * rank)
    plain = node("dilations", ones) == ones and b"SAME" not in node("auto_pad", b"")
    if not plain or rank not in _POOLS:
        return None
    settings = {"stride": node("strides", ones), "ceil_mode": bool(node("ceil_mode", 0))}
    widths = np.reshape(pads, (2, rank)).T[::-1].flatten().tolist()
    return partial(_POOLS[rank], kernel_size=kernel, **settings), widths


def _average_pool(node: Node) -> torch.nn.Module | None:
    made, spatial = _make_pool(node), node.sizes[2:]
    if made is None or made[1][::2] == made[1][1::2] or 0 in spatial:
        return None
    pool, widths = made
    inside = 1.0 if node("count_include_pad", 0) else 0.0
    counted = functional.pad(torch.ones(1, 1, *spatial), widths, value=inside)
    return InFloat(_pad_and_average, pool=pool, widths=widths, share=pool(counted))


def _lp_pool(node: Node) -> torch.nn.Module | None:
    made = _make_pool(node)
    if made is None or node("ceil_mode", 0):
        return None
    count = int(np.prod(node("kernel_shape")))
    settings = {"pool": made[0], "widths": made[1], "power": node("p", 2), "count": count}
    return InFloat(_pool_norms, **settings)


def _spatial(node: Node) -> tuple[int, ...]:
    return tuple(range(2, len(node.sizes)))


def _extreme(find: Callable[..., Any], node: Node) -> torch.nn.Module | None:
    axes = node.constants.get(1, np.array(node("axes", []))).tolist()
    axes = axes or [*range(len(node.sizes))]
    known = axes and not node("noop_with_empty_axes", 0)
    keeps = bool(node("keepdims", 1))
    return Fixed(_extremes, find=find, axes=axes, keeps=keeps) if known else None


def _pad(node: Node) -> torch.nn.Module | None:
    """Return a Pad with fixed widths; torch reflects and repeats only axes after the first."""
    mode, given = node("mode", b"constant").decode(), node.constants[1].reshape(2, -1).T
    if 3 in node.constants and not node.sizes:
        return None
    pairs = np.zeros((len(node.sizes) or len(given), 2), np.int64)
    pairs[node.constants.get(3, slice(None))] = given
    if mode == "wrap":
        ends = {axis: pair.tolist() for axis, pair in enumerate(pairs) if pair.any()}
        return InFloat(_wrap, widths=ends)
    cropped = np.maximum(-pairs, 0).tolist()
    kept = tuple(slice(before, -after or None) for before, after in cropped)
    pairs, constant = np.maximum(pairs, 0), mode == "constant"
    if not constant:
        pairs = pairs[2:] if len(pairs) > 2 and not pairs[1].any() else pairs[1:]
    return Fixed(
        _crop_and_pad,
        kept=kept if np.any(cropped) else (),
        widths=pairs[::-1].flatten().tolist(),
        mode={"edge": "replicate"}.get(mode, mode),
        value=float(node.constants[2]) if constant and 2 in node.constants else None,
    )


def _find_pads(node: Node, kernel: Sequence[int]) -> NDArray[np.int64] | None:
    """Return the paddings [2, axes] of a ConvTranspose; None if they are unknown."""
    rank, sizes, target = len(kernel), node.sizes[2:], node("output_shape", [])
    if node("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        return None
    if not target:
        return np.reshape(node("pads", [0] * 2 * rank), (2, rank))
    ones, extra = [1] * rank, np.array(node("output_padding", [0] * rank))
    whole = (np.array(sizes) - 1) * node("strides", ones) + extra
    total = whole + (np.array(kernel) - 1) * node("dilations", ones) + 1 - target[-rank:]
    known = sizes and 0 not in sizes and total.min() >= 0
    return np.stack([total - total // 2, total // 2]) if known else None


def _conv_transpose(node: Node) -> torch.nn.Module | None:
    weights, bias = torch.tensor(node.constants[1]), node.constants.get(2)
    rank, pads = weights.ndim - 2, _find_pads(node, weights.shape[2:])
    if pads is None or (pads[0] == pads[1]).all() or rank not in _TRANSPOSED:
        return None
    ones = [1] * rank
    smaller, groups = pads.min(0), node("group", 1)
    layer = _TRANSPOSED[rank](
        *(len(weights), weights.shape[1] * groups, weights.shape[2:]),
        *(node("strides", ones), smaller.tolist(), node("output_padding", [0] * rank)),
        *(groups, bias is not None, node("dilations", ones)),
    )
    layer.weight = torch.nn.Parameter(weights)
    layer.bias = None if bias is None else torch.nn.Parameter(torch.tensor(bias))
    parts = [slice(first, -last or None) for first, last in (pads - smaller).T.tolist()]
    return InFloat(_convolve_and_crop, layer=layer, kept=(..., *parts))


def _depth_to_space(node: Node) -> torch.nn.Module | None:
    in_torchs_order = node("mode", b"DCR") == b"CRD"
    return None if in_torchs_order else Fixed(_blocks_first, block=node("blocksize"))


def _shrink(node: Node) -> torch.nn.Module | None:
    bias, bound = node("bias", 0.0), node("lambd", 0.5)
    kinds = {0.0: torch.nn.Hardshrink, bound: torch.nn.Softshrink}
    return kinds[bias](bound) if bias in kinds else None


def _gelu(node: Node) -> torch.nn.Module | None:
    return torch.nn.GELU("tanh") if node("approximate", b"none") == b"tanh" else None


def _swish(node: Node) -> torch.nn.Module | None:
    return torch.nn.SiLU() if node("alpha", 1.0) == 1 else None


def _rms_norm(node: Node) -> torch.nn.Module:
    weights = torch.tensor(node.constants[1])
    norm = torch.nn.RMSNorm(weights.shape, node("epsilon", 1e-5))
    norm.weight = torch.nn.Parameter(weights)
    return norm


def _prelu(node: Node) -> torch.nn.Module | None:
    slopes, rank = torch.tensor(node.constants[1]), len(node.sizes)
    by_channel = [*node.sizes[1:2], *[1] * (rank - 2)]
    known = slopes.numel() == 1 or [*slopes.shape][1 - rank :] == by_channel
    return None if known or not rank else InFloat(_slope, slopes=slopes)


def _triangle(node: Node) -> torch.nn.Module:
    function = torch.triu if node("upper", 1) else torch.tril
    diagonal = int(node.constants.get(1, np.array(0)))
    return Fixed(function, diagonal=diagonal)


def _cum_sum(node: Node) -> torch.nn.Module:
    ways = {name: bool(node(name, 0)) for name in ("exclusive", "reverse")}
    return InFloat(_cumulate, axis=int(node.constants[1].item()), **ways)


def _top_k(node: Node) -> torch.nn.Module:
    order = {"largest": bool(node("largest", 1)), "sorted": bool(node("sorted", 1))}
    return InFloat(_topk, k=int(node.constants[1].item()), dim=node("axis", -1), **order)


def _gather(node: Node) -> torch.nn.Module | None:
    axis = node("axis", 0)
    axis += len(node.sizes) if axis < 0 else 0
    return None if node.constants or axis < 0 else Joint(_gather_along, axis=axis)


def _scatter(function: Callable[..., Any], node: Node, **settings: Any) -> torch.nn.Module | None:
    reduction = node("reduction", b"none")
    known = reduction in (b"none", b"add") and None not in settings.values()
    return Joint(function, adds=reduction == b"add", **settings) if known else None


def _grid_sample(node: Node) -> torch.nn.Module | None:
    mode = node("mode", b"linear").decode()
    settings = {
        "mode": {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode),
        "padding_mode": node("padding_mode", b"zeros").decode(),
        "align_corners": bool(node("align_corners", 0)),
    }
    return Joint(functional.grid_sample, **settings) if len(node.sizes) == 4 else None


def _one_hot(node: Node) -> torch.nn.Module:
    off, on = map(torch.tensor, node.constants[2])
    classes = torch.arange(int(node.constants[1].item()))
    return InFloat(_one_hot_along, classes=classes, off=off, on=on, axis=node("axis", -1))


def _recurrent(node: Node) -> torch.nn.Module | None:
    steps = [*node.sizes, 0][0]
    network = torch_recurrent.find_function(node.proto, node.constants, steps)
    if network is None:
        return None
    return _Recurrent(
        _recur,
        weights=torch.nn.ParameterList(torch_recurrent.find_weights(node.proto, node.constants)),
        network=network,
        is_reverse=node("direction", b"") == b"reverse",
        count=len(node.proto.output),
    )


def _resize(node: Node) -> torch.nn.Module | None:
    """Return torch's interpolation if it computes the same, or else the product.

    Both are compared on the unit matrix, for each axis, since a Resize is linear in each.
    """
    rank, cropped = len(node.sizes), b"tf_crop" in node("coordinate_transformation_mode", b"")
    key = 3 if 3 in node.constants else 2
    targets = node.constants.get(key, np.empty(0)).tolist()
    if not rank or cropped or len(targets) != rank or node(*_POLICY) != b"stretch":
        return None
    kept = node.sizes if key == 3 else [1] * rank
    if kept[0] and targets[0] != kept[0]:
        return None
    axes = [i for i in range(1, rank) if targets[i] != kept[i]]
    matrices = {i: _find_matrix(node, key, node.sizes[i] or _ANY, targets[i]) for i in axes}
    for module in _interpolations(node, key, targets[2:]) if 1 not in axes else ():
        if all(_is_same(module, i, matrix) for i, matrix in matrices.items()):
            return module
    buffers = {f"matrix_{axis}": torch.from_numpy(m) for axis, m in matrices.items()}
    return InFloat(_resample, axes=axes, **buffers) if all(node.sizes[i] for i in axes) else None


_POLICY = ("keep_aspect_ratio_policy", b"stretch")
_ANY = 7  # of a free size, to compare two ways to resize it
_MODES = {
    b"nearest": {rank: ["nearest", "nearest-exact"] for rank in (3, 4, 5)},
    b"linear": {3: ["linear"], 4: ["bilinear"], 5: ["trilinear"]},
    b"cubic": {4: ["bicubic"]},
}


def _interpolations(node: Node, key: int, targets: list[Any]) -> list[Fixed]:
    """Return the ways in which torch resizes to these scales, or sizes if `key` is 3."""
    mode, rank = node("mode", b"nearest"), len(node.sizes)
    scales, sizes = (None, targets) if key == 3 else (targets, None)
    return [
        Fixed(
            functional.interpolate,
            **{"size": sizes, "scale_factor": scales, "mode": name, "align_corners": corners},
        )
        for name in _MODES[mode].get(rank, ())
        for corners in ([None] if mode == b"nearest" else [False, True])
    ]


def _find_matrix(node: Node, key: int, size: int, target: float) -> NDArray[np.float32]:
    """Return the matrix [size, new size] by which ONNX Runtime resizes an axis."""
    targets = np.array([size, 1, target, 1] if key == 3 else [1, 1, target, 1])
    inputs = ["x", "", "", "target"] if key == 3 else ["x", "", "target"]
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        axis (float[a, 1, b, 1] x) => (float[a, 1, c, 1] y) { y = Resize(x) }"""
    )
    (resize,) = proto.graph.node
    resize.input[:] = inputs
    resize.attribute.extend(item for item in node.proto.attribute if item.name != _POLICY[0])
    proto.opset_import[0].CopyFrom(node.opset)
    kind = np.int64 if key == 3 else np.float32
    proto.graph.initializer.append(onnx.numpy_helper.from_array(targets.astype(kind), "target"))
    unit = np.eye(size, dtype=np.float32)[:, np.newaxis, :, np.newaxis]
    [rows] = open_runner(proto, threads=1)(unit)
    return np.ascontiguousarray(rows[:, 0, :, 0])


def _is_same(module: Fixed, axis: int, matrix: NDArray[np.float32]) -> bool:
    """Return whether torch resizes an axis by this matrix."""
    size, mode = len(matrix), "bilinear" if "linear" in module.mode else module.mode
    sizes = None if module.size is None else [module.size[axis - 2], 1]
    scales = None if module.scale_factor is None else [module.scale_factor[axis - 2], 1]
    unit = torch.eye(size)[:, None, :, None]
    rows = functional.interpolate(unit, sizes, scales, mode, module.align_corners)[:, 0, :, 0]
    return rows.shape == matrix.shape and bool(np.abs(rows.numpy() - matrix).max() < 1e-5)


_Converter = Callable[[Node], torch.nn.Module | None]
_OF_SEVERAL: dict[str, _Converter] = {
    "BitwiseAnd": _always(Joint, torch.bitwise_and),
    "BitwiseOr": _always(Joint, torch.bitwise_or),
    "BitwiseXor": _always(Joint, torch.bitwise_xor),
    "CastLike": _always(Joint, lambda values, like: values.type_as(like)),
    "Gather": _gather,
    "GatherElements": lambda node: Joint(_gather_elements, axis=node("axis", 0)),
    "GatherND": lambda node: (
        Joint(_gather_nd, depth=node.depth) if node.depth and not node("batch_dims", 0) else None
    ),
    "GridSample": _grid_sample,
    "ScatterElements": lambda node: _scatter(_scatter_elements, node, axis=node("axis", 0)),
    "ScatterND": lambda node: _scatter(_scatter_nd, node, depth=node.depth),
    **dict.fromkeys(torch_recurrent.KINDS, _recurrent),
}
_CONVERTERS: dict[str, _Converter] = {
    **_OF_SEVERAL,
    "AveragePool": _average_pool,
    "BitwiseNot": _always(Fixed, torch.bitwise_not),
    "ConvTranspose": _conv_transpose,
    "CumSum": _cum_sum,
    "DepthToSpace": _depth_to_space,
    "Gelu": _gelu,
    "GlobalLpPool": lambda node: InFloat(
        torch.linalg.vector_norm, ord=node("p", 2), dim=_spatial(node), keepdim=True
    ),
    "GlobalMaxPool": lambda node: Fixed(
        _extremes, find=torch.amax, axes=_spatial(node), keeps=True
    ),
    "LpNormalization": lambda node: InFloat(
        functional.normalize, p=node("p", 2), dim=node("axis", -1)
    ),
    "LpPool": _lp_pool,
    "MeanVarianceNormalization": lambda node: InFloat(_standardize, axes=node("axes", [0, 2, 3])),
    "Mish": lambda node: torch.nn.Mish(),
    "OneHot": _one_hot,
    "PRelu": _prelu,
    "Pad": _pad,
    "RMSNormalization": _rms_norm,
    "ReduceMax": partial(_extreme, torch.amax),
    "ReduceMin": partial(_extreme, torch.amin),
    "Resize": _resize,
    "Shrink": _shrink,
    "SpaceToDepth": lambda node: Fixed(_space_to_depth, block=node("blocksize")),
    "Swish": _swish,
    "ThresholdedRelu": lambda node: torch.nn.Threshold(node("alpha", 1.0), 0.0),
    "TopK": _top_k,
    "Trilu": _triangle,
    **{kind: _always(Fixed, function) for kind, function in _FUNCTIONS.items()},
}
