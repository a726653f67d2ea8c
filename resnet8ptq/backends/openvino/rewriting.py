"""Passes over QDQ graphs where OpenVINO's result would be wrong or computed in float.

Each fault was measured with OpenVINO 2026.4.1 against ONNX Runtime, on the same file and samples.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import ArrayLike
from onnx import numpy_helper

from resnet8ptq.graph import passes
from resnet8ptq.graph.passes import Writer, input_of, producer_of, replace_node, store, values_of
from resnet8ptq.graph.shapes import find_sizes

_POOL = "GlobalAveragePool"
_REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin")

Step = tuple[str, ArrayLike]  # an operator and its constant operand


def avoid_faults(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model without the patterns that OpenVINO computes wrongly or in float.

    The model computes the same up to rounding. `proto` must not be used afterwards.
    """
    # Only means need the sizes, which take time to infer
    sizes: Mapping[str, Sequence[int]] = {}
    if any(node.op_type in (_POOL, "ReduceMean") for node in proto.graph.node):
        sizes = find_sizes(proto)
    return passes.rewrite(
        proto,
        [
            _avoid_unit_scales,
            partial(_sum_signals, sizes=sizes),
            _pad_before_pools,
            _keep_reduced_axes,
            _pad_with_zeros,
            passes.remove_unused,
        ],
    )


def _avoid_unit_scales(model: ir.Model) -> None:
    """Raise activation scales of exactly 1 to the next larger float32.

    OpenVINO removes a multiplication by 1, so it does not recognize the dequantization and computes
    the next layer in float. Pixels 0..255 in dtype=u8s8 have that scale.
    """
    above = np.nextafter(np.float32(1), np.float32(2))
    for node in model.graph:
        if node.op_type != "DequantizeLinear" or input_of(node, 0).is_initializer():
            continue
        scale = input_of(node, 1)
        if scale.is_initializer() and np.array_equal(values_of(scale), np.float32(1)):
            store(scale, numpy_helper.from_array(above))


def _keep_reduced_axes(model: ir.Model) -> None:
    """Let float reductions keep their axes, if these are constant; a Squeeze then drops the axes.

    OpenVINO applies the scales of a matrix product only after the reduction. If the reduction drops
    an axis, as the mean over a text's tokens does, outputs are wrong by up to the whole range.
    """
    for node in list(model.graph):
        if node.op_type not in _REDUCTIONS or node.attributes.get_int("keepdims", 1) == 1:
            continue
        axes = _find_axes(node)
        if axes and not _is_rounded(node):
            write = Writer(node)
            name = str(node.outputs[0].name)
            kept: dict[str, Any] = {**node.attributes, "keepdims": 1}
            whole = write(node.op_type, node.inputs, f"{name}__inner", **kept)
            replace_node(node, _chain(write, value=whole, steps=[("Squeeze", axes)], output=name))


def _sum_signals(model: ir.Model, sizes: Mapping[str, Sequence[int]]) -> None:
    """Replace each mean of a tensor with three axes by a sum and a product.

    The axes and their sizes must be constant; other means stay.

    OpenVINO computes global pools of signals [N, channels, time] and means of tokens wrongly, by up
    to 145 of 256 levels. This happens after a convolution; in 8 bits it also happens after other
    operators, if the batch is larger than the second axis. Sums that drop the axis before the
    division are right, and so are pools of pictures, with four axes.

    Args:
        sizes: the shapes of the tensors, see `find_sizes`.
    """
    for node in list(model.graph):
        if node.op_type not in (_POOL, "ReduceMean"):
            continue

        # Find the number of averaged values
        shape = sizes.get(str(input_of(node, 0).name), [])
        axes = [2] if node.op_type == _POOL else _find_axes(node)
        if len(shape) != 3 or not axes:
            continue
        count = math.prod(shape[axis] for axis in axes)
        if count == 0:  # a size is unknown
            continue

        # Drop the axes before the division
        steps: list[Step] = [("ReduceSum", axes), ("Squeeze", axes), ("Mul", np.float32(1 / count))]
        keeps_axes = node.attributes.get_int("keepdims", 1)
        if node.op_type == _POOL or keeps_axes:
            steps.append(("Unsqueeze", axes))
        name = str(node.outputs[0].name)
        replace_node(node, _chain(Writer(node), value=input_of(node, 0), steps=steps, output=name))


def _pad_before_pools(model: ir.Model) -> None:
    """Replace the padding of average pools that count it, torch's default, by Pad nodes.

    If zero is not level 0, OpenVINO pads rounded values with a wrong value (SQNR -8 dB). OpenVINO
    would fuse the Pad with the pool again, so an axis is inserted before the Pad and removed after
    it.
    """
    for node in model.graph:
        pads = node.attributes.get_ints("pads", ())
        counted = node.attributes.get_int("count_include_pad", 0)
        if node.op_type == "AveragePool" and counted and any(pads):
            del node.attributes["pads"]

            # The batch, the inserted axis and the channels get no padding
            ends = np.reshape(pads, (2, -1))  # [begin and end, axes]
            widths = np.insert(ends, 0, np.zeros((3, 1)), axis=1).reshape(-1)
            steps: list[Step] = [("Unsqueeze", [1]), ("Pad", widths), ("Squeeze", [1])]
            name = f"{node.outputs[0].name}__padded"
            node.replace_input_with(
                0, _chain(Writer(node), value=input_of(node, 0), steps=steps, output=name)
            )


def _find_axes(node: ir.Node) -> list[int]:
    """Return the axes of a reduction; empty if they are not constant, or not named (all axes)."""
    if len(node.inputs) > 1:  # since opset 18, and for ReduceSum since 13
        axes = node.inputs[1]
        if axes is None or not axes.is_initializer():
            return []
        return list(values_of(axes))
    return list(node.attributes.get_ints("axes", ()))


def _is_rounded(node: ir.Node) -> bool:
    """Return whether a node's first input is rounded to levels."""
    producer = producer_of(node, 0)
    return producer is not None and producer.op_type == "DequantizeLinear"


def _pad_with_zeros(model: ir.Model) -> None:
    """Rewrite Pads of rounded values so that OpenVINO pads with the right value.

    If zero is not level 0, OpenVINO pads with a wrong value, up to 129 levels off, in two cases: on
    the second axis, as in [N, time, channels]; and if the tensors before and after the Pad share
    the constant of their scale. The pass moves the second axis, and copies these constants.
    """
    padding = [node for node in model.graph if node.op_type == "Pad" and _pads_levels(node)]
    if padding:
        _copy_scales(model.graph)

    # Insert an axis, so that the second axis becomes the third
    for node in padding:
        widths = values_of(input_of(node, 1)).reshape(2, -1)
        if widths.shape[1] > 1 and widths[:, 1].any():
            write = Writer(node)
            name = str(node.outputs[0].name)
            inside = _chain(
                write,
                value=input_of(node, 0),
                steps=[("Unsqueeze", [1])],
                output=f"{name}__outside",
            )
            wider = write.constant(f"{name}__pads", np.insert(widths, 1, 0, axis=1).reshape(-1))
            operands = [inside, wider, *node.inputs[2:]]  # the value that pads stays
            mode: dict[str, Any] = {**node.attributes}
            padded = write("Pad", operands, f"{name}__inner", **mode)
            replace_node(node, _chain(write, value=padded, steps=[("Squeeze", [1])], output=name))


def _pads_levels(node: ir.Node) -> bool:
    """Return whether `_pad_with_zeros` must rewrite a Pad, or copy the scales around it.

    The Pad then has the mode constant, a rounded input, and constant widths for all axes.
    """
    if node.attributes.get_string("mode", "constant") != "constant" or not _is_rounded(node):
        return False
    return input_of(node, 1).is_initializer() and len(node.inputs) < 4


def _copy_scales(graph: ir.Graph) -> None:
    """Give each rounded tensor its own constants for scale and zero point."""
    for quantize in list(graph):
        if quantize.op_type != "QuantizeLinear":
            continue
        [output] = quantize.outputs
        for index, shared in enumerate(quantize.inputs[1:], 1):
            assert shared is not None
            copied = Writer(quantize).constant(f"{output.name}__{index}", values_of(shared))
            for node in (quantize, *output.consumers()):
                node.replace_input_with(index, copied)


def _chain(write: Writer, value: ir.Value, steps: Sequence[Step], output: str) -> ir.Value:
    """Apply the steps to a tensor, in sequence; return the last output, named `output`."""
    for number, (kind, operand) in enumerate(steps, 1):
        made = output if number == len(steps) else f"{output}__{number}"
        value = write(kind, [value, write.constant(f"{made}__{kind}__operand", operand)], made)
    return value
