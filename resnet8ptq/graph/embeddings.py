"""Embedding tables: a Gather of constant rows, stored in 8 bits with a scale for each row.

A table is most of a small text network, and each sample reads few rows. So the rows are stored in 8
bits and dequantized after the lookup. ONNX Runtime's quantizer would dequantize the whole table for
every batch.
"""

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from resnet8ptq.graph.layers import attribute

_LEAST = 1e-30  # of a row's largest value; smaller ones are 0: their scale would underflow


def find_tables(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return each Gather of rows of a constant float table [rows, width]."""
    floats = [t for t in graph.initializer if t.data_type == TensorProto.FLOAT]
    tables = {t.name for t in floats if len(t.dims) == 2 and min(t.dims) > 1}
    constants = {tensor.name for tensor in graph.initializer}
    lookups = []
    for node in graph.node:
        if node.op_type != "Gather" or attribute(node, "axis", 0) != 0:
            continue
        if node.input[0] in tables and node.input[1] not in constants:
            lookups.append(node)
    return lookups


def find_tied(graph: onnx.GraphProto) -> list[tuple[onnx.NodeProto, onnx.NodeProto]]:
    """Return each table's Gather with a product that has the same weights, maybe transposed.

    Text networks tie their embedding to their last product. The two are rounded along other axes,
    so a quantized file stores them twice.
    """
    stored = {tensor.name: tensor for tensor in graph.initializer}
    products = [n for n in graph.node if n.op_type in ("Gemm", "MatMul") and n.input[1] in stored]
    tied = []
    for table in find_tables(graph):
        rows = stored[table.input[0]]
        for product in products:
            weights = stored[product.input[1]]
            if sorted(weights.dims) == sorted(rows.dims) and _is_same(rows, weights):
                tied.append((table, product))
    return tied


def _is_same(one: TensorProto, other: TensorProto) -> bool:
    """Return whether two matrices are equal, or transposes of each other."""
    values = numpy_helper.to_array(one)
    others = numpy_helper.to_array(other)
    return np.array_equal(values, others) or np.array_equal(values, others.T)


def round_rows(
    values: NDArray[np.float32], axes: tuple[int, ...] = (1,)
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return values as int8, and their scales, which broadcast to them.

    Args:
        axes: the values along them share a scale; by default those of a row.

    >>> levels, scale = round_rows(np.array([[127, -1], [0, 0.5]], np.float32))
    >>> levels.tolist(), scale[0].tolist()
    ([[127, -1], [0, 127]], [1.0])
    """
    largest = np.abs(values).max(axis=axes, keepdims=True)
    scale = np.where(largest > _LEAST, largest / 127, 1).astype(np.float32)
    return np.rint(values / scale).astype(np.int8), scale
