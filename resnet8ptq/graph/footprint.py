"""How many bytes the tensors of an ONNX graph take, for one sample, as its shapes say."""

import math

import onnx

from resnet8ptq.core import memory


def tensor_bytes(proto: onnx.ModelProto) -> dict[str, int]:
    """Return the bytes of the input and of each tensor that a node makes, by name.

    A free axis counts as one sample. Tensors whose shape is not known are left out.
    """
    graph = onnx.shape_inference.infer_shapes(proto).graph
    constants = {tensor.name for tensor in graph.initializer}
    return {
        value.name: _size(value.type.tensor_type)
        for value in (*graph.input, *graph.value_info, *graph.output)
        if value.type.tensor_type.HasField("shape") and value.name not in constants
    }


def live_bytes(proto: onnx.ModelProto) -> int:
    """Return the bytes of the tensors that must be held at once, where they are most.

    Nodes run in their order; a tensor is let go behind the last node that takes it.
    """
    sizes, nodes = tensor_bytes(proto), proto.graph.node
    last = {name: place for place, node in enumerate(nodes) for name in node.input}
    last |= {value.name: len(nodes) for value in proto.graph.output}
    held = most = sum(sizes.get(value.name, 0) for value in proto.graph.input)
    for place, node in enumerate(nodes):
        held += sum(sizes.get(name, 0) for name in node.output)
        most = max(most, held)
        done = {name for name in (*node.input, *node.output) if last.get(name, -1) <= place}
        held -= sum(sizes.get(name, 0) for name in done)
    return most


def samples_at_once(proto: onnx.ModelProto) -> int:
    """Return how many samples a network can run at once within the memory budget.

    Frameworks hold up to four times what is needed: their allocators grow by doubling, and kernels
    copy what they take into an order of their own.
    """
    return memory.fitting(4 * live_bytes(proto), memory.budget())


def _size(tensor: onnx.TypeProto.Tensor) -> int:
    width = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).itemsize
    return width * math.prod(max(1, axis.dim_value) for axis in tensor.shape.dim)
