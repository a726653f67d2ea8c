"""Moves the batch axis of inputs and outputs to the front of their shapes.

Recurrent networks take states [layers, N, size], and many return [steps, N, values]. This package
expects the samples on the first axis.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from resnet8ptq.graph.renaming import rename_inside
from resnet8ptq.models.batch_axis import SIZES, Outputs
from resnet8ptq.models.contract import SampleArray, read_contract
from resnet8ptq.models.gates.onnx import graph_inputs
from resnet8ptq.models.sources.contract import Network


def find_inputs(graph: onnx.GraphProto) -> dict[str, int]:
    """Return the batch axis of each input whose first axis has another meaning and a fixed size.

    The batch axis is the only axis with the size, or the name, of another input's first axis.
    Beside a free batch it may be the only axis of size 1: exporters fix that of an initial state.
    """
    shapes = {value.name: axes for value in graph_inputs(graph) if (axes := _axes(value))}
    firsts = [axes[0] for axes in shapes.values()]
    batch = next((first for first in firsts if isinstance(first, str)), 1)
    moved = {}
    for name, axes in shapes.items():
        size = batch if batch in axes else 1
        is_first = isinstance(axes[0], str) or axes[0] == size
        if batch in firsts and not is_first and axes.count(size) == 1:
            moved[name] = axes.index(size)
    return moved


def _axes(value: onnx.ValueInfoProto) -> list[int | str]:
    """Return the sizes of a tensor, and the names of its free sizes."""
    dims = value.type.tensor_type.shape.dim
    return [dim.dim_value if dim.dim_value > 0 else dim.dim_param or "?" for dim in dims]


def move_inputs(graph: onnx.GraphProto, axes: Mapping[str, int]) -> None:
    """Move the batch axis of inputs to the front, in place; `axes`: see `find_inputs`."""
    nodes = []
    for value in (value for value in graph.input if value.name in axes):
        axis = axes[value.name]
        dims = list(value.type.tensor_type.shape.dim)
        inner = f"{value.name}__batch_inside"
        rename_inside(graph, value.name, inner)
        order = [*range(1, axis + 1), 0, *range(axis + 1, len(dims))]
        nodes.append(helper.make_node("Transpose", [value.name], [inner], inner, perm=order))
        dims.insert(0, dims.pop(axis))
        del value.type.tensor_type.shape.dim[:]
        value.type.tensor_type.shape.dim.extend(dims)
    nodes += graph.node
    del graph.node[:]
    graph.node.extend(nodes)


def move_outputs(network: Network, samples: SampleArray) -> Network:
    """Return a network with the batch axis of every output in front.

    Args:
        samples: network inputs [n, ...], at least one.
    """
    if read_contract(network.proto.graph).batch is not None:
        return network  # one sample: its outputs get a batch axis
    few, more = (network.predict(samples[[0] * size]) for size in SIZES)
    axes = [_find_axis(*shapes) for shapes in zip(few, more, strict=True)]
    if not any(axes):
        return network
    proto = copy.deepcopy(network.proto)
    for value, axis, example in zip(list(proto.graph.output), axes, few, strict=True):
        if axis:
            _move_output(proto.graph, value, axis, example.ndim)

    def predict(batch: SampleArray) -> Outputs:
        outputs = network.predict(batch)
        return [np.moveaxis(v, axis, 0) for v, axis in zip(outputs, axes, strict=True)]

    moved = {v.name: axis for v, axis in zip(proto.graph.output, axes, strict=True) if axis}
    return replace(network, proto=proto, predict=predict, moved={**network.moved, **moved})


def _find_axis(few: NDArray[Any], more: NDArray[Any]) -> int:
    """Return the axis with the number of samples in both outputs; 0 if none or several fit."""
    if few.ndim != more.ndim:
        return 0
    sizes = zip(few.shape, more.shape, strict=True)
    counting = [axis for axis, pair in enumerate(sizes) if pair == SIZES]
    return counting[0] if len(counting) == 1 else 0


def _move_output(graph: onnx.GraphProto, value: onnx.ValueInfoProto, axis: int, rank: int) -> None:
    inner = f"{value.name}__batch_inside"
    rename_inside(graph, value.name, inner)
    order = [axis, *(i for i in range(rank) if i != axis)]
    graph.node.append(helper.make_node("Transpose", [inner], [value.name], inner, perm=order))
    value.type.tensor_type.ClearField("shape")  # set with all sizes, see `batch_axis.fix_sizes`
