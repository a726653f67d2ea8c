"""Parses an untrusted ONNX file, and refuses one that is unsafe or cannot be quantized.

ONNX Runtime and onnx's version converter read the file only after this check.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper, numpy_helper

from resnet8ptq.core import files
from resnet8ptq.core.errors import ModelError, errors_as
from resnet8ptq.graph.layers import LAYERS, RECURRENT, STORED
from resnet8ptq.graph.links import Links, find_all
from resnet8ptq.graph.shapes import infer_shapes
from resnet8ptq.models.gates import EXPECTS_FP32

MAX_BYTES = 2**31 - 1  # protobuf's limit
MAX_NODES = 200_000  # a node takes at least 2 bytes of a file, and about 100 of memory

ONNX_DOMAINS = ("", "ai.onnx")  # two names of the same domain
SCALER = "Scaler"  # an operator of ai.onnx.ml, which scikit-learn's exports have before the layers
LABELLERS = ("ZipMap", "ArrayFeatureExtractor")  # scikit-learn's exports have them after the layers
_QUANTIZED = re.compile(
    r"QLinear\w+|(Q|Deq|DynamicQ)uantize\w+|\w*Integer\w*|QGemm|QAttention|QOrdered\w+|QMoE"
    r"|QEmbed\w+|MatMulNBits|MatMulBnb4"
)
# Operators of ONNX Runtime's extended and layout optimization levels.
_FUSED = re.compile(r"com\.microsoft (Fused|Nhwc)\w+|com\.microsoft\.nchwc .*", re.DOTALL)
# Operators of ONNX Runtime's domain "com.microsoft" that compute floats from floats. Some of its
# other operators name files (EPContext), functions (PythonOp) or patterns of text (Tokenizer).
_CONTRIBUTED = """
Attention BiasAdd BiasDropout BiasGelu BiasSoftmax BiasSplitGelu CDist ComplexMul ComplexMulConj
ConvTransposeWithDynamicPads CropAndResize DecoderAttention EmbedLayerNormalization ExpandDims
FastGelu GatedRelativePositionBias GatherND Gelu GemmaRotaryEmbedding GridSample GroupNorm
GroupQueryAttention Inverse Irfft IsAllFinite LinearAttention LongformerAttention MaxpoolWithMask
MultiHeadAttention Pad QuickGelu Range RelativePositionBias Rfft RotaryEmbedding SkipGroupNorm
SkipLayerNormalization SkipSimplifiedLayerNormalization SparseToDenseMatMul TorchEmbedding
TransposeMatMul Trilu UnfoldTensor Unique
"""
CONTRIBUTED = frozenset(_CONTRIBUTED.split())
# The operators of other domains that an FP32 file may have.
_OTHERS = {("com.microsoft", name) for name in CONTRIBUTED}
_OTHERS |= {("ai.onnx.ml", name) for name in (SCALER, *LABELLERS)}
# The operators of quantized and optimized files, which also only compute on numbers
_NARROWED = """
DequantizeLinear DynamicQuantizeLSTM DynamicQuantizeMatMul FusedConv FusedGemm FusedMatMul
FusedMatMulActivation GatherBlockQuantized GemmFastGelu MatMulBnb4 MatMulInteger16
MatMulIntegerToFloat MatMulNBits MulInteger NhwcConv NhwcFusedConv NhwcMaxPool QAttention
QEmbedLayerNormalization QGemm QLinearAdd QLinearAveragePool QLinearConcat QLinearConv
QLinearGlobalAveragePool QLinearLeakyRelu QLinearMul QLinearReduceMean QLinearSigmoid QLinearSoftmax
QLinearWhere QuantizeLinear ReduceSumInteger
"""
NARROWED = frozenset(_NARROWED.split())
_NARROW = (
    TensorProto.INT8,
    TensorProto.UINT8,
    TensorProto.INT4,
    TensorProto.UINT4,
    TensorProto.FLOAT8E4M3FN,
    TensorProto.FLOAT8E5M2,
)


def read_onnx(path: Path) -> onnx.ModelProto:
    """Return the content of a checked file.

    Raises:
        ModelError: the file is too large, damaged, already quantized or optimized too far, or it
            has data in files that are not beside it, operators that are not allowed, functions that
            cannot be inlined, sparse tensors, or inputs that are no tensors.
    """
    if path.stat().st_size > MAX_BYTES:
        raise ModelError(f"{path}: larger than 2 GiB; expected a file within protobuf's limit")
    proto = _parse(files.read_bytes(path, MAX_BYTES), path)
    # IR 3 requires that initializers are inputs, and some of its files break this rule.
    proto.ir_version = max(proto.ir_version, 4)
    for graph in find_all(proto, onnx.GraphProto):
        # onnx-ir cannot read maps, such as ZipMap's, and needs no types of inner values.
        kept = [value for value in graph.value_info if value.type.HasField("tensor_type")]
        del graph.value_info[:]
        graph.value_info.extend(kept)
    _name_domain(proto)
    _read_outside(proto, path)
    proto = _inline(proto, path)
    _check(proto, path)
    return proto


def _parse(content: bytes, path: Path) -> onnx.ModelProto:
    proto = onnx.ModelProto()
    with errors_as(ModelError, f"{path}: not an ONNX model"):
        try:
            proto.ParseFromString(content)
        except DecodeError:  # the error's text names only the wire format
            raise ModelError(f"{path}: not an ONNX model, or a truncated one") from None
        if not proto.graph.node:
            raise ValueError("holds no graph")
        count = sum(1 for _ in find_all(proto.graph, onnx.NodeProto))  # this includes inner graphs
        if count > MAX_NODES:
            raise ValueError(f"has {count:,} nodes, expected at most {MAX_NODES:,}")
    return proto


def _read_outside(proto: onnx.ModelProto, path: Path) -> bool:
    """Load external data from files beside `path` into the model; return whether it had any."""
    outside = [tensor for tensor in find_all(proto, TensorProto) if _is_external(tensor)]
    contents: dict[str, bytes] = {}  # contents of the files next to the model
    hashed = files.find_data_names(path) if outside else set()
    for tensor in outside:
        _read_inside(tensor, path, hashed=hashed, contents=contents)
    with errors_as(ModelError, f"{path}: larger than 2 GiB with its data"):
        if proto.ByteSize() > MAX_BYTES:
            raise ValueError(f"expected at most {MAX_BYTES} bytes, protobuf's limit")
    return bool(outside)


def read_quantized(path: Path) -> bytes:
    """Check a quantized file; return its content with the external data inlined.

    Raises:
        ModelError: the file is damaged, too large with its data, or has too many nodes; it has a
            cycle, functions, or operators that are not allowed; or its data are not in regular
            files beside it.
        OSError: see `files.read_bytes`; the limit is 2 GiB.
    """
    content = files.read_bytes(path, MAX_BYTES)
    proto = _parse(content, path)

    # Refuse operators that may do more than compute
    computing = CONTRIBUTED | NARROWED
    for node in find_all(proto, onnx.NodeProto):
        known = node.domain == "com.microsoft" and node.op_type in computing
        if not known and node.domain not in ONNX_DOMAINS:
            raise ModelError(
                f"{path}: operator {node.op_type!r} of domain {node.domain!r}; expected "
                "operators of ONNX, or com.microsoft's that only compute"
            )
    if proto.functions:
        raise ModelError(f"{path}: holds functions; expected an export with inlined functions")

    # Refuse a cycle, in which walks over the graph would not end
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for node in find_all(proto, onnx.NodeProto):  # also of inner graphs
        for name in filter(None, node.output):
            sorter.add(name, *filter(None, node.input))
    try:
        sorter.prepare()
    except CycleError:
        raise ModelError(f"{path}: its graph has a cycle; expected a graph without one") from None
    if _read_outside(proto, path):
        return proto.SerializeToString()
    return content


def _is_external(tensor: TensorProto) -> bool:
    """Return whether a tensor's data are in another file, or the tensor names another file."""
    return bool(tensor.external_data) or tensor.data_location == TensorProto.EXTERNAL


def _read_inside(
    tensor: TensorProto, path: Path, hashed: Collection[str], contents: dict[str, bytes]
) -> None:
    """Replace a reference to a file beside `path` by the data.

    Args:
        hashed: the allowed names.
        contents: the content of each file that is already read, by name; the function adds to it.
    """
    where = {entry.key: entry.value for entry in tensor.external_data}
    name = where.get("location", "")
    beside = path.parent / name
    if not name or Path(name).name != name or beside.is_symlink():
        raise ModelError(
            f"{path}: tensor {tensor.name!r} lies in {name!r}; expected files beside the model, "
            "named without a folder"
        )
    if name not in hashed:
        raise ModelError(
            f"{path}: tensor {tensor.name!r} names {name!r} in an encoding that no exporter writes"
        )

    # Read each file once, because many tensors may lie in one
    with errors_as(ModelError, f"{path}: the data of {tensor.name!r} cannot be read"):
        if name not in contents:
            contents[name] = files.read_bytes(beside, MAX_BYTES)
        whole = contents[name]
        start = int(where.get("offset") or 0)
        size = int(where.get("length") or len(whole) - start)
        if not 0 <= start <= start + size <= len(whole):
            raise ValueError(f"{start} + {size} bytes of {len(whole)}")
    tensor.raw_data = whole[start : start + size]
    tensor.data_location = TensorProto.DEFAULT
    del tensor.external_data[:]


def _inline(proto: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """Return a model without functions, which torch's and onnxscript's exporters write.

    Functions of an opset that differs from the model's are not inlined, and `_check` refuses them.
    """
    if not proto.functions:
        return proto
    with errors_as(ModelError, f"{path}: its functions cannot be inlined"):
        _check_inlined_size(proto)
        return onnx.inliner.inline_local_functions(proto)


def _check_inlined_size(proto: onnx.ModelProto) -> None:
    """Raise ValueError if the graph would be too large after its functions are inlined.

    Raises:
        RecursionError: a function calls itself, or calls nest too deeply.
    """
    functions = {(item.domain, item.name, item.overload): item for item in proto.functions}

    # Each function is measured once, because calls may nest to an exponential size
    @cache
    def measure(key: tuple[str, str, str] | None) -> tuple[int, int]:
        """Return the numbers of nodes and bytes of a function, or of the graph."""
        measured: onnx.GraphProto | onnx.FunctionProto = proto.graph
        if key is not None:
            measured = functions[key]
        count = size = 0
        for node in find_all(measured, onnx.NodeProto):
            called = (node.domain, node.op_type, node.overload)
            if called in functions:  # the nodes of the function take the place of the call
                inner_count, inner_size = measure(called)
                count += inner_count
                size += inner_size
            else:
                count += 1
                size += node.ByteSize()
        return count, size

    count, size = measure(None)
    if count > MAX_NODES or size > MAX_BYTES:
        raise ValueError(f"they hold {count:,} nodes, expected at most {MAX_NODES}")


def check_graph(proto: onnx.ModelProto, path: Path) -> None:
    """Raise `ModelError` if `_check` or `check_layers` refuses an exported graph.

    Args:
        path: the file that the message names.
    """
    _check(proto, path)
    check_layers(proto, path)


def _name_domain(proto: onnx.ModelProto) -> None:
    """Write ONNX's domain as an empty text, in place: onnx's checker does not know `ai.onnx`."""
    for kind in (onnx.NodeProto, onnx.OperatorSetIdProto):
        for item in find_all(proto, kind):
            if item.domain == ONNX_DOMAINS[1]:
                item.domain = ONNX_DOMAINS[0]


def check_layers(proto: onnx.ModelProto, path: Path) -> None:
    """Raise `ModelError` if quantization would find nothing, or if weights of layers are not FP32.

    Args:
        path: the file that the message names.
    """
    reason = next(_reasons_not_to_quantize(proto), None)
    if reason is not None:
        raise ModelError(f"{path}: {reason}")


def _check(proto: onnx.ModelProto, path: Path) -> None:
    with errors_as(ModelError, f"{path}: not a valid ONNX model"):
        reason = next(_reasons_against(proto), None)
        if reason is None:
            _check_model(proto)
    if reason is not None:
        raise ModelError(f"{path}: {reason}")


def _check_model(proto: onnx.ModelProto) -> None:
    """Check a model with onnx's checker; write the inferred type of each output without a shape.

    ONNX Runtime needs no declared shape, and some exporters write none. If no shape can be
    inferred, such as after a Reshape to a computed shape, the output stays without one.
    """
    missing = [v for v in proto.graph.output if not v.type.tensor_type.HasField("shape")]
    unknown = []
    if missing:
        inferred = {value.name: value.type for value in infer_shapes(proto).output}
        for value in missing:
            value.type.CopyFrom(inferred[value.name])
            kind = value.type.tensor_type
            if kind.elem_type and not kind.HasField("shape"):
                kind.shape.SetInParent()  # onnx's checker requires one
                unknown.append(kind)
    onnx.checker.check_model(proto)
    for kind in unknown:
        kind.ClearField("shape")


def _reasons_against(proto: onnx.ModelProto) -> Iterator[str]:
    """Yield the reasons to refuse a file for its data, types or operators."""
    tensors = list(find_all(proto, TensorProto))
    for tensor in tensors:
        if _is_external(tensor):
            yield f"tensor {tensor.name!r} is external data; expected one file with all data in it"
    for sparse in find_all(proto, onnx.SparseTensorProto):
        yield f"tensor {sparse.values.name!r} is sparse; expected dense weights"

    # Refuse files that a quantizer or an optimizer has written
    nodes = list(find_all(proto, onnx.NodeProto))
    quantized = []
    fused = []
    for node in nodes:
        name = f"{node.domain} {node.op_type}"
        if _QUANTIZED.fullmatch(node.op_type):
            quantized.append(node.op_type)
        if _FUSED.fullmatch(name):
            fused.append(name)
    if quantized:
        yield f"already quantized ({_counted(quantized)}); {EXPECTS_FP32}"
    for tensor in tensors:
        if tensor.data_type in _NARROW and len(tensor.dims) >= 2:
            kind = type_name(tensor.data_type)
            yield f"already quantized ({kind} weights {tensor.name!r}); {EXPECTS_FP32}"
    if fused:
        yield (
            f"already optimized ({_counted(fused)}), so that quantization would not find the "
            "layers; expected the model as exported, without ONNX Runtime's extended or layout "
            "optimizations"
        )

    # Refuse values and operators that no FP32 network has
    if proto.functions:
        yield "holds functions; expected an export with inlined functions"
    for value in proto.graph.input:
        kind = value.type.WhichOneof("value")
        if kind not in ("tensor_type", None):
            yield f"input {value.name!r} is of type {kind.removesuffix('_type')}; expected a tensor"
    for node in nodes:
        if node.domain in ONNX_DOMAINS or (node.domain, node.op_type) in _OTHERS:
            continue
        why = ""
        if node.domain == "ai.onnx.ml":
            why = "; trees and other classical models have no layers to quantize"
        yield f"operator {node.op_type!r} of domain {node.domain!r}; expected one of ONNX's{why}"


def _reasons_not_to_quantize(proto: onnx.ModelProto) -> Iterator[str]:
    """Yield why quantization would fail: it finds nothing, or weights of layers are not FP32."""
    weights = []
    for layer, tensor in find_weights(proto.graph):
        if tensor.data_type not in _INDICES:
            weights.append((layer, tensor))
    if not weights:
        yield from _reasons_without_layers(proto)
    for layer, tensor in weights:
        if tensor.data_type != TensorProto.FLOAT:
            kind = type_name(tensor.data_type)
            yield f"weights {tensor.name!r} of {layer} are {kind}; expected the FP32 model"


def _reasons_without_layers(proto: onnx.ModelProto) -> Iterator[str]:
    """Yield why a graph without layers of known weights is refused.

    Operators of `STORED` suffice, unless an inner graph has layers.
    """
    inner = find_inner_layers(proto.graph)
    if inner:
        yield (
            "quantization would find nothing: its layers are inside "
            f"{', '.join(dict.fromkeys(inner))}, whose graphs are not quantized; expected an "
            "export without it (the branch that is used), or, if an input decides, its value: "
            "model.inputs={NAME: ...}"
        )
    if not any(find_weights(proto.graph, STORED)):
        mend = ""
        if any(node.op_type == "Einsum" for node in find_all(proto, onnx.NodeProto)):
            mend = ", and no backend quantizes Einsum; try an export with MatMul in its place"
        layers = ", ".join((*LAYERS, *RECURRENT, *STORED))
        yield f"quantization would find nothing: no {layers} with constant weights{mend}"


# Products of positions or sizes have these dtypes; such products are not layers.
_INDICES = (TensorProto.INT32, TensorProto.INT64)


def find_inner_layers(graph: onnx.GraphProto) -> list[str]:
    """Return, for each layer in an inner graph, the outermost operator around it, such as If."""
    around = []
    for node in graph.node:
        for inner in find_all(node, onnx.NodeProto):
            if inner.op_type in (*LAYERS, *RECURRENT):
                around.append(node.op_type)
    return around


def _counted(names: list[str]) -> str:
    """Return the names with the number of times that each occurs, as text.

    >>> _counted(["QLinearConv", "QGemm", "QLinearConv"])
    '2 QLinearConv, 1 QGemm'
    """
    return ", ".join(f"{count} {name}" for name, count in Counter(names).items())


def find_weights(
    graph: onnx.GraphProto, operators: Sequence[str] = (*LAYERS, *RECURRENT)
) -> Iterator[tuple[str, TensorProto]]:
    """Yield the operator of each layer with constant weights, and the stored constant."""
    origin = dict(Links(graph).constants)
    for node in graph.node:
        if node.op_type == "Constant":
            tensor = read_constant(node)
            if tensor is not None:
                origin[node.output[0]] = tensor
        elif node.op_type in operators:
            if node.input[1:2] and node.input[1] in origin:
                yield node.op_type, origin[node.input[1]]
        elif node.op_type in ("ConstantOfShape", "Range"):
            continue  # inputs are a shape, or the ends of a range
        elif node.input and node.output and origin.keys() >= set(node.input):
            # The node moves a constant, such as Transpose
            origin[node.output[0]] = origin[node.input[0]]


def read_constant(node: onnx.NodeProto) -> TensorProto | None:
    """Return the value of a Constant as a tensor; None for a sparse tensor or a text attribute."""
    [value] = node.attribute
    if value.name == "value":
        return value.t
    if value.name in ("value_float", "value_floats"):
        return numpy_helper.from_array(np.array(helper.get_attribute_value(value), np.float32))
    if value.name in ("value_int", "value_ints"):
        return numpy_helper.from_array(np.array(helper.get_attribute_value(value), np.int64))
    return None


def graph_inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Return the inputs without initializers, which IR versions up to 3 list as inputs."""
    constants = Links(graph).constants
    return [value for value in graph.input if value.name not in constants]


def type_name(code: int) -> str:
    """Return the name of a tensor's type, or of an unknown code in an untrusted file."""
    if code not in TensorProto.DataType.values():
        return f"type {code}"
    return str(TensorProto.DataType.Name(code)).lower()
