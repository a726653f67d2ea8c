"""Infers the shapes and types of a graph's tensors, without the values of large initializers.

ONNX's inference takes and returns the whole model as bytes. For a network of 400 MB, that takes
several seconds and three copies.
"""

import math

import onnx

_SMALL = 128  # numbers in the largest constant that keeps its values; shapes have fewer


def infer_shapes(proto: onnx.ModelProto, length: int | None = None) -> onnx.GraphProto:
    """Return a copy of the graph with inferred shapes; large initializers lose their values.

    Args:
        length: the size of the inputs' free axes after the batch; None leaves these axes free.
    """
    light = onnx.ModelProto(
        ir_version=proto.ir_version, opset_import=proto.opset_import, functions=proto.functions
    )
    graph = light.graph
    whole = proto.graph
    graph.node.extend(whole.node)
    graph.input.extend(whole.input)
    graph.output.extend(whole.output)
    graph.value_info.extend(whole.value_info)
    graph.sparse_initializer.extend(whole.sparse_initializer)

    # Inference reads the values of shapes and axes only, which are small
    for tensor in whole.initializer:
        if math.prod(tensor.dims) <= _SMALL:
            graph.initializer.append(tensor)
        else:
            graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    if length is not None:
        for value in graph.input:
            for axis in value.type.tensor_type.shape.dim[1:]:
                axis.dim_value = axis.dim_value or length
    return onnx.shape_inference.infer_shapes(light).graph


def find_sizes(proto: onnx.ModelProto) -> dict[str, list[int]]:
    """Return the sizes of each tensor, by name; a free size is 0.

    A tensor of unknown shape has an empty list, like a scalar, or is missing.
    """
    graph = infer_shapes(proto)
    shapes = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        shapes[value.name] = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    for tensor in graph.initializer:
        shapes[tensor.name] = list(tensor.dims)
    return shapes
