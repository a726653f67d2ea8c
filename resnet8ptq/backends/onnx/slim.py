"""Removes the parts of an ONNX file that inference does not read, for the setting `slim`."""

import itertools
import string
from collections.abc import Iterator

import onnx
import onnx_ir
from onnx import helper, numpy_helper

from resnet8ptq.graph.links import find_all

# Defaults of window attributes, which the operators' schemas give only in words.
_WINDOW_DEFAULTS = {"strides": 1, "dilations": 1, "pads": 0}


def slim(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy without descriptions, long names, defaults, and unused or equal constants.

    Inner graphs keep all of their constants. Opsets that no node uses are dropped. Inputs and
    outputs keep their names. The caller compares the outputs of both files, see
    `contract.check_same`.
    """
    graph = onnx.GraphProto(
        name="g",
        node=proto.graph.node,
        initializer=proto.graph.initializer,
        input=proto.graph.input,
        output=proto.graph.output,
    )

    # Remove what protobuf holds and inference does not read
    versions = {opset.domain: opset.version for opset in proto.opset_import}
    nodes = list(find_all(graph, onnx.NodeProto))
    for node in nodes:
        _drop_defaults(node, versions[node.domain])
        for field in ("name", "doc_string", "metadata_props"):
            node.ClearField(field)
    used = {node.domain for node in nodes}
    opsets = [opset for opset in proto.opset_import if opset.domain in used]
    small = onnx.ModelProto(ir_version=proto.ir_version, opset_import=opsets, graph=graph)

    # Merge and rename the tensors
    model = onnx_ir.from_proto(small)
    _merge_constants(model.graph)
    _rename(model.graph)
    written = onnx_ir.to_proto(model)
    for part in find_all(written, onnx.GraphProto):
        del part.value_info[:]  # onnx_ir adds the types of constants
    return written


def _merge_constants(graph: onnx_ir.Graph) -> None:
    """Merge equal constants of a graph, and remove its unused ones.

    First, the zero points of a QLinearConv's channels become one number if they are equal.
    """
    for node in graph:
        if node.op_type == "QLinearConv":
            _reduce_zero_points(graph, node)

    # The first constant with a value replaces all later ones
    first: dict[tuple[str, tuple[int, ...], bytes], onnx_ir.Value] = {}
    for name, value in list(graph.initializers.items()):
        fixed = value.is_graph_output() or value.is_graph_input()
        if not fixed and not value.uses():
            del graph.initializers[name]
            continue
        assert value.const_value is not None
        values = value.const_value.numpy()
        same = first.setdefault((str(values.dtype), values.shape, values.tobytes()), value)
        value.const_value = onnx_ir.from_proto(numpy_helper.from_array(values, name))
        if same is not value and not fixed:
            value.replace_all_uses_with(same)
            del graph.initializers[name]


def _reduce_zero_points(graph: onnx_ir.Graph, node: onnx_ir.Node) -> None:
    """Replace the zero points of a QLinearConv's weights by one number, if all are equal."""
    shared = node.inputs[5]
    assert shared is not None and shared.const_value is not None
    values = shared.const_value.numpy()
    if values.ndim == 1 and (values == values[0]).all():
        name = f"{shared.name}__scalar"
        if name not in graph.initializers:  # layers may share their zero points
            one = onnx_ir.Value(name=name, const_value=onnx_ir.tensor(values[0], name=name))
            graph.register_initializer(one)
        node.replace_input_with(5, graph.initializers[name])


def _drop_defaults(node: onnx.NodeProto, version: int) -> None:
    """Remove attributes whose value is the default, or follows from the weights.

    Attributes that the operator requires stay. Operators that ONNX does not define stay unchanged.

    Args:
        version: the opset version of the node's domain.
    """
    if not onnx.defs.has(node.op_type, node.domain):  # ONNX Runtime's own operators
        return
    schemas = onnx.defs.get_schema(node.op_type, version, node.domain).attributes
    for attribute in [*node.attribute]:
        schema = schemas[attribute.name]
        value = helper.get_attribute_value(attribute)
        # The schema lacks the defaults of windows
        if attribute.name in _WINDOW_DEFAULTS:
            implied = set(value) <= {_WINDOW_DEFAULTS[attribute.name]}
        elif attribute.name == "kernel_shape":  # the shape of the weights implies it
            implied = True
        else:
            implied = helper.get_attribute_value(schema.default_value) == value
        if implied and not schema.required:
            node.attribute.remove(attribute)


def _rename(graph: onnx_ir.Graph) -> None:
    """Give every tensor a short name; inputs and outputs of the graph keep theirs."""
    fixed = [*graph.inputs, *graph.outputs]
    kept = {value.name for value in fixed}
    constants = [*graph.initializers.values()]
    values = [value for value in dict.fromkeys(_values(graph)) if value not in fixed]

    # Free the short names first, which constants may have
    for number, value in enumerate(values):
        value.name = f"renamed {number}"
    names = _short_names()
    for value in values:
        name = next(names)
        while name in kept:
            name = next(names)
        value.name = name
    for value in constants:  # a new name moves a constant to the end
        assert value.name is not None
        graph.initializers.add(graph.initializers.pop(value.name))


def _short_names() -> Iterator[str]:
    """Yield a, b, .. Z, aa, ab, .."""
    for length in itertools.count(1):
        for letters in itertools.product(string.ascii_letters, repeat=length):
            yield "".join(letters)


def _values(graph: onnx_ir.Graph) -> Iterator[onnx_ir.Value]:
    """Yield the tensors of a graph and of its inner graphs, in the order of use; some repeat."""
    yield from graph.inputs
    for node in graph:
        for value in node.inputs:
            if value is not None:
                yield value
        for inner in node.attributes.values():
            if inner.type == onnx_ir.AttributeType.GRAPH:
                yield from _values(inner.as_graph())
        for value in node.outputs:
            if value.name:
                yield value
    yield from [*graph.initializers.values()]
