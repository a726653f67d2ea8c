"""Dynamic quantization in ONNX Runtime: activation ranges are computed at inference."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnxruntime.quantization import QuantType, quantize_dynamic

from resnet8ptq.backends.contract import Takes, refuse_others
from resnet8ptq.config.schema import DTYPES, QuantizationConfig
from resnet8ptq.graph.layers import find_stacks
from resnet8ptq.graph.links import Links
from resnet8ptq.graph.passes import (
    Writer,
    input_of,
    remove_unused,
    rewrite,
    values_of,
)

log = logging.getLogger(__name__)

INTEGERS = {"int8": QuantType.QInt8, "uint8": QuantType.QUInt8, "uint16": QuantType.QUInt16}
LAYERS = ("ConvInteger", "MatMulInteger", "DynamicQuantizeLSTM")


def refuse_static_settings(config: QuantizationConfig) -> None:
    """Raise `UnsupportedError` for settings of static quantization.

    These are `format`, `float_output`, `symmetric.activations` and `calib.table`.
    """
    reason = "has no meaning with method=dynamic"
    takes: Takes = {
        "format": ([None], reason),
        "float_output": ([False], reason),
        "symmetric.activations": ([None], reason),
        "calib.table": ([None], reason),
    }
    refuse_others(config, takes)


def quantize(
    onnx_path: Path, path: Path, skipped: Sequence[str], config: QuantizationConfig
) -> None:
    """Write the dynamically quantized model to `path`; the file at `onnx_path` is rewritten.

    With per_channel=true, products of several constant matrices stay in float, because their
    kernels take no scale for each channel.

    Args:
        skipped: names of the nodes that this function leaves in float.
    """
    proto = onnx.load(onnx_path)

    # Products that have no scale for each channel
    stacks = []
    if config.per_channel:
        constants = Links(proto.graph).constants
        several = find_stacks(proto.graph)
        for node in proto.graph.node:
            if node.name in several and node.input[1] in constants:
                stacks.append(node.name)
    if stacks:
        log.info("per_channel: left in float: %s", ", ".join(stacks)[:200])
    onnx.save(rewrite(proto, [transpose_weights, remove_unused]), onnx_path)

    # Quantize without the lines that the quantizer logs for each tensor
    logging.getLogger().addFilter(_is_of_use)  # the quantizer logs to the root
    try:
        quantize_dynamic(
            onnx_path,
            path,
            per_channel=config.per_channel,
            reduce_range=bool(config.reduce_range),
            weight_type=INTEGERS[DTYPES[config.dtype.name][1]],
            nodes_to_exclude=[*skipped, *stacks],
            extra_options={"WeightSymmetric": config.symmetric.weights},
        )
    finally:
        logging.getLogger().removeFilter(_is_of_use)


def _is_of_use(record: logging.LogRecord) -> bool:
    """Return whether to show a record of the log; lines about single tensors are not shown."""
    of_each = ("Quantization parameters for tensor", "Inference failed or unsupported type")
    return not record.getMessage().startswith(of_each)


def transpose_weights(model: ir.Model) -> None:
    """Transpose the constant weights of each Gemm that has `transB`, and remove the attribute.

    ONNX Runtime's quantizer would transpose shared weights once for each Gemm that reads them.
    """
    transposed: dict[ir.Value, ir.Value] = {}
    for node in model.graph:
        if node.op_type != "Gemm" or not node.attributes.get_int("transB", 0):
            continue
        weights = input_of(node, 1)
        if not weights.is_initializer():
            continue
        if weights not in transposed:
            values = np.ascontiguousarray(values_of(weights).T)
            transposed[weights] = Writer(node).constant(f"{weights.name}__transposed", values)
        node.replace_input_with(1, transposed[weights])
        del node.attributes["transB"]
