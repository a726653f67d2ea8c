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
    """A module with fixed attributes; tensors among them are buffers.

    Attributes:
        takes: the inputs of its node that it takes.
    """

    takes: ClassVar[Collection[int]] = (0,)

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)


class InFloat(Fixed):
    """A module of several operators, none of which may be rounded by itself."""


class Joint(InFloat):
    """A module that takes all inputs of its node."""

    takes: ClassVar[Collection[int]] = range(sys.maxsize)


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


class _Function(Fixed):
    """A `function` of each value."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the function's values."""
        return self.function(values)


class _Joined(Joint):
    """A `function` of all inputs."""

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        """Return the function's values."""
        return self.function(*values)


class _Gather(Joint):
    """ONNX's Gather of computed indices along `axis`."""

    def forward(self, values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Return [axes before `axis`, *indices, axes after it]."""
        return values[(*[slice(None)] * self.axis, indices.long())]


class _GatherElements(Joint):
    """ONNX's GatherElements along `axis`."""

    def forward(self, values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Return a value for each index; those below 0 count from the end."""
        return torch.gather(values, self.axis, indices.long() % values.shape[self.axis])


class _ScatterElements(Joint):
    """ONNX's ScatterElements along `axis`; `adds`: to the values, in place of writing."""

    def forward(
        self, values: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor
    ) -> torch.Tensor:
        """Return `values` with the updates."""
        scatter = torch.scatter_add if self.adds else torch.scatter
        return scatter(values, self.axis, indices.long() % values.shape[self.axis], updates)


class _ScatterND(Joint):
    """ONNX's ScatterND with indices of `depth` axes; `adds`: to the values."""

    def forward(
        self, values: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor
    ) -> torch.Tensor:
        """Return `values` with the updates."""
        places = tuple(indices.select(-1, axis) for axis in range(self.depth))
        return torch.index_put(values, places, updates, self.adds)


class _OneHot(InFloat):
    """ONNX's OneHot of `classes` with the values `off` and `on`, along `axis`."""

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """Return one axis more than `indices` has; those below 0 count from the end."""
        hot = indices.long().unsqueeze(-1) % len(self.classes) == self.classes
        inside = ((indices >= -len(self.classes)) & (indices < len(self.classes))).unsqueeze(-1)
        return torch.where(hot & inside, self.on, self.off).movedim(-1, self.axis)


class _CumSum(InFloat):
    """ONNX's CumSum along a fixed `axis`."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the cumulative sums of the values."""
        turned = values.flip(self.axis) if self.reverse else values
        sums = torch.cumsum(turned, self.axis, dtype=values.dtype)
        sums = sums - turned if self.exclusive else sums
        return sums.flip(self.axis) if self.reverse else sums


class _SpaceToDepth(Fixed):
    """ONNX's SpaceToDepth, into which ONNX Runtime fuses slices.

    FX would leave a convolution behind the methods of a tensor in float, but not behind functions.
    """

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return [N, C, H, W] as [N, block * block * C, H / block, W / block]."""
        count, channels, height, width = values.shape
        height, width = height // self.block, width // self.block
        shape = [count, channels, height, self.block, width, self.block]
        parts = torch.permute(torch.reshape(values, shape), [0, 3, 5, 1, 2, 4])
        return torch.reshape(parts, [count, -1, height, width])


class _DepthToSpace(Fixed):
    """ONNX's DepthToSpace whose channels are ordered by block first (DCR)."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return [N, C, H, W] as [N, C / block / block, H * block, W * block]."""
        count, channels, height, width = values.shape
        channels = channels // self.block**2
        parts = values.reshape(count, self.block, self.block, channels, height, width)
        turned = parts.permute(0, 3, 4, 1, 5, 2)
        return turned.reshape(count, channels, height * self.block, width * self.block)


class _Extreme(Fixed):
    """ONNX's ReduceMax, ReduceMin and GlobalMaxPool over `axes`, by `function`.

    Attributes:
        keeps: whether the axes stay, with size 1. XNNPACK only knows those that stay.
    """

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the largest or smallest values."""
        extremes = self.function(values, self.axes, keepdim=True)
        return extremes if self.keeps else extremes.squeeze(self.axes)


class _Pad(Fixed):
    """ONNX's Pad with fixed `widths`: before and after each axis, the last axis first.

    Attributes:
        kept: the parts of the axes that negative widths leave; empty: all.
    """

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values`, cropped and padded."""
        values = values[self.kept] if self.kept else values
        return functional.pad(values, self.widths, self.mode, self.value)


class _Wrap(InFloat):
    """ONNX's Pad with values of the other end, by the `widths` (before, after) of each axis."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values`, padded."""
        for axis, (before, after) in self.widths.items():
            size = values.shape[axis]
            first = values.narrow(axis, size - before, before)
            values = torch.cat([first, values, values.narrow(axis, 0, after)], axis)
        return values


class _ConvTranspose(InFloat):
    """ONNX's ConvTranspose with other paddings before an axis than after it.

    Attributes:
        kept: the parts of the output of `layer`, whose paddings are the smaller ones.
    """

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the transposed convolution."""
        return self.layer(values)[self.kept]


class _Pick(Joint):
    """ONNX's GatherND whose indices name `depth` axes."""

    def forward(self, values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Return [*indices without the last axis, *the other axes of values]."""
        return values[tuple(indices.select(-1, axis) for axis in range(self.depth))]


class _AveragePool(InFloat):
    """ONNX's AveragePool with other `widths` of padding before an axis than after it.

    Attributes:
        share: the share of a window that counts, [1, 1, ...].
    """

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the means."""
        return self.pool(functional.pad(values, self.widths)) / self.share


class _LpPool(InFloat):
    """ONNX's LpPool; torch's takes no padding, and no absolute values for odd powers."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the norms."""
        powers = functional.pad(values.abs().pow(self.power), self.widths)
        return (self.pool(powers) * self.count).pow(1 / self.power)


class _Norm(InFloat):
    """ONNX's GlobalLpPool over `axes`."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the norms, of size 1 along the axes."""
        return torch.linalg.vector_norm(values, self.power, self.axes, keepdim=True)


class _Normalize(InFloat):
    """ONNX's LpNormalization."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values divided by their norms."""
        return functional.normalize(values, self.power, self.axis)


class _Standardize(InFloat):
    """ONNX's MeanVarianceNormalization over `axes`."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of mean 0 and variance 1."""
        deviation = values.std(self.axes, correction=0, keepdim=True)
        return (values - values.mean(self.axes, keepdim=True)) / (deviation + 1e-9)


class _PRelu(InFloat):
    """ONNX's PRelu with `slopes` that torch's does not take."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values, the negative ones multiplied by their slopes."""
        return torch.where(values < 0, values * self.slopes, values)


class _TopK(InFloat):
    """ONNX's TopK with a fixed `count`."""

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values and their indices."""
        chosen = torch.topk(values, self.count, self.axis, self.largest, self.ordered)
        return chosen[0], chosen[1]


class _Recurrent(InFloat):
    """ONNX's LSTM, GRU or RNN, by torch's `function`; the states are 0 by default.

    Attributes:
        is_reverse: whether it starts at the last step.
        count: number of outputs.
    """

    takes: ClassVar[Collection[int]] = (0, 5, 6)

    def __init__(self, weights: Sequence[torch.Tensor], **attributes: Any) -> None:
        super().__init__(**attributes)
        self.weights = torch.nn.ParameterList(weights)

    def forward(self, values: torch.Tensor, *states: torch.Tensor) -> Any:
        """Return [steps, directions, N, width] and the last states [directions, N, width]."""
        weights = [*self.weights]
        ways, width = len(weights) // 4, weights[1].shape[1]
        if not states:
            zeros = values.new_zeros(ways, values.shape[1], width)
            states = (zeros,) * (2 if self.function is torch.lstm else 1)
        given = values.flip(0) if self.is_reverse else values
        options = True, 1, 0.0, False, ways == 2, False  # biases, layers, dropout, training, ...
        first = states if self.function is torch.lstm else states[0]
        outputs = self.function(given, first, weights, *options)
        steps, last = outputs[0], [outputs[i] for i in range(1, self.count)]
        steps = steps.flip(0) if self.is_reverse else steps
        steps = steps.unflatten(-1, (ways, width)).transpose(1, 2)
        return (steps, *last) if last else steps


class _Resize(Fixed):
    """ONNX's Resize as torch computes it, with fixed `scales` or `sizes`."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values` [N, C, ...] resized."""
        return functional.interpolate(
            values, self.sizes, self.scales, self.mode, self.align_corners
        )


class _Resample(InFloat):
    """Any Resize, as a product with a matrix [size, new size] along each of its `axes`."""

    def __init__(self, matrices: Mapping[int, NDArray[np.float32]]) -> None:
        super().__init__(axes=list(matrices))
        for axis, matrix in matrices.items():
            self.register_buffer(f"matrix_{axis}", torch.from_numpy(matrix))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values` resized."""
        for axis in self.axes:
            matrix = self.get_buffer(f"matrix_{axis}")
            values = torch.matmul(values.transpose(axis, -1), matrix).transpose(axis, -1)
        return values


def _make_function(function: Callable[..., Any], node: Node) -> torch.nn.Module:
    return _Function(function=function)


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
    return _AveragePool(pool=pool, widths=widths, share=pool(counted))


def _lp_pool(node: Node) -> torch.nn.Module | None:
    made = _make_pool(node)
    if made is None or node("ceil_mode", 0):
        return None
    count = int(np.prod(node("kernel_shape")))
    return _LpPool(pool=made[0], widths=made[1], power=node("p", 2), count=count)


def _over_space(kind: type[Fixed], node: Node, **settings: Any) -> torch.nn.Module:
    return kind(axes=tuple(range(2, len(node.sizes))), **settings)


def _extreme(function: Callable[..., Any], node: Node) -> torch.nn.Module | None:
    axes = node.constants.get(1, np.array(node("axes", []))).tolist()
    axes = axes or [*range(len(node.sizes))]
    known = axes and not node("noop_with_empty_axes", 0)
    keeps = bool(node("keepdims", 1))
    return _Extreme(function=function, axes=axes, keeps=keeps) if known else None


def _pad(node: Node) -> torch.nn.Module | None:
    """Return a Pad with fixed widths; torch reflects and repeats only axes after the first."""
    mode, given = node("mode", b"constant").decode(), node.constants[1].reshape(2, -1).T
    if 3 in node.constants and not node.sizes:
        return None
    pairs = np.zeros((len(node.sizes) or len(given), 2), np.int64)
    pairs[node.constants.get(3, slice(None))] = given
    if mode == "wrap":
        return _Wrap(widths={axis: pair.tolist() for axis, pair in enumerate(pairs) if pair.any()})
    cropped = np.maximum(-pairs, 0).tolist()
    kept = tuple(slice(before, -after or None) for before, after in cropped)
    pairs, constant = np.maximum(pairs, 0), mode == "constant"
    if not constant:
        pairs = pairs[2:] if len(pairs) > 2 and not pairs[1].any() else pairs[1:]
    return _Pad(
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
    return _ConvTranspose(layer=layer, kept=(..., *parts))


def _depth_to_space(node: Node) -> torch.nn.Module | None:
    in_torchs_order = node("mode", b"DCR") == b"CRD"
    return None if in_torchs_order else _DepthToSpace(block=node("blocksize"))


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
    return None if known or not rank else _PRelu(slopes=slopes)


def _triangle(node: Node) -> torch.nn.Module:
    function = torch.triu if node("upper", 1) else torch.tril
    diagonal = int(node.constants.get(1, np.array(0)))
    return _Function(function=partial(function, diagonal=diagonal))


def _cum_sum(node: Node) -> torch.nn.Module:
    ways = {name: bool(node(name, 0)) for name in ("exclusive", "reverse")}
    return _CumSum(axis=int(node.constants[1].item()), **ways)


def _top_k(node: Node) -> torch.nn.Module:
    order = {"largest": bool(node("largest", 1)), "ordered": bool(node("sorted", 1))}
    return _TopK(count=int(node.constants[1].item()), axis=node("axis", -1), **order)


def _joined(function: Callable[..., Any], node: Node) -> torch.nn.Module:
    return _Joined(function=function)


def _gather(node: Node) -> torch.nn.Module | None:
    axis = node("axis", 0)
    axis += len(node.sizes) if axis < 0 else 0
    return None if node.constants or axis < 0 else _Gather(axis=axis)


def _scatter(kind: type[Joint], node: Node, **settings: Any) -> torch.nn.Module | None:
    reduction = node("reduction", b"none")
    known = reduction in (b"none", b"add") and None not in settings.values()
    return kind(adds=reduction == b"add", **settings) if known else None


def _grid_sample(node: Node) -> torch.nn.Module | None:
    mode = node("mode", b"linear").decode()
    settings = {
        "mode": {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode),
        "padding_mode": node("padding_mode", b"zeros").decode(),
        "align_corners": bool(node("align_corners", 0)),
    }
    known = len(node.sizes) == 4
    return _Joined(function=partial(functional.grid_sample, **settings)) if known else None


def _one_hot(node: Node) -> torch.nn.Module:
    off, on = map(torch.tensor, node.constants[2])
    classes = torch.arange(int(node.constants[1].item()))
    return _OneHot(classes=classes, off=off, on=on, axis=node("axis", -1))


def _recurrent(node: Node) -> torch.nn.Module | None:
    steps = [*node.sizes, 0][0]
    function = torch_recurrent.find_function(node.proto, node.constants, steps)
    if function is None:
        return None
    weights = torch_recurrent.find_weights(node.proto, node.constants)
    is_reverse, count = node("direction", b"") == b"reverse", len(node.proto.output)
    return _Recurrent(weights, function=function, is_reverse=is_reverse, count=count)


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
    return _Resample(matrices) if all(node.sizes[i] for i in axes) else None


_POLICY = ("keep_aspect_ratio_policy", b"stretch")
_ANY = 7  # of a free size, to compare two ways to resize it
_MODES = {
    b"nearest": {rank: ["nearest", "nearest-exact"] for rank in (3, 4, 5)},
    b"linear": {3: ["linear"], 4: ["bilinear"], 5: ["trilinear"]},
    b"cubic": {4: ["bicubic"]},
}


def _interpolations(node: Node, key: int, targets: list[Any]) -> list[_Resize]:
    """Return the ways in which torch resizes to these scales, or sizes if `key` is 3."""
    mode, rank = node("mode", b"nearest"), len(node.sizes)
    scales, sizes = (None, targets) if key == 3 else (targets, None)
    return [
        _Resize(scales=scales, sizes=sizes, mode=name, align_corners=corners)
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


def _is_same(module: _Resize, axis: int, matrix: NDArray[np.float32]) -> bool:
    """Return whether torch resizes an axis by this matrix."""
    size, mode = len(matrix), "bilinear" if "linear" in module.mode else module.mode
    sizes = None if module.sizes is None else [module.sizes[axis - 2], 1]
    scales = None if module.scales is None else [module.scales[axis - 2], 1]
    unit = torch.eye(size)[:, None, :, None]
    rows = functional.interpolate(unit, sizes, scales, mode, module.align_corners)[:, 0, :, 0]
    return rows.shape == matrix.shape and bool(np.abs(rows.numpy() - matrix).max() < 1e-5)


_Converter = Callable[[Node], torch.nn.Module | None]
_OF_SEVERAL: dict[str, _Converter] = {
    "BitwiseAnd": partial(_joined, torch.bitwise_and),
    "BitwiseOr": partial(_joined, torch.bitwise_or),
    "BitwiseXor": partial(_joined, torch.bitwise_xor),
    "CastLike": partial(_joined, lambda values, like: values.type_as(like)),
    "Gather": _gather,
    "GatherElements": lambda node: _GatherElements(axis=node("axis", 0)),
    "GatherND": lambda node: (
        _Pick(depth=node.depth) if node.depth and not node("batch_dims", 0) else None
    ),
    "GridSample": _grid_sample,
    "ScatterElements": lambda node: _scatter(_ScatterElements, node, axis=node("axis", 0)),
    "ScatterND": lambda node: _scatter(_ScatterND, node, depth=node.depth),
    **dict.fromkeys(torch_recurrent.KINDS, _recurrent),
}
_CONVERTERS: dict[str, _Converter] = {
    **_OF_SEVERAL,
    "AveragePool": _average_pool,
    "BitwiseNot": partial(_make_function, torch.bitwise_not),
    "ConvTranspose": _conv_transpose,
    "CumSum": _cum_sum,
    "DepthToSpace": _depth_to_space,
    "Gelu": _gelu,
    "GlobalLpPool": lambda node: _over_space(_Norm, node, power=node("p", 2)),
    "GlobalMaxPool": partial(_over_space, _Extreme, function=torch.amax, keeps=True),
    "LpNormalization": lambda node: _Normalize(power=node("p", 2), axis=node("axis", -1)),
    "LpPool": _lp_pool,
    "MeanVarianceNormalization": lambda node: _Standardize(axes=node("axes", [0, 2, 3])),
    "Mish": lambda node: torch.nn.Mish(),
    "OneHot": _one_hot,
    "PRelu": _prelu,
    "Pad": _pad,
    "RMSNormalization": _rms_norm,
    "ReduceMax": partial(_extreme, torch.amax),
    "ReduceMin": partial(_extreme, torch.amin),
    "Resize": _resize,
    "Shrink": _shrink,
    "SpaceToDepth": lambda node: _SpaceToDepth(block=node("blocksize")),
    "Swish": _swish,
    "ThresholdedRelu": lambda node: torch.nn.Threshold(node("alpha", 1.0), 0.0),
    "TopK": _top_k,
    "Trilu": _triangle,
    **{kind: partial(_make_function, function) for kind, function in _FUNCTIONS.items()},
}
