"""`method=weight_only` in ONNX Runtime: by default, each block of weights has a scale.

With `weight_only.block_size=null`, each output channel has a scale instead, see `weight_storage`.

ONNX Runtime's operator MatMulNBits multiplies float activations by weights, here of 4 or 8 bits.
Its operator GatherBlockQuantized looks up rows of a table, here in 4 bits:
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

import logging
import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto

from resnet8ptq.backends.contract import (
    WEIGHTS_ALONE,
    Resolved,
    Takes,
    refuse_others,
    resolve_stored,
)
from resnet8ptq.backends.onnx import rewriting, weight_storage
from resnet8ptq.config.schema import DTYPES, QuantizationConfig
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.graph.layers import attribute, weight_layers
from resnet8ptq.graph.links import find_all
from resnet8ptq.graph.passes import Pass, Writer, input_of, replace_node, rewrite, values_of

log = logging.getLogger(__name__)

OPERATOR = "MatMulNBits"
LAYERS = ("Gemm", "MatMul")
_EMBEDDING = "Gather"
_ACCURACY_LEVEL = 4  # the kernel rounds its activations to int8, one scale per block and row
_EMBEDDING_TAKES: Takes = {
    "dtype.name": (["w4"], "ONNX Runtime's function has 4 bits for op_types=[Gather]"),
    "weight_only.algorithm": (["rtn"], "op_types=[Gather] takes rtn"),
}
_HQQ_TAKES: Takes = {
    "dtype.name": (["w4"], "weight_only.algorithm=hqq has float zero points: 8 bits lack a kernel"),
    "symmetric.weights": ([None, False], "weight_only.algorithm=hqq has zero points"),
    "weight_only.int8_products": ([False], "weight_only.algorithm=hqq computes in float"),
}


def resolve(config: QuantizationConfig) -> Resolved:
    """Return dtypes, bits and execution of the settings.

    Raises:
        UnsupportedError: a setting does not apply to weights alone, or to their storage.
    """
    if by_channel(config):
        return resolve_stored(config, file_format="Cast and Mul")
    refuse_others(config, WEIGHTS_ALONE)
    if config.weight_only.algorithm == "hqq":
        refuse_others(config, _HQQ_TAKES)
    if _EMBEDDING in find_operators(config):
        refuse_others(config, _EMBEDDING_TAKES)

    # Start from the library's defaults: zero points, and products in float
    bits = _bits(config)
    resolved = Resolved(
        weight_dtype=f"uint{bits}",
        weight_scheme="affine",
        weight_bits=bits,
        execution="weights only, float activations",
        file_format=OPERATOR,
    )
    if _is_symmetric(config):
        resolved = replace(resolved, weight_dtype=f"int{bits}", weight_scheme="symmetric")
    if config.weight_only.int8_products:
        resolved = replace(
            resolved, activation_dtype="int8 (dynamic)", execution="weights only, int8 products"
        )
    return resolved


def find_operators(config: QuantizationConfig) -> list[str]:
    """Return the operators that the settings quantize.

    Gather is among them only with weights in blocks, and if `op_types` names it.
    """
    possible: Sequence[str] = (*LAYERS, _EMBEDDING)
    if by_channel(config):
        possible = weight_storage.OPERATORS
    if config.op_types is None:
        return [name for name in possible if name != _EMBEDDING]
    return [name for name in possible if name in config.op_types]


def by_channel(config: QuantizationConfig) -> bool:
    """Return whether all weights of an output channel share a scale; see `weight_storage`."""
    return config.weight_only.block_size is None


def find_layers(graph: onnx.GraphProto, skipped: Collection[str] = ()) -> list[onnx.NodeProto]:
    """Return the matrix products of an FP32 network whose weights can be stored in blocks.

    Args:
        skipped: names of nodes that stay in float.
    """
    ranks = {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    layers = []
    for node in weight_layers(graph).values():
        if node.op_type not in LAYERS or node.name in skipped:
            continue
        is_plain = ranks[node.input[1]] == 2 and not attribute(node, "transA", 0)
        # beta becomes part of the bias, which is then a constant
        can_add_bias = attribute(node, "beta", 1.0) == 1 or {*node.input[2:]} <= ranks.keys()
        if is_plain and can_add_bias:
            layers.append(node)
    return layers


def find_embeddings(graph: onnx.GraphProto, skipped: Collection[str] = ()) -> list[onnx.NodeProto]:
    """Return the Gather nodes that look up whole rows of a constant float table [words, values].

    Tables that a MatMul also reads are left out: the blocks of both would have the same name.

    Args:
        skipped: names of nodes that stay in float.
    """
    tables = set()
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 2:
            tables.add(tensor.name)
    for node in graph.node:
        if node.op_type == "MatMul":
            tables.difference_update(node.input)

    # Blocks are along the rows, so a lookup must take whole rows
    lookups = []
    for node in graph.node:
        is_lookup = node.op_type == _EMBEDDING and node.input[0] in tables
        if is_lookup and node.name not in skipped and attribute(node, "axis", 0) == 0:
            lookups.append(node)
    return lookups


def check_layers(
    graph: onnx.GraphProto, skipped: Collection[str], config: QuantizationConfig
) -> None:
    """Check that there is a layer to quantize; with blocks, warn about layers that stay in float.

    Raises:
        UnsupportedError: there is no layer to quantize; with blocks, no matrix product.
    """
    if by_channel(config):
        return weight_storage.check_storable(graph, skipped)

    # Blocks suit matrix products only
    left = count_left(graph, skipped)
    if not find_layers(graph, skipped):
        listed = ""
        if left:
            listed = f": {_list(left)} stay in float"
        raise UnsupportedError(
            "method=weight_only: ONNX Runtime quantizes MatMul and Gemm with constant weights, and "
            f"the network has none to quantize{listed}"
        )
    if left:
        log.warning("method=weight_only: layers in float: %s", _list(left))


def describe_left(
    graph: onnx.GraphProto, skipped: Collection[str], config: QuantizationConfig
) -> dict[str, str]:
    """Return the counts of `count_left` or `weight_storage.count_left` as one MLflow param.

    The result is empty if nothing is counted.
    """
    if by_channel(config):
        left = weight_storage.count_left(graph, skipped)
    else:
        left = count_left(graph, skipped)
    return {"float_operators": _list(left)} if left else {}


def count_left(graph: onnx.GraphProto, skipped: Collection[str]) -> Counter[str]:
    """Count by operator the layers of `weight_layers` that are not in `find_layers`."""
    layers = Counter(node.op_type for node in weight_layers(graph).values())
    layers.subtract(node.op_type for node in find_layers(graph, skipped))
    return +layers


def quantize(source: Path, path: Path, skipped: Sequence[str], config: QuantizationConfig) -> None:
    """Write the model with quantized weights to `path`.

    Args:
        skipped: names of nodes that this function does not quantize.
    """
    if by_channel(config):
        return onnx.save(weight_storage.quantize(onnx.load(source), skipped), path)
    # The library configures logging on import, which has no effect once a run has configured it.
    from onnxruntime.quantization import matmul_nbits_quantizer as library

    # Choose the layers, and write each Gemm as the MatMul that the library takes
    proto = onnx.load(source)
    chosen = {node.name for node in find_layers(proto.graph, skipped)}
    embeddings: set[str] = set()
    if _EMBEDDING in find_operators(config):
        embeddings = {node.name for node in find_embeddings(proto.graph, skipped)}
    if embeddings:  # the library raises the opset without converting operators
        proto = rewriting.raise_opset_for_bits(proto, 4)
    chosen |= embeddings
    proto = rewrite(proto, [write_as_products(chosen)])
    # The library also enters inner graphs, whose layers stay in float
    nodes = find_all(proto.graph, onnx.NodeProto)
    others = [node.name for node in nodes if node.name not in chosen]

    # Quantize without the library's log
    quantizer = library.MatMulNBitsQuantizer(
        proto, algo_config=_algorithm(library, config, bool(embeddings)), nodes_to_exclude=others
    )
    library.logger.setLevel(logging.WARNING)  # the library logs several lines for each node
    with warnings.catch_warnings():
        # The library only reads the arrays
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        quantizer.process()
    written = quantizer.model.model
    # The library writes equal constants for layers with shared weights: keep one of them.
    tensors = {tensor.name: tensor for tensor in written.graph.initializer}
    del written.graph.initializer[:]
    written.graph.initializer.extend(tensors.values())
    onnx.save(written, path)


def write_as_products(names: Collection[str]) -> Pass:
    """Return a pass that replaces each named Gemm by a MatMul of its name, and an Add for a bias.

    ONNX Runtime's `MatMulNBitsQuantizer` takes no Gemm. alpha and beta become part of the
    constants.
    """

    def write(model: ir.Model) -> None:
        for node in list(model.graph):
            if node.op_type == "Gemm" and node.name in names:
                _split(node)

    return write


def _split(gemm: ir.Node) -> None:
    """Replace a Gemm by a MatMul, and an Add if the Gemm has a bias."""
    write = Writer(gemm)
    name = str(gemm.name)
    output = str(gemm.outputs[0].name)
    alpha = np.float32(gemm.attributes.get_float("alpha", 1.0))
    beta = np.float32(gemm.attributes.get_float("beta", 1.0))
    values = values_of(input_of(gemm, 1))
    if gemm.attributes.get_int("transB", 0):
        values = values.T
    weights = np.ascontiguousarray(values) * alpha
    factors = [gemm.inputs[0], write.constant(f"{name}__weights", weights)]

    # The last new node takes over the name of the output
    bias = gemm.inputs[2] if len(gemm.inputs) > 2 else None
    if bias is None:
        replace_node(gemm, write("MatMul", factors, output, name))
        return
    if beta != 1:
        bias = write.constant(f"{name}__bias", values_of(bias) * beta)
    product = write("MatMul", factors, f"{name}__product", name)
    replace_node(gemm, write("Add", [product, bias], output, f"{name}__Add"))


def _algorithm(library: Any, config: QuantizationConfig, embeddings: bool) -> Any:
    """Return the library's object for the settings of weights in blocks.

    Args:
        embeddings: whether embedding tables are quantized too.
    """
    chosen = config.weight_only
    bits = _bits(config)
    if chosen.algorithm == "hqq":
        return library.HQQWeightOnlyQuantConfig(block_size=chosen.block_size, bits=bits)

    # The library's default algorithm; with an accuracy level, products are in int8
    accuracy_level = None
    if chosen.int8_products:
        accuracy_level = _ACCURACY_LEVEL
    operators: tuple[str, ...] = ("MatMul",)
    if embeddings:
        operators = ("MatMul", _EMBEDDING)
    return library.DefaultWeightOnlyQuantConfig(
        block_size=chosen.block_size,
        is_symmetric=_is_symmetric(config),
        accuracy_level=accuracy_level,
        op_types_to_quantize=operators,
        bits=bits,
    )


def _bits(config: QuantizationConfig) -> int:
    return int(DTYPES[config.dtype.name][1].removeprefix("int"))


def _is_symmetric(config: QuantizationConfig) -> bool:
    # Zero points are the default, as in the library: under 2% of the bytes, and 4 bits lose less.
    return config.symmetric.weights is True


def _list(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
