"""Moves the batch axis of inputs and outputs to the front of their shapes.

Recurrent networks take states [layers, N, size], and many return [steps, N, values]. This package
expects the samples on the first axis.
"""

import copy
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from resnet8ptq.graph.links import output_names
from resnet8ptq.graph.passes import end_with, rewrite
from resnet8ptq.graph.session import open_runner
from resnet8ptq.models.batch_axis import SIZES, Outputs, Predict, declare_free, in_full_batches
from resnet8ptq.models.contract import SampleArray, read_contract
from resnet8ptq.models.gates.onnx import graph_inputs
from resnet8ptq.models.sources.contract import Network


def find_inputs(graph: onnx.GraphProto) -> dict[str, int]:
    """Return the batch axis of each input whose first axis has another meaning and a fixed size.

    The batch size is the first free size among the inputs' first axes, or 1 if none is free. If no
    input begins with it, the result is empty. The batch axis of an input is its only axis of this
    size. Exporters fix the batch size of an initial state, so in an input without the free size,
    the only axis of size 1 is the batch axis.
    """
    shapes = {}
    firsts = []  # the size, or the name of a free size, of each input's first axis
    for value in graph_inputs(graph):
        axes = _axes(value)
        if axes:
            shapes[value.name] = axes
            firsts.append(axes[0])

    # The batch size is the first named one in front, or else 1
    named = [first for first in firsts if isinstance(first, str)]
    batch: int | str = named[0] if named else 1
    if batch not in firsts:
        return {}
    moved = {}
    for name, axes in shapes.items():
        size = batch if batch in axes else 1
        is_first = isinstance(axes[0], str) or axes[0] == size
        if not is_first and axes.count(size) == 1:
            moved[name] = axes.index(size)
    return moved


def _axes(value: onnx.ValueInfoProto) -> list[int | str]:
    """Return the size of each axis of a tensor; for a free size its name, or `?` without one."""
    axes: list[int | str] = []
    for dim in value.type.tensor_type.shape.dim:
        if dim.dim_value > 0:
            axes.append(dim.dim_value)
        else:
            axes.append(dim.dim_param or "?")
    return axes


def move_inputs(model: ir.Model, axes: Mapping[str, int]) -> None:
    """Move the batch axis of inputs to the front, in place.

    Args:
        axes: the result of `find_inputs`.
    """
    for value in model.graph.inputs:
        axis = axes.get(str(value.name))
        if axis is None:
            continue
        dims = list(value.shape or ())
        moved = ir.Value(name=f"{value.name}__batch_inside")
        value.replace_all_uses_with(moved)
        order = [*range(1, axis + 1), 0, *range(axis + 1, len(dims))]
        node = ir.node("Transpose", [value], {"perm": order}, outputs=[moved], name=moved.name)
        model.graph.insert_before(model.graph[0], node)
        value.shape = ir.Shape([dims.pop(axis), *dims])


def move_outputs(network: Network, samples: SampleArray) -> Network:
    """Return the network with the batch axis of its outputs moved to the front.

    An output stays if runs with 2 and 3 samples do not show its batch axis.

    Args:
        samples: network inputs [n, ...], at least one.
    """
    run = _find_runner(network, samples)
    if run is None:
        return network

    # Find the axis of each output that grows with the number of samples
    few = run(samples[[0] * SIZES[0]])
    more = run(samples[[0] * SIZES[1]])
    names = output_names(network.proto.graph)
    axes = []
    moved = {}
    passes = []
    for name, one, other in zip(names, few, more, strict=True):
        axis = _find_axis(one, other)
        axes.append(axis)
        if axis:
            moved[name] = axis
            passes.append(partial(_move_output, name=name, axis=axis, rank=one.ndim))
    if not moved:
        return network

    # Move the axes in the graph and in what the original returns
    proto = rewrite(copy.deepcopy(network.proto), passes)

    def predict(batch: SampleArray) -> Outputs:
        outputs = []
        for values, axis in zip(network.predict(batch), axes, strict=True):
            outputs.append(np.moveaxis(values, axis, 0))
        return outputs

    in_front = in_full_batches(predict, read_contract(network.proto.graph).batch)
    return replace(network, proto=proto, predict=in_front, moved=network.moved | moved)


def _find_runner(network: Network, samples: SampleArray) -> Predict | None:
    """Return a function that runs several samples at once, or None.

    A network whose batch size is fixed at 1, such as a text reader that returns [steps, 1,
    classes], is run with a free batch axis. Returns None if that run fails, if all outputs of such
    a network begin with an axis of size 1, and for other fixed batch sizes.
    """
    batch = read_contract(network.proto.graph).batch
    if batch is None:
        return network.predict
    if batch != 1:
        return None
    outputs = network.predict(samples[:1])
    if all(values.shape[:1] == (1,) for values in outputs):
        return None
    with suppress(Exception):  # ONNX Runtime raises a dozen types
        run = open_runner(declare_free(network.proto))
        for size in SIZES:
            run(samples[[0] * size])
        return run
    return None


def _find_axis(few: NDArray[Any], more: NDArray[Any]) -> int:
    """Return the axis of size 2 in `few` and 3 in `more`; 0 if none or several match."""
    if few.ndim != more.ndim:
        return 0
    sizes = list(zip(few.shape, more.shape, strict=True))
    if sizes.count(SIZES) != 1:
        return 0
    return sizes.index(SIZES)


def _move_output(model: ir.Model, name: str, axis: int, rank: int) -> None:
    inner = f"{name}__batch_inside"
    order = list(range(rank))
    order.insert(0, order.pop(axis))
    node = end_with(model, name, inner, "Transpose", inner, perm=order)
    node.outputs[0].shape = None  # `batch_axis.fix_sizes` sets all shapes later
