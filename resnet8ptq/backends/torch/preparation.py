"""Prepares a network for torch's quantizers, before calibration."""

from typing import Any

import onnx

from resnet8ptq.graph.embeddings import find_tables
from resnet8ptq.graph.layers import constant_pads, integer_nodes
from resnet8ptq.graph.torch_constants import quantize_tables
from resnet8ptq.graph.torch_operators import InFloat
from resnet8ptq.precision.plan import Selection, find_float_nodes


def prepare(module: Any, proto: onnx.ModelProto, selection: Selection) -> list[str]:
    """Store a module's embeddings in 8 bits, and return the nodes that torch must not quantize.

    These nodes are:

    - nodes that the settings leave in float, and nodes whose module is an `InFloat`;
    - embeddings, whose rows would be rounded twice;
    - nodes whose first input or an output is not float32, which torch's observers would quantize
      like floats;
    - Pads with a constant that may differ from 0: torch gives the padded tensor the scale of its
      input, which clips the constant.

    Embeddings that stay in float keep their float rows.

    Args:
        module: result of `load_torch_module` for `proto`; changed in place.
    """
    # Nodes that stay in float, and operators of several steps
    skipped = find_float_nodes(proto.graph, selection)
    left = dict.fromkeys(skipped)  # names, in order
    for name, layer in module.named_modules():
        if isinstance(layer, InFloat):
            left[name] = None

    # Embeddings, which are quantized here
    tables = []
    for node in find_tables(proto.graph):
        if node.name not in skipped:
            tables.append(node.name)
    quantize_tables(module, tables)

    # Operators that torch would quantize wrongly
    left |= dict.fromkeys((*tables, *integer_nodes(proto)))
    for node, is_zero in constant_pads(proto.graph):
        if not is_zero:
            left[node.name] = None
    return [*left]
