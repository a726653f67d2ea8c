"""Converts a network from float16, bfloat16 or float64 to float32.

Every float16 and bfloat16 number is a float32 number, so such weights keep their values. The
outputs differ from those of the file by the rounding of the narrower of the two types.
"""

from collections.abc import Collection
from functools import partial

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from resnet8ptq.graph.layers import LAYERS, RECURRENT
from resnet8ptq.graph.links import find_all
from resnet8ptq.graph.passes import input_of, nodes_of, replace_node, rewrite
from resnet8ptq.graph.shapes import infer_shapes
from resnet8ptq.models.contract import INPUT_DTYPES, read_contract
from resnet8ptq.models.gates.onnx import read_constant

DTYPES = (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
# Attributes that hold a dtype: in Cast, EyeLike, RandomNormal, HannWindow, LayerNormalization and
# Attention.
_SETTINGS = ("to", "dtype", "output_datatype", "stash_type", "softmax_precision")


def find_dtype(proto: onnx.ModelProto) -> int | None:
    """Return the first type of `DTYPES` in which a layer has its weights, inner graphs included.

    Without such a layer, the inputs decide: the result is the first of their types that is in
    `DTYPES` and that samples cannot have, such as float64. Returns None if neither exists.
    """
    for dtype in DTYPES:
        if _has_layers(proto, dtype):
            return int(dtype)
    for tensor in read_contract(proto.graph).inputs:
        if tensor.dtype in INPUT_DTYPES:
            continue
        for dtype in DTYPES:
            if tensor.dtype == _numpy_name(dtype):
                return int(dtype)
    return None


def _numpy_name(dtype: int) -> str:
    return helper.tensor_dtype_to_np_dtype(dtype).name


def _has_layers(proto: onnx.ModelProto, dtype: int) -> bool:
    """Return whether a layer has weights of a type, perhaps moved by nodes such as Transpose."""
    narrow: set[str] = set()  # the tensors of this type, which depend on constants only
    for tensor in find_all(proto, TensorProto):
        if tensor.data_type == dtype:
            narrow.add(tensor.name)

    # Follow the constants through nodes that move them, up to a layer
    for node in find_all(proto, onnx.NodeProto):
        if node.op_type in (*LAYERS, *RECURRENT):
            if narrow.intersection(node.input[1:2]):
                return True
        elif node.op_type == "Constant":
            value = read_constant(node)
            if value is not None and value.data_type == dtype:
                narrow.update(node.output)
        elif node.op_type != "Cast" and node.input and node.input[0] in narrow:
            narrow.update(node.output)  # the node moves constants, such as Transpose
    return False


def to_float32(proto: onnx.ModelProto, dtype: int) -> onnx.ModelProto:
    """Return the model with float32 in place of `dtype`, in constants, declarations and attributes.

    Casts that no longer change a type are removed, see `_drop_casts`. `proto` must not be used
    afterwards.
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

    # Drop the Casts that no longer change a type
    inferred = infer_shapes(proto)
    floats = set()
    for value in (*inferred.input, *inferred.value_info, *inferred.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            floats.add(value.name)
    return rewrite(proto, [partial(_drop_casts, floats=floats)])


def _drop_casts(model: ir.Model, floats: Collection[str]) -> None:
    """Remove the Casts of the tensors `floats` to float32, except in inner graphs.

    A Cast from an input, a constant or an output to an output stays, because both names must stay.

    Args:
        floats: names of float32 tensors.
    """
    for node in nodes_of(model, "Cast"):
        value = input_of(node, 0)
        [output] = node.outputs
        if node.attributes.get_int("to", 0) != TensorProto.FLOAT or value.name not in floats:
            continue
        # The names of inputs, constants and outputs must stay, so a Cast between two of them stays
        keeps_name = value.producer() is None or value.is_graph_output()
        if not output.is_graph_output() or not keeps_name:
            replace_node(node, value)
