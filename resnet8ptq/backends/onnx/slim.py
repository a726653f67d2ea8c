"""`slim`: removes the parts of an ONNX file that inference does not read."""

import itertools
import string
from collections import defaultdict

import numpy as np
import onnx
from onnx import helper, numpy_helper

# Defaults of window attributes, which the operators' schemas give only in words.
_WINDOW_DEFAULTS = {"strides": 1, "dilations": 1, "pads": 0}


def slim(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy without descriptions, long names, unused opsets, defaults and duplicates.

    Inputs and outputs keep their names. `contract.check_same` checks that the results are the same.
    """
    parts = {
        name: getattr(proto.graph, name) for name in ("node", "initializer", "input", "output")
    }
    graph = onnx.GraphProto(name="g", **parts)
    _merge_constants(graph)
    _rename(graph)
    versions = {opset.domain: opset.version for opset in proto.opset_import}
    for node in graph.node:
        _drop_defaults(node, versions[node.domain])
    used = {node.domain for node in graph.node}
    opsets = [opset for opset in proto.opset_import if opset.domain in used]
    return onnx.ModelProto(ir_version=proto.ir_version, opset_import=opsets, graph=graph)


def _merge_constants(graph: onnx.GraphProto) -> None:
    """Merge equal constants, in the compact encoding, and reduce equal zero points to one.

    QLinearConv takes one zero point for all channels, or one for each.
    """
    used = {name for node in graph.node for name in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in kept}
    for node in graph.node:
        if node.op_type == "QLinearConv":
            zero_points = constants[node.input[5]]
            if zero_points.ndim == 1 and (zero_points == zero_points[0]).all():
                constants[node.input[5]] = zero_points[0]
    first: dict[tuple[str, tuple[int, ...], bytes], str] = {}
    names = {
        name: first.setdefault((str(values.dtype), values.shape, values.tobytes()), name)
        for name, values in constants.items()
    }
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    del graph.initializer[:]
    graph.initializer.extend(
        numpy_helper.from_array(np.asarray(constants[name]), name) for name in first.values()
    )


def _drop_defaults(node: onnx.NodeProto, version: int) -> None:
    """Remove attributes whose value is the default."""
    if not onnx.defs.has(node.op_type, node.domain):  # ONNX Runtime's own
        return
    schemas = onnx.defs.get_schema(node.op_type, version, node.domain).attributes
    for attribute in [*node.attribute]:
        schema, value = schemas[attribute.name], helper.get_attribute_value(attribute)
        if attribute.name in _WINDOW_DEFAULTS:
            implied = set(value) <= {_WINDOW_DEFAULTS[attribute.name]}
        elif attribute.name == "kernel_shape":  # the weights have it
            implied = True
        else:
            implied = helper.get_attribute_value(schema.default_value) == value
        if implied and not schema.required:
            node.attribute.remove(attribute)


def _rename(graph: onnx.GraphProto) -> None:
    """Give every inner tensor a short name; remove the names of nodes."""
    fixed = {"", *(value.name for value in [*graph.input, *graph.output])}
    lengths = (itertools.product(string.ascii_letters, repeat=n) for n in itertools.count(1))
    short = map("".join, itertools.chain.from_iterable(lengths))  # a, b, .. Z, aa, ab, ..
    free = filter(lambda name: name not in fixed, short)
    names = defaultdict(lambda: next(free), {name: name for name in fixed})
    for node in graph.node:
        for field in ("name", "doc_string", "metadata_props"):
            node.ClearField(field)
        for group in (node.input, node.output):
            group[:] = [names[name] for name in group]
    for tensor in graph.initializer:
        tensor.name = names[tensor.name]
