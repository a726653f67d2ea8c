"""Finds attention in ONNX graphs: its matrix products, its masks, and the nodes around it.

Attention multiplies computed tensors. The product of queries and keys reaches a Softmax, whose
result is multiplied by values (Vaswani et al., "Attention Is All You Need", NeurIPS 2017).
"""

from collections.abc import Callable, Collection, Iterable

import numpy as np
import onnx
from onnx import numpy_helper

from resnet8ptq.graph.embeddings import find_tables
from resnet8ptq.graph.layers import LAYERS, fused_activations, short_names, weight_layers
from resnet8ptq.graph.links import Links, find_computed

_WHOLE = ("Attention", "MultiHeadAttention", "GroupQueryAttention")  # attention in one operator
_PRODUCTS = ("MatMul", "Einsum")
_MASKING = ("Add", "Sub", "Mul", "Where")
# The operators between a product and a Softmax: scaling, masks, and moves of values.
_PASSING = {
    *_MASKING,
    "Div",
    "Clip",
    "Min",
    "Max",
    "Tanh",
    "Cast",
    "Identity",
    "Dropout",
    "Reshape",
    "Transpose",
    "Squeeze",
    "Unsqueeze",
    "Expand",
    "Slice",
    "Concat",
}
_MASK = 1e3  # smallest magnitude of a mask's constant; exporters write 1e4 and more

_Step = Callable[[onnx.NodeProto], Iterable[onnx.NodeProto]]


def attention_products(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    """Return the MatMuls of attention, by short names that differ from those of all layers."""
    products = [node for node in find_attention(graph) if node.op_type == "MatMul"]
    if not products:
        return {}
    layers = weight_layers(graph)
    names = short_names([*layers.values(), *products])[len(layers) :]
    by_name = {}
    for name, product in zip(names, products, strict=True):
        # Without the products, the names of the layers may lack further parts, and be equal
        while name in layers:
            name = f"{name}.product"
        by_name[name] = product
    return by_name


def find_attention(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return attention's products and the nodes of `_WHOLE`, in graph order."""
    links = Links(graph)
    outputs = _find_products(graph)

    # Keep the products before and after a Softmax
    products: set[str] = set()
    for softmax in graph.node:
        if softmax.op_type != "Softmax" or not outputs:
            continue
        scores = outputs & _reach(softmax, links.before)
        values = outputs & _reach(softmax, links.after)
        if scores and values:
            products |= scores | values
    attention = []
    for node in graph.node:
        if node.op_type in _WHOLE or not products.isdisjoint(node.output):
            attention.append(node)
    return attention


def _find_products(graph: onnx.GraphProto) -> set[str]:
    """Return the outputs of the nodes of `_PRODUCTS` whose first two inputs are computed."""
    computed = find_computed(graph)
    outputs: set[str] = set()
    for node in graph.node:
        if node.op_type in _PRODUCTS and computed.issuperset(node.input[:2]):
            outputs.update(node.output)
    return outputs


def left_by_attention(graph: onnx.GraphProto, products: bool = False) -> list[onnx.NodeProto]:
    """Return the nodes that stay in float in a network with attention; none without attention.

    Sums and normalizations have outliers in few channels, which leave few 8-bit levels for the
    other channels (Bondarenko et al., "Understanding and Overcoming the Challenges of Efficient
    Transformer Quantization", EMNLP 2021). The nodes of `LAYERS` with a constant second input do
    nearly all of the work. They stay quantized, with the Relu or Clip fused into them, and so do
    embedding tables.

    Args:
        products: whether the nodes of `find_attention` are quantized too.
    """
    attention = find_attention(graph)
    if not attention:
        return []

    # Collect the outputs of layers with weights, and of attention if `products` is set
    computed = find_computed(graph)
    layers = set()
    for node in graph.node:
        if node.op_type in LAYERS and node.input[1] not in computed:
            layers.add(node.output[0])
    if products:
        layers.update(node.output[0] for node in attention)

    # Add the activation functions after them, and embeddings
    quantized = set(layers)
    for node in fused_activations(graph):
        if node.input[0] in layers:
            quantized.add(node.output[0])
    for table in find_tables(graph):
        quantized.add(table.output[0])
    return [node for node in graph.node if quantized.isdisjoint(node.output)]


def stretched_by_masks(graph: onnx.GraphProto) -> dict[str, list[onnx.NodeProto]]:
    """Return the producer and the readers of each tensor that a mask stretches, by tensor name.

    A mask usually adds -10,000 or less to some scores before a Softmax. In 8 bits, all unmasked
    scores would then share one or two levels.
    """
    links = Links(graph)
    large = _large_constants(graph)
    before: set[str] = set()
    for node in graph.node:
        if node.op_type == "Softmax":
            before |= _reach(node, links.before)

    # Follow each constant to the Softmax
    stretched: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        taken = {*node.input} & (large | stretched.keys())
        # A large constant counts as a mask only in an operator that masks
        passes = not taken.isdisjoint(stretched) or node.op_type in _MASKING
        if taken and passes and node.output[0] in before:
            stretched[node.output[0]] = [node, *links.after(node)]
    return stretched


def say_full_mask(graph: onnx.GraphProto, undefined: Collection[str]) -> str:
    """Return a message about a mask that hides a whole row, with its mend; empty if none does.

    Padding may hide a whole row. A Softmax over -inf alone is NaN. The network may ignore such a
    row, but calibration finds no range of a tensor with NaN.

    Args:
        undefined: names of the tensors that hold NaN.
    """
    for node in graph.node:
        if node.op_type != "Softmax":
            continue
        if node.output[0] in undefined and node.input[0] not in undefined:
            return (
                f"Softmax {node.name or node.output[0]} is NaN where its mask is -inf for a whole "
                "row: try an export whose mask has a finite number, such as -10000"
            )
    return ""


def _reach(start: onnx.NodeProto, step: _Step) -> set[str]:
    """Return the first outputs of the nodes that are reached from `start`.

    A path passes through the operators of `_PASSING`, and ends with the first other operator.

    Args:
        step: returns the nodes before or after a node.
    """
    reached: set[str] = set()
    waiting = [*step(start)]
    while waiting:
        node = waiting.pop()
        if node.output[0] in reached:
            continue
        reached.add(node.output[0])
        if node.op_type in _PASSING:
            waiting += step(node)
    return reached


def _large_constants(graph: onnx.GraphProto) -> set[str]:
    """Return the names of the constants that may be masks, from initializers and constant nodes."""
    large = {tensor.name for tensor in graph.initializer if _is_large(tensor)}
    for node in graph.node:
        if node.op_type not in ("Constant", "ConstantOfShape"):
            continue
        for item in node.attribute:
            if item.HasField("t") and _is_large(item.t):
                large.add(node.output[0])
    return large


def _is_large(tensor: onnx.TensorProto) -> bool:
    values = numpy_helper.to_array(tensor)
    floating = np.issubdtype(values.dtype, np.floating) and values.size > 0
    return bool(floating and np.abs(values).max() >= _MASK)
