"""Assembles ONNX networks from their nodes."""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from numpy.typing import ArrayLike
from onnx import TensorProto, helper, numpy_helper

Sizes = Sequence[int | str | None]


def assemble(
    nodes: Sequence[onnx.NodeProto],
    takes: Mapping[str, Sizes],
    gives: Mapping[str, Sizes | None],
    constants: Mapping[str, ArrayLike],
    opset: int = 17,
    kinds: Mapping[str, int] | None = None,
) -> onnx.ModelProto:
    """Return a network; inputs are float32 unless `kinds` names another type."""
    kinds = kinds or {}
    graph = helper.make_graph(
        nodes,
        "network",
        [
            helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), sizes)
            for name, sizes in takes.items()
        ],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, sizes) for n, sizes in gives.items()],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
