"""Moves the batch axis of inputs and outputs to the front of their shapes.

Recurrent networks take states [layers, N, size], and many return [steps, N, values]. This package
expects the samples on the first axis.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from resnet8ptq.graph.passes import end_with, rewrite
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


def move_inputs(model: ir.Model, axes: Mapping[str, int]) -> None:
    """Move the batch axis of inputs to the front; `axes`: see `find_inputs`."""
    for value in (value for value in model.graph.inputs if value.name in axes):
        axis = axes[str(value.name)]
        dims = list(value.shape or ())
        moved = ir.Value(name=f"{value.name}__batch_inside")
        value.replace_all_uses_with(moved)
        order = [*range(1, axis + 1), 0, *range(axis + 1, len(dims))]
        node = ir.node("Transpose", [value], {"perm": order}, outputs=[moved], name=moved.name)
        model.graph.insert_before(model.graph[0], node)
        value.shape = ir.Shape([dims.pop(axis), *dims])


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
    names = [value.name for value in network.proto.graph.output]
    passes = [
        partial(_move_output, name=name, axis=axis, rank=example.ndim)
        for name, axis, example in zip(names, axes, few, strict=True)
        if axis
    ]
    proto = rewrite(copy.deepcopy(network.proto), passes)

    def predict(batch: SampleArray) -> Outputs:
        outputs = network.predict(batch)
        return [np.moveaxis(v, axis, 0) for v, axis in zip(outputs, axes, strict=True)]

    moved = {name: axis for name, axis in zip(names, axes, strict=True) if axis}
    return replace(network, proto=proto, predict=predict, moved={**network.moved, **moved})


def _find_axis(few: NDArray[Any], more: NDArray[Any]) -> int:
    """Return the axis with the number of samples in both outputs; 0 if none or several fit."""
    if few.ndim != more.ndim:
        return 0
    sizes = zip(few.shape, more.shape, strict=True)
    counting = [axis for axis, pair in enumerate(sizes) if pair == SIZES]
    return counting[0] if len(counting) == 1 else 0


def _move_output(model: ir.Model, name: str, axis: int, rank: int) -> None:
    inner = f"{name}__batch_inside"
    order = [axis, *(i for i in range(rank) if i != axis)]
    node = end_with(model, name, inner, "Transpose", inner, perm=order)
    node.outputs[0].shape = None  # set with all sizes, see `batch_axis.fix_sizes`
