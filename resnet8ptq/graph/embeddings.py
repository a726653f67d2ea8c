"""Finds embedding tables, whose rows a Gather looks up, and rounds the rows to 8 bits.

A table may hold most of the weights of a small text network, and each sample reads few rows. The
rows are therefore stored in 8 bits and dequantized after the lookup. In the QDQ format, ONNX
Runtime would dequantize the whole table for every batch.
"""

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from resnet8ptq.graph.layers import attribute
from resnet8ptq.graph.links import Links

_LEAST = 1e-30  # rows of smaller values count as zeros, so that no scale underflows


def find_tables(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return each Gather of computed indices from a constant float32 table [rows, width]."""
    constants = Links(graph).constants
    lookups = []
    for node in graph.node:
        if node.op_type != "Gather" or attribute(node, "axis", 0) != 0:
            continue
        table, indices = node.input
        if table in constants and indices not in constants and _is_table(constants[table]):
            lookups.append(node)
    return lookups


def _is_table(tensor: TensorProto) -> bool:
    """Return whether a tensor is float32, with two axes larger than 1 and no others."""
    is_float = tensor.data_type == TensorProto.FLOAT
    return is_float and len(tensor.dims) == 2 and min(tensor.dims) > 1


def find_tied(graph: onnx.GraphProto) -> list[tuple[onnx.NodeProto, onnx.NodeProto]]:
    """Return each table's Gather with each product whose weights equal the table or its transpose.

    Many text networks tie their embedding to their last product. Table and product are rounded
    separately, so a quantized file stores the weights twice.
    """
    constants = Links(graph).constants
    products = [node for node in graph.node if node.op_type in ("Gemm", "MatMul")]
    tied = []
    for table in find_tables(graph):
        rows = constants[table.input[0]]
        for product in products:
            weights = constants.get(product.input[1])
            if weights is not None and _is_same(rows, weights):
                tied.append((table, product))
    return tied


def _is_same(one: TensorProto, other: TensorProto) -> bool:
    """Return whether two matrices are equal, or transposes of each other."""
    if sorted(one.dims) != sorted(other.dims):
        return False
    values = numpy_helper.to_array(one)
    others = numpy_helper.to_array(other)
    return np.array_equal(values, others) or np.array_equal(values, others.T)


def round_rows(
    values: NDArray[np.float32], axes: tuple[int, ...] = (1,)
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return values as int8 levels from -127 to 127, and scales, which broadcast to the levels.

    Args:
        axes: values along these axes share a scale; by default, the values of a row.

    >>> levels, scale = round_rows(np.array([[127, -1], [0, 0.5]], np.float32))
    >>> levels.tolist(), scale[0].tolist()
    ([[127, -1], [0, 127]], [1.0])
    """
    largest = np.abs(values).max(axis=axes, keepdims=True)
    scale = np.where(largest > _LEAST, largest / 127, 1).astype(np.float32)
    return np.rint(values / scale).astype(np.int8), scale
