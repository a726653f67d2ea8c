"""Reads a network that computes in float16, bfloat16 or float64 as float32.

Every number of 16 bits is a float32 number, so such weights keep their values. The outputs differ
from the file's by the rounding of the narrower type.
"""

from collections.abc import Collection
from functools import partial

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, numpy_helper

from resnet8ptq.graph.layers import LAYERS, RECURRENT
from resnet8ptq.graph.links import find_all
from resnet8ptq.graph.passes import input_of, replace_node, rewrite
from resnet8ptq.graph.shapes import infer_shapes
from resnet8ptq.models.gates.onnx import read_constant

DTYPES = (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
# Attributes that hold a dtype, of Cast, EyeLike, RandomNormal, HannWindow, LayerNormalization and
# Attention.
_SETTINGS = ("to", "dtype", "output_datatype", "stash_type", "softmax_precision")


def find_dtype(proto: onnx.ModelProto) -> int | None:
    """Return the type of `DTYPES` in which a layer has its weights, inner graphs included."""
    return next((dtype for dtype in DTYPES if _has_layers(proto, dtype)), None)


def _has_layers(proto: onnx.ModelProto, dtype: int) -> bool:
    narrow = {t.name for t in find_all(proto, TensorProto) if t.data_type == dtype}
    for node in find_all(proto, onnx.NodeProto):
        if node.op_type in (*LAYERS, *RECURRENT):
            if narrow.intersection(node.input[1:2]):
                return True
        elif node.op_type == "Constant":
            value = read_constant(node)
            if value is not None and value.data_type == dtype:
                narrow.update(node.output)
        elif node.op_type != "Cast" and narrow.issuperset(node.input[:1] or [""]):
            narrow.update(node.output)  # such as Transpose of a constant
    return False


def to_float32(proto: onnx.ModelProto, dtype: int) -> onnx.ModelProto:
    """Return the model with float32 in place of a type: constants, inputs, outputs and casts.

    `proto` must not be used afterwards.
    """
    for tensor in list(find_all(proto, TensorProto)):
        if tensor.data_type == dtype:
            values = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    for kind in (onnx.TypeProto.Tensor, onnx.TypeProto.SparseTensor):
        for declared in find_all(proto, kind):
            if declared.elem_type == dtype:
                declared.elem_type = TensorProto.FLOAT
    for setting in find_all(proto, onnx.AttributeProto):
        if setting.name in _SETTINGS and setting.i == dtype:
            setting.i = TensorProto.FLOAT
    inferred = infer_shapes(proto)
    values = (*inferred.input, *inferred.value_info, *inferred.output)
    floats = {v.name for v in values if v.type.tensor_type.elem_type == TensorProto.FLOAT}
    return rewrite(proto, [partial(_drop_casts, floats=floats)])


def _drop_casts(model: ir.Model, floats: Collection[str]) -> None:
    """Remove the Casts from float32 to float32; inner graphs keep theirs.

    Args:
        floats: the names of the float32 tensors.
    """
    for node in [node for node in model.graph if node.op_type == "Cast"]:
        value, [output] = input_of(node, 0), node.outputs
        to_float = node.attributes.get_int("to", 0) == TensorProto.FLOAT
        keeps_name = value.producer() is None or value.is_graph_output()
        if to_float and value.name in floats and not (output.is_graph_output() and keeps_name):
            replace_node(node, value)
