"""The memory of an ONNX graph's tensors, from their shapes."""

import math
from collections.abc import Iterable

import onnx
from onnx import helper

from resnet8ptq.core import memory
from resnet8ptq.graph.links import Links, find_last_readers, input_names, inputs_of
from resnet8ptq.graph.shapes import infer_shapes


def tensor_bytes(proto: onnx.ModelProto, length: int | None = None) -> dict[str, int]:
    """Return the bytes of the inputs and of each computed tensor, by name.

    A size that is not known counts as 1. Tensors with an unknown number of axes and tensors of
    inner graphs are left out.

    Args:
        length: the size of the inputs' free axes after the batch, such as the number of tokens;
            None if it is not known.
    """
    graph = infer_shapes(proto, length)
    constants = Links(graph).constants
    sizes = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        kind = value.type.tensor_type
        if kind.HasField("shape") and value.name not in constants:
            count = math.prod(max(1, axis.dim_value) for axis in kind.shape.dim)
            sizes[value.name] = helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize * count
    return sizes


def live_bytes(proto: onnx.ModelProto, length: int | None = None) -> int:
    """Return the peak memory of live tensors, in bytes; for `length` see `tensor_bytes`.

    Nodes run in graph order, and a tensor is freed after its last reader. Constants and tensors of
    inner graphs do not count.
    """
    sizes = tensor_bytes(proto, length)
    last = find_last_readers(proto.graph)

    def total(names: Iterable[str]) -> int:
        return sum(sizes.get(name, 0) for name in names)

    # Add a node's outputs, then free the tensors without a later reader
    live = total(input_names(proto.graph))
    peak = live
    for index, node in enumerate(proto.graph.node):
        live += total(node.output)
        peak = max(peak, live)
        for name in {*inputs_of(node), *node.output}:
            if last.get(name, -1) <= index:
                live -= sizes.get(name, 0)
    return peak


def samples_at_once(proto: onnx.ModelProto, length: int | None = None) -> int:
    """Return the largest batch of a network within the memory budget; at least 1.

    Frameworks need up to four times `live_bytes`, because allocators grow by doubling, and kernels
    copy their inputs into another layout.
    """
    return memory.fitting(4 * live_bytes(proto, length), memory.budget())
