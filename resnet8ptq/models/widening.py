"""Widens a network that computes in float16 to float32.

Every float16 number is a float32 number, so the weights keep their values. The operators then round
less, so the outputs differ from the file's by float16's rounding.
"""

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from resnet8ptq.graph.layers import LAYERS, RECURRENT, attribute
from resnet8ptq.graph.pruning import find_all
from resnet8ptq.graph.renaming import rename_inside
from resnet8ptq.graph.shapes import infer_shapes
from resnet8ptq.models.gates.onnx import graph_inputs, read_constant

# Attributes that hold a dtype, of Cast, EyeLike, RandomNormal, HannWindow, LayerNormalization and
# Attention.
_DTYPES = ("to", "dtype", "output_datatype", "stash_type", "softmax_precision")


def has_float16_layers(proto: onnx.ModelProto) -> bool:
    """Return whether a layer has float16 weights, inner graphs included."""
    narrow = {t.name for t in find_all(proto, TensorProto) if t.data_type == TensorProto.FLOAT16}
    for node in find_all(proto, onnx.NodeProto):
        if node.op_type in (*LAYERS, *RECURRENT):
            if narrow.intersection(node.input[1:2]):
                return True
        elif node.op_type == "Constant":
            value = read_constant(node)
            if value is not None and value.data_type == TensorProto.FLOAT16:
                narrow.update(node.output)
        elif node.op_type != "Cast" and narrow.issuperset(node.input[:1] or [""]):
            narrow.update(node.output)  # such as Transpose of a constant
    return False


def widen(proto: onnx.ModelProto) -> None:
    """Make every float16 tensor float32, in place: constants, inputs, outputs and casts."""
    for tensor in list(find_all(proto, TensorProto)):
        if tensor.data_type == TensorProto.FLOAT16:
            values = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    for kind in (onnx.TypeProto.Tensor, onnx.TypeProto.SparseTensor):
        for declared in find_all(proto, kind):
            if declared.elem_type == TensorProto.FLOAT16:
                declared.elem_type = TensorProto.FLOAT
    for setting in find_all(proto, onnx.AttributeProto):
        if setting.name in _DTYPES and setting.i == TensorProto.FLOAT16:
            setting.i = TensorProto.FLOAT
    _drop_casts(proto)


def _drop_casts(proto: onnx.ModelProto) -> None:
    """Remove the Casts from float32 to float32, in place; inner graphs keep theirs."""
    graph = proto.graph
    inferred = infer_shapes(proto)
    values = (*inferred.input, *inferred.value_info, *inferred.output)
    floats = {v.name for v in values if v.type.tensor_type.elem_type == TensorProto.FLOAT}
    outputs = {value.name for value in graph.output}
    fixed = outputs | {value.name for value in graph_inputs(graph)}
    for node in list(graph.node):
        to_float = node.op_type == "Cast" and attribute(node, "to", 0) == TensorProto.FLOAT
        if not to_float or node.input[0] not in floats:
            continue
        if node.output[0] not in outputs:
            graph.node.remove(node)
            rename_inside(graph, node.output[0], node.input[0])
        elif node.input[0] not in fixed:
            graph.node.remove(node)
            rename_inside(graph, node.input[0], node.output[0])
            fixed.add(node.output[0])
