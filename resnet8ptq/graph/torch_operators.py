"""Torch modules for ONNX operators that onnx2torch lacks, or converts wrongly or unsuitably.

Most modules take only the node's first input; its other inputs must be constants. A `Joint` takes
all inputs, and a recurrent layer also takes its initial states.
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
from resnet8ptq.graph.links import Links, input_at
from resnet8ptq.graph.session import open_runner
from resnet8ptq.graph.shapes import find_sizes

_LIKE_TORCHS = ("Acosh", "Asinh", "Atanh", "Cosh", "Sinh")
_POOLS = {1: functional.avg_pool1d, 2: functional.avg_pool2d, 3: functional.avg_pool3d}
_TRANSPOSED = {
    1: torch.nn.ConvTranspose1d,
    2: torch.nn.ConvTranspose2d,
    3: torch.nn.ConvTranspose3d,
}


class Fixed(torch.nn.Module):  # type: ignore[misc]
    """A function of tensors with fixed settings; a setting may be a tensor or a module.

    Attributes:
        takes: indices of the node's inputs that the module takes.
    """

    takes: ClassVar[Collection[int]] = (0,)

    def __init__(self, function: Callable[..., Any], **settings: Any) -> None:
        super().__init__()
        self.function = function
        self.names = tuple(settings)
        for name, value in settings.items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *values: torch.Tensor) -> Any:
        """Return the function's result for these tensors."""
        settings = {name: getattr(self, name) for name in self.names}
        return self.function(*values, **settings)


class InFloat(Fixed):
    """A module that torch's quantizers leave in float; most consist of several operators."""


class Joint(InFloat):
    """A module that takes all inputs of its node."""

    takes: ClassVar[Collection[int]] = range(sys.maxsize)


class _Recurrent(InFloat):
    takes: ClassVar[Collection[int]] = (0, 5, 6)


@dataclass(frozen=True)
class Node:
    """An ONNX node with the known sizes and constants of its inputs.

    Attributes:
        sizes: the sizes of the first input, 0 for a free size; empty if unknown or a scalar.
        depth: the last size of the second input; None if it is unknown or free, and for a scalar.
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
    """Return the modules that replace onnx2torch's, by the names of the nodes."""
    nodes = []
    for node in proto.graph.node:
        if not node.domain and node.op_type in _CONVERTERS:
            nodes.append(node)
    if not nodes:
        return {}

    # Pass each converter the constants and sizes of its node
    stored = Links(proto.graph).constants
    sizes = find_sizes(proto)
    opset = next(entry for entry in proto.opset_import if not entry.domain)
    modules = {}
    for node in nodes:
        constants = {}
        computed = set()  # indices of the inputs that are not constant
        for index, name in enumerate(node.input):
            if name in stored:
                constants[index] = onnx.numpy_helper.to_array(stored[name])
            elif name:
                computed.add(index)
        if computed != {0} and node.op_type not in _OF_SEVERAL:
            continue  # the converter needs constants

        # A converter returns None for a variant that it leaves to onnx2torch
        known = Node(
            node,
            sizes=sizes.get(node.input[0], []),
            depth=_find_depth(node, sizes),
            constants=constants,
            opset=opset,
        )
        module = _CONVERTERS[node.op_type](known)
        if module is not None:
            modules[node.name] = module
    return modules


def _find_depth(node: onnx.NodeProto, sizes: Mapping[str, Sequence[int]]) -> int | None:
    """Return the value of `Node.depth` for a node."""
    second = sizes.get(input_at(node, 1))
    if not second:
        return None
    return second[-1] or None


def _always(kind: type[Fixed], function: Callable[..., Any]) -> "_Converter":
    return lambda node: kind(function)


def _make_pool(node: Node) -> tuple[Any, list[int]] | None:
    """Return torch's mean over a pool's windows, and the padding that must come before it.

    Returns None for windows that torch's `avg_pool` functions lack: dilated, of more than three
    axes, or padded by `SAME_UPPER` or `SAME_LOWER`.
    """
    kernel = node("kernel_shape")
    rank = len(kernel)
    ones = [1] * rank
    pads = node("pads", [0] * 2 * rank)
    plain = node("dilations", ones) == ones and b"SAME" not in node("auto_pad", b"")
    if not plain or rank not in _POOLS:
        return None
    settings = {"stride": node("strides", ones), "ceil_mode": bool(node("ceil_mode", 0))}
    # `functional.pad` takes (before, after) for each axis, from the last axis to the first
    widths = np.reshape(pads, (2, rank)).T[::-1].flatten().tolist()
    return partial(_POOLS[rank], kernel_size=kernel, **settings), widths


def _average_pool(node: Node) -> torch.nn.Module | None:
    """Return an AveragePool with unequal padding before and after an axis.

    Returns None for other AveragePools, for windows that `_make_pool` refuses, and if the size of a
    spatial axis is unknown.
    """
    made = _make_pool(node)
    spatial = node.sizes[2:]
    if made is None or made[1][::2] == made[1][1::2] or not spatial or 0 in spatial:
        return None
    pool, widths = made
    inside = 1.0 if node("count_include_pad", 0) else 0.0
    # Divide by the share of each window that counts
    share = pool(functional.pad(torch.ones(1, 1, *spatial), widths, value=inside))
    return InFloat(lambda values, share: pool(functional.pad(values, widths)) / share, share=share)


def _lp_pool(node: Node) -> torch.nn.Module | None:
    """Return an LpPool; None for windows that `_make_pool` refuses, and with `ceil_mode`.

    torch's own LpPool lacks padding, and does not take absolute values for odd powers.
    """
    made = _make_pool(node)
    power = node("p", 2)
    count = int(np.prod(node("kernel_shape")))
    if made is None or node("ceil_mode", 0):
        return None
    pool, widths = made

    def norms(values: torch.Tensor) -> torch.Tensor:
        powers = functional.pad(values.abs().pow(power), widths)
        return (pool(powers) * count).pow(1 / power)

    return InFloat(norms)


def _spatial(node: Node) -> tuple[int, ...]:
    return tuple(range(2, len(node.sizes)))


def _over(find: Callable[..., Any], axes: Sequence[int], keeps: bool) -> torch.nn.Module:
    """Return a reduction by `find`, which is `torch.amax` or `torch.amin`.

    If the axes are dropped, a second operator drops them, because XNNPACK's reductions keep them.
    """

    def extremes(values: torch.Tensor) -> torch.Tensor:
        extremes = find(values, axes, keepdim=True)
        return extremes if keeps else extremes.squeeze(axes)

    return Fixed(extremes)


def _extreme(find: Callable[..., Any], node: Node) -> torch.nn.Module | None:
    axes = node.constants.get(1, np.array(node("axes", []))).tolist()
    axes = axes or [*range(len(node.sizes))]  # without axes, over all
    if not axes or node("noop_with_empty_axes", 0):
        return None
    return _over(find, axes, bool(node("keepdims", 1)))


def _pad(node: Node) -> torch.nn.Module | None:
    """Return a Pad with fixed widths; None if the node names axes and the rank is unknown."""
    mode = node("mode", b"constant").decode()
    sides = node.constants[1].reshape(2, -1)
    if 3 in node.constants and not node.sizes:
        return None
    pairs = np.zeros((len(node.sizes) or sides.shape[1], 2), np.int64)
    pairs[node.constants.get(3, slice(None))] = sides.T
    if mode == "wrap":
        padded = np.flatnonzero(pairs.any(axis=1)).tolist()
        return _wrap({axis: pairs[axis].tolist() for axis in padded})

    # Negative widths crop the ends
    cropped = np.maximum(-pairs, 0).tolist()
    kept = tuple(slice(before, -after or None) for before, after in cropped)

    # Modes other than constant take no widths for the batch and for unpadded channels
    pairs = np.maximum(pairs, 0)
    value = None
    if mode != "constant":
        has_channels = len(pairs) > 2 and not pairs[1].any()
        pairs = pairs[2:] if has_channels else pairs[1:]
    elif 2 in node.constants:
        value = float(node.constants[2])
    widths = pairs[::-1].flatten().tolist()
    kind = "replicate" if mode == "edge" else mode

    def pad(values: torch.Tensor) -> torch.Tensor:
        if np.any(cropped):
            values = values[kept]
        return functional.pad(values, widths, kind, value)

    return Fixed(pad)


def _wrap(widths: Mapping[int, tuple[int, int]]) -> torch.nn.Module:
    """Return a Pad with the values of the opposite end of each axis.

    Args:
        widths: the widths before and after each padded axis, by the axis.
    """

    def wrap(values: torch.Tensor) -> torch.Tensor:
        for axis, (before, after) in widths.items():
            size = values.shape[axis]
            first = values.narrow(axis, size - before, before)
            values = torch.cat([first, values, values.narrow(axis, 0, after)], axis)
        return values

    return InFloat(wrap)


def _find_pads(node: Node, kernel: Sequence[int]) -> NDArray[np.int64] | None:
    """Return the paddings [2, axes] of a ConvTranspose, before and after each axis.

    Returns None for `SAME_UPPER` and `SAME_LOWER`, and if `output_shape` needs unknown sizes or
    negative paddings.
    """
    rank = len(kernel)
    sizes = node.sizes[2:]
    target = node("output_shape", [])
    if node("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        return None
    if not target:
        return np.reshape(node("pads", [0] * 2 * rank), (2, rank))
    if not sizes or 0 in sizes:
        return None

    # Padding removes the excess over `output_shape`, the larger half before the axis
    ones = [1] * rank
    extra = np.array(node("output_padding", [0] * rank))
    whole = (np.array(sizes) - 1) * node("strides", ones) + extra
    total = whole + (np.array(kernel) - 1) * node("dilations", ones) + 1 - target[-rank:]
    if total.min() < 0:
        return None
    return np.stack([total - total // 2, total // 2])


def _conv_transpose(node: Node) -> torch.nn.Module | None:
    """Return a ConvTranspose with `output_shape`, or with unequal padding before and after an axis.

    Returns None for others, with more than three spatial axes, and if `_find_pads` returns None.
    """
    weights = torch.tensor(node.constants[1])
    bias = node.constants.get(2)
    rank = weights.ndim - 2
    pads = _find_pads(node, weights.shape[2:])
    if pads is None or rank not in _TRANSPOSED:
        return None
    if (pads[0] == pads[1]).all() and not node("output_shape", []):
        return None

    # Let torch pad each axis by the smaller width, and cut off the rest
    ones = [1] * rank
    smaller = pads.min(0)
    groups = node("group", 1)
    layer = _TRANSPOSED[rank](
        len(weights),
        weights.shape[1] * groups,
        weights.shape[2:],
        node("strides", ones),
        smaller.tolist(),
        node("output_padding", [0] * rank),
        groups,
        bias is not None,
        node("dilations", ones),
    )
    layer.weight = torch.nn.Parameter(weights)
    layer.bias = None if bias is None else torch.nn.Parameter(torch.tensor(bias))
    kept: list[Any] = [...]
    for before, after in (pads - smaller).T.tolist():
        kept.append(slice(before, -after or None))

    def convolve(values: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
        return layer(values)[tuple(kept)]

    return InFloat(convolve, layer=layer)


def _depth_to_space(node: Node) -> torch.nn.Module | None:
    """Return a DepthToSpace of mode DCR, where the block comes before the channels; else None."""
    if node("mode", b"DCR") == b"CRD":
        return None
    block = node("blocksize")

    def rearrange(values: torch.Tensor) -> torch.Tensor:
        """Return [N, C, H, W] as [N, C / block / block, H * block, W * block]."""
        count, channels, height, width = values.shape
        channels = channels // block**2
        parts = values.reshape(count, block, block, channels, height, width)
        turned = parts.permute(0, 3, 4, 1, 5, 2)
        return turned.reshape(count, channels, height * block, width * block)

    return Fixed(rearrange)


def _space_to_depth(node: Node) -> torch.nn.Module:
    """Return a SpaceToDepth, into which ONNX Runtime fuses slices.

    The module calls torch's functions: FX leaves a convolution in float if it follows methods, such
    as `permute`, of the network's input.
    """
    block = node("blocksize")

    def rearrange(values: torch.Tensor) -> torch.Tensor:
        """Return [N, C, H, W] as [N, block * block * C, H / block, W / block]."""
        count, channels, height, width = values.shape
        height = height // block
        width = width // block
        shape = [count, channels, height, block, width, block]
        parts = torch.permute(torch.reshape(values, shape), [0, 3, 5, 1, 2, 4])
        return torch.reshape(parts, [count, -1, height, width])

    return Fixed(rearrange)


def _shrink(node: Node) -> torch.nn.Module | None:
    """Return a Shrink; None unless its bias is 0 or equal to the bound, as torch requires."""
    bias = node("bias", 0.0)
    bound = node("lambd", 0.5)
    if bias == bound:
        return torch.nn.Softshrink(bound)
    if bias == 0:
        return torch.nn.Hardshrink(bound)
    return None


def _gelu(node: Node) -> torch.nn.Module | None:
    """Return a Gelu that is approximated by tanh; None for the exact one."""
    is_approximate = node("approximate", b"none") == b"tanh"
    return torch.nn.GELU("tanh") if is_approximate else None


def _swish(node: Node) -> torch.nn.Module | None:
    """Return a Swish; None unless its factor alpha is 1, as in torch."""
    return torch.nn.SiLU() if node("alpha", 1.0) == 1 else None


def _rms_norm(node: Node) -> torch.nn.Module:
    weights = torch.tensor(node.constants[1])
    norm = torch.nn.RMSNorm(weights.shape, node("epsilon", 1e-5))
    norm.weight = torch.nn.Parameter(weights)
    return norm


def _instance_norm(node: Node) -> torch.nn.Module | None:
    """Return an instance normalization that stays in float; None unless the input has four axes.

    torch's 8-bit kernel returns noise, with channels last, for a batch of more samples than a
    channel has pixels (torch 2.13); its first samples are right.
    """
    if len(node.sizes) != 4:
        return None
    epsilon = node("epsilon", 1e-5)

    def standardize(values: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return functional.instance_norm(values, weight=scale, bias=bias, eps=epsilon)

    return Joint(standardize)


def _prelu(node: Node) -> torch.nn.Module | None:
    slopes = torch.tensor(node.constants[1])
    rank = len(node.sizes)
    by_channel = [*node.sizes[1:2], *[1] * (rank - 2)]
    has_torchs_shape = slopes.numel() == 1 or list(slopes.shape)[1 - rank :] == by_channel
    if has_torchs_shape or not rank:
        return None

    def prelu(values: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        return torch.where(values < 0, values * slopes, values)

    return InFloat(prelu, slopes=slopes)


def _triangle(node: Node) -> torch.nn.Module:
    function = torch.triu if node("upper", 1) else torch.tril
    diagonal = int(node.constants.get(1, np.array(0)))
    return Fixed(function, diagonal=diagonal)


def _cum_sum(node: Node) -> torch.nn.Module:
    axis = int(node.constants[1].item())
    exclusive = node("exclusive")
    reverse = node("reverse")

    def cumulate(values: torch.Tensor) -> torch.Tensor:
        if reverse:
            values = values.flip(axis)
        sums = torch.cumsum(values, axis, dtype=values.dtype)
        if exclusive:
            sums = sums - values
        return sums.flip(axis) if reverse else sums

    return InFloat(cumulate)


def _top_k(node: Node) -> torch.nn.Module:
    count = int(node.constants[1].item())
    axis = node("axis", -1)
    is_largest = bool(node("largest", 1))
    is_sorted = bool(node("sorted", 1))

    def top(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.topk(values, count, axis, is_largest, is_sorted)
        return chosen[0], chosen[1]  # a traced result cannot be unpacked

    return InFloat(top)


def _gather(node: Node) -> torch.nn.Module | None:
    axis = node("axis", 0)
    if axis < 0:
        axis += len(node.sizes)
    if node.constants or axis < 0:
        return None
    before = (slice(None),) * axis  # the axes before the gathered one
    return Joint(lambda values, indices: values[(*before, indices.long())])


def _by_axis(indices: torch.Tensor, depth: int) -> tuple[torch.Tensor, ...]:
    """Return the indices [...] along each of `depth` axes, from the indices [..., depth]."""
    return tuple(indices.select(-1, axis) for axis in range(depth))


def _gather_nd(node: Node) -> torch.nn.Module | None:
    if not node.depth or node("batch_dims", 0):
        return None
    depth = node.depth
    return Joint(lambda values, indices: values[_by_axis(indices, depth)])


def _along(function: Callable[..., Any], node: Node) -> torch.nn.Module:
    """Return a module that calls a function with indices along the node's axis.

    Indices below 0, which torch's functions refuse, count from the end.
    """
    axis = node("axis", 0)

    def call(values: torch.Tensor, indices: torch.Tensor, *updates: torch.Tensor) -> torch.Tensor:
        positions = indices.long() % values.shape[axis]
        result: torch.Tensor = function(values, axis, positions, *updates)
        return result

    return Joint(call)


def _scatter_elements(node: Node) -> torch.nn.Module | None:
    functions = {b"none": torch.scatter, b"add": torch.scatter_add}
    function = functions.get(node("reduction", b"none"))
    return None if function is None else _along(function, node)


def _scatter_nd(node: Node) -> torch.nn.Module | None:
    depth = node.depth
    reduction = node("reduction", b"none")
    if depth is None or reduction not in (b"none", b"add"):
        return None
    adds = reduction == b"add"

    def scatter(values: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
        return torch.index_put(values, _by_axis(indices, depth), updates, adds)

    return Joint(scatter)


def _standardize(axes: list[int]) -> torch.nn.Module:
    def standardize(values: torch.Tensor) -> torch.Tensor:
        deviation = values.std(axes, correction=0, keepdim=True)
        return (values - values.mean(axes, keepdim=True)) / (deviation + 1e-9)

    return InFloat(standardize)


def _grid_sample(node: Node) -> torch.nn.Module | None:
    if len(node.sizes) != 4:
        return None
    mode = node("mode", b"linear").decode()
    torchs_modes = {"linear": "bilinear", "cubic": "bicubic"}
    return Joint(
        functional.grid_sample,
        mode=torchs_modes.get(mode, mode),
        padding_mode=node("padding_mode", b"zeros").decode(),
        align_corners=bool(node("align_corners", 0)),
    )


def _one_hot(node: Node) -> torch.nn.Module:
    off, on = map(torch.tensor, node.constants[2])
    classes = torch.arange(int(node.constants[1].item()))
    axis = node("axis", -1)

    def one_hot(
        indices: torch.Tensor, classes: torch.Tensor, off: torch.Tensor, on: torch.Tensor
    ) -> torch.Tensor:
        # Numbers below 0 count from the end
        hot = indices.long().unsqueeze(-1) % len(classes) == classes
        inside = ((indices >= -len(classes)) & (indices < len(classes))).unsqueeze(-1)
        return torch.where(hot & inside, on, off).movedim(-1, axis)

    return InFloat(one_hot, classes=classes, off=off, on=on)


def _recurrent(node: Node) -> torch.nn.Module | None:
    """Return an LSTM, GRU or RNN; None for a variant that `torch_recurrent` lacks."""
    steps = node.sizes[0] if node.sizes else 0  # the first axis counts the steps
    network = torch_recurrent.find_function(node.proto, node.constants, steps)
    if network is None:
        return None
    parts = torch_recurrent.weights_by_direction(node.proto, node.constants)
    directions = len(parts) // 4
    width = parts[1].shape[1]
    count = len(node.proto.output)
    is_lstm = network is torch.lstm
    is_reverse = node("direction", b"") == b"reverse"  # runs from the last step

    def run(values: torch.Tensor, *states: torch.Tensor, weights: Any) -> Any:
        """Return [steps, directions, N, width], and the last states [directions, N, width].

        The last states are left out if the node returns none.
        """
        if not states:  # ONNX's default is 0
            zeros = values.new_zeros(directions, values.shape[1], width)
            states = (zeros, zeros)
        if is_reverse:
            values = values.flip(0)
        # The options are biases, layers, dropout, training, bidirectional, batch first
        options = True, 1, 0.0, False, directions == 2, False
        initial = states if is_lstm else states[0]  # only an LSTM has two states
        outputs = network(values, initial, [*weights], *options)

        # torch joins the directions on the last axis
        steps = outputs[0]
        last = [outputs[index] for index in range(1, count)]
        if is_reverse:
            steps = steps.flip(0)
        steps = steps.unflatten(-1, (directions, width)).transpose(1, 2)
        return (steps, *last) if last else steps

    return _Recurrent(run, weights=torch.nn.ParameterList(parts))


def _resize(node: Node) -> torch.nn.Module | None:
    """Return torch's interpolation if it computes the same values; else `_resample`'s module.

    A Resize is linear along each axis, so a resized unit matrix shows what torch and ONNX Runtime
    compute. Returns None for crops, a kept aspect ratio or a resized batch. The result is also None
    if the rank or a size that a matrix needs is unknown, or an axis lacks a target.
    """
    rank = len(node.sizes)
    cropped = b"tf_crop" in node("coordinate_transformation_mode", b"")
    key = 3 if 3 in node.constants else 2
    targets = node.constants.get(key, np.empty(0)).tolist()
    if not rank or cropped or len(targets) != rank or node(*_POLICY) != b"stretch":
        return None
    unchanged = node.sizes if key == 3 else [1] * rank  # the targets that keep every size
    if unchanged[0] and targets[0] != unchanged[0]:
        return None

    # Find the matrix that ONNX Runtime applies along each axis
    matrices = {}
    for axis in range(1, rank):
        if targets[axis] != unchanged[axis]:
            size = node.sizes[axis] or _ANY
            matrices[axis] = _find_matrix(node, key, size, target=targets[axis])

    # Use torch's interpolation, if one computes the same values
    interpolations = []
    if 1 not in matrices:  # torch keeps the channels
        interpolations = _interpolations(node, key, targets[2:])
    for module in interpolations:
        same = [_is_same(module, axis, matrix) for axis, matrix in matrices.items()]
        if all(same):
            return module
    if not all(node.sizes[axis] for axis in matrices):  # a matrix needs the size of its axis
        return None
    return _resample(matrices)


def _resample(matrices: Mapping[int, NDArray[np.float32]]) -> torch.nn.Module:
    """Return a module that resizes axes by matrices [size, new size]; the keys are the axes."""

    def resample(values: torch.Tensor, **buffers: torch.Tensor) -> torch.Tensor:
        for axis, matrix in zip(matrices, buffers.values(), strict=True):
            values = torch.matmul(values.transpose(axis, -1), matrix).transpose(axis, -1)
        return values

    by_name = {f"matrix_{axis}": torch.from_numpy(matrix) for axis, matrix in matrices.items()}
    return InFloat(resample, **by_name)


_POLICY = ("keep_aspect_ratio_policy", b"stretch")
_ANY = 7  # stands for a free size when two ways to resize are compared
# Torch's modes by ONNX's mode, then by the rank of the tensor.
_MODES: dict[bytes, dict[int, tuple[str, ...]]] = {
    b"nearest": dict.fromkeys((3, 4, 5), ("nearest", "nearest-exact")),
    b"linear": {3: ("linear",), 4: ("bilinear",), 5: ("trilinear",)},
    b"cubic": {4: ("bicubic",)},
}


def _interpolations(node: Node, key: int, targets: list[Any]) -> list[Fixed]:
    """Return torch's interpolations of the node's mode, each with and without aligned corners.

    Modes of the nearest value have no such choice.

    Args:
        key: index of the Resize's input with the targets: 2 for scales, 3 for sizes.
        targets: the targets of the axes after the channels.
    """
    mode = node("mode", b"nearest")
    rank = len(node.sizes)
    settings: dict[str, Any] = {"size": None, "scale_factor": None}
    name_of_targets = "size" if key == 3 else "scale_factor"
    settings[name_of_targets] = targets
    corners = [None] if mode == b"nearest" else [False, True]
    modules = []
    for name in _MODES[mode].get(rank, ()):
        for aligned in corners:
            module = Fixed(functional.interpolate, **settings, mode=name, align_corners=aligned)
            modules.append(module)
    return modules


def _find_matrix(node: Node, key: int, size: int, target: float) -> NDArray[np.float32]:
    """Return the matrix [size, new size] by which ONNX Runtime resizes an axis.

    Args:
        key: as for `_interpolations`.
        target: the scale or the new size.
    """
    if key == 3:
        inputs = ["x", "", "", "target"]
        targets = np.array([size, 1, target, 1], np.int64)
    else:
        inputs = ["x", "", "target"]
        targets = np.array([1, 1, target, 1], np.float32)
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        axis (float[a, 1, b, 1] x) => (float[a, 1, c, 1] y) { y = Resize(x) }"""
    )

    # Resize a unit matrix by the node's own settings
    [resize] = proto.graph.node
    resize.input[:] = inputs
    resize.attribute.extend(item for item in node.proto.attribute if item.name != _POLICY[0])
    proto.opset_import[0].CopyFrom(node.opset)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(targets, "target"))
    unit = np.eye(size, dtype=np.float32)[:, np.newaxis, :, np.newaxis]
    [rows] = open_runner(proto, threads=1)(unit)
    return np.ascontiguousarray(rows[:, 0, :, 0])


def _is_same(module: Fixed, axis: int, matrix: NDArray[np.float32]) -> bool:
    """Return whether torch's interpolation resizes an axis by `matrix`, within 1e-5."""
    size = len(matrix)
    mode = "bilinear" if "linear" in module.mode else module.mode
    sizes = None
    scales = None
    if module.size is not None:
        sizes = [module.size[axis - 2], 1]
    if module.scale_factor is not None:
        scales = [module.scale_factor[axis - 2], 1]
    unit = torch.eye(size)[:, None, :, None]
    rows = functional.interpolate(unit, sizes, scales, mode, module.align_corners)[:, 0, :, 0]
    return rows.shape == matrix.shape and bool(np.abs(rows.numpy() - matrix).max() < 1e-5)


_Converter = Callable[[Node], torch.nn.Module | None]
# The converters that also take nodes with several computed inputs
_OF_SEVERAL: dict[str, _Converter] = {
    "BitwiseAnd": _always(Joint, torch.bitwise_and),
    "BitwiseOr": _always(Joint, torch.bitwise_or),
    "BitwiseXor": _always(Joint, torch.bitwise_xor),
    "CastLike": _always(Joint, lambda values, like: values.type_as(like)),
    "Gather": _gather,
    "GatherElements": partial(_along, torch.gather),
    "GatherND": _gather_nd,
    "GridSample": _grid_sample,
    "InstanceNormalization": _instance_norm,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
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
    "GlobalMaxPool": lambda node: _over(torch.amax, _spatial(node), keeps=True),
    "LpNormalization": lambda node: InFloat(
        functional.normalize, p=node("p", 2), dim=node("axis", -1)
    ),
    "LpPool": _lp_pool,
    "MeanVarianceNormalization": lambda node: _standardize(node("axes", [0, 2, 3])),
    "Mish": lambda node: torch.nn.Mish(),
    "OneHot": _one_hot,
    "PRelu": _prelu,
    "Pad": _pad,
    "RMSNormalization": _rms_norm,
    "ReduceMax": partial(_extreme, torch.amax),
    "ReduceMin": partial(_extreme, torch.amin),
    "Resize": _resize,
    "Shrink": _shrink,
    "SpaceToDepth": _space_to_depth,
    "Swish": _swish,
    "ThresholdedRelu": lambda node: torch.nn.Threshold(node("alpha", 1.0), 0.0),
    "TopK": _top_k,
    "Trilu": _triangle,
    **{kind: _always(Fixed, getattr(torch, kind.lower())) for kind in _LIKE_TORCHS},
}
