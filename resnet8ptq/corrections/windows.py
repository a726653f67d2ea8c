"""A layer as a matrix product: the windows of its input, one for each position of its output."""

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from resnet8ptq.graph.layers import attribute
from resnet8ptq.graph.weights import Array


def count_positions(inputs: Array, node: onnx.NodeProto, weights: Array) -> int:
    """Return the number of positions of the output for one image."""
    return int(np.prod(_windows(inputs, node, weights)[1]))


def sample_windows(
    inputs: Array, node: onnx.NodeProto, weights: Array, positions: NDArray[np.int64]
) -> Array:
    """Return the windows at `positions` of the output as rows [groups, images * drawn, inputs].

    Args:
        weights: [output channels, ...].
        positions: [images, drawn], flat indices into one image's output.
    """
    windows, shape = _windows(inputs, node, weights)
    images = np.arange(len(windows))[:, None]
    index: Any = (images, slice(None), *np.unravel_index(positions, shape))
    rows = windows[index]  # [images, drawn, channels, *kernel]
    groups = int(attribute(node, "group", 1))
    return rows.reshape(positions.size, groups, -1).transpose(1, 0, 2)


def _windows(inputs: Array, node: onnx.NodeProto, weights: Array) -> tuple[Array, tuple[int, ...]]:
    """Return a view [images, channels, *positions, *kernel] and the shape of the positions."""
    if node.op_type != "Conv":
        rows = inputs.reshape(len(inputs), -1, inputs.shape[-1])
        return rows.transpose(0, 2, 1), (rows.shape[1],)
    kernel = weights.shape[2:]
    rank = len(kernel)
    strides = tuple(attribute(node, "strides", [1] * rank))
    dilations = tuple(attribute(node, "dilations", [1] * rank))
    extent = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True))
    pads = attribute(node, "pads", [0] * 2 * rank)  # conversion has replaced auto_pad
    padded = np.pad(inputs, [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)])
    view = np.lib.stride_tricks.sliding_window_view(padded, extent, axis=tuple(range(2, 2 + rank)))
    steps: Any = (..., *(slice(None, None, step) for step in (*strides, *dilations)))
    view = view[steps]
    return view, view.shape[2 : 2 + rank]
