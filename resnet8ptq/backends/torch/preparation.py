"""Prepares a network for every quantizer of torch modules, before its tensors are calibrated."""

from typing import Any

import onnx

from resnet8ptq.graph.embeddings import find_tables
from resnet8ptq.graph.layers import integer_nodes, value_pads
from resnet8ptq.graph.torch_module import quantize_tables
from resnet8ptq.precision.plan import Selection, find_float_nodes


def prepare(module: Any, proto: onnx.ModelProto, selection: Selection) -> list[str]:
    """Store the embeddings of a module in 8 bits, and return the nodes that are not quantized.

    These are the nodes that stay in float, the embeddings, whose rows would be rounded a second
    time with one scale for all, those that take or make integers, whose tensors torch's
    observers would quantize as if they were floats, and Pads with another value than 0: torch gives
    a padded tensor the scale of the tensor before, which clips the value.

    Args:
        module: of `load_torch_module`; changed in place.
        proto: the model that it comes from.

    Returns:
        Names of the ONNX nodes.
    """
    skipped = find_float_nodes(proto.graph, selection)
    tables = [node.name for node in find_tables(proto.graph) if node.name not in skipped]
    quantize_tables(module, tables)
    return [*dict.fromkeys((*skipped, *tables, *integer_nodes(proto), *value_pads(proto.graph)))]
