"""Dynamic quantization in ONNX Runtime: activation ranges are computed at inference."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from resnet8ptq.backends.contract import refuse_others
from resnet8ptq.config.schema import DTYPES, QuantizationConfig
from resnet8ptq.graph.layers import attribute, find_stacks
from resnet8ptq.graph.links import Links
from resnet8ptq.graph.pruning import prune

log = logging.getLogger(__name__)

INTEGERS = {"int8": QuantType.QInt8, "uint8": QuantType.QUInt8, "uint16": QuantType.QUInt16}
LAYERS = ("ConvInteger", "MatMulInteger", "DynamicQuantizeLSTM")


def check(config: QuantizationConfig) -> None:
    """Raise `UnsupportedError` for a setting that applies to static quantization only."""
    unset = ([None], "has no meaning with method=dynamic")
    refuse_others(config, {"format": unset, "float_output": ([False], unset[1])})
    refuse_others(config, {"symmetric.activations": unset, "calib.table": unset})


def quantize(
    onnx_path: Path, path: Path, skipped: Sequence[str], config: QuantizationConfig
) -> None:
    """Write the dynamically quantized model to `path`; `onnx_path` is a copy that may change.

    The kernels of products of several matrices have no scales by channel: these stay in float.
    """
    proto = onnx.load(onnx_path)
    stacks: list[str] = []
    if config.per_channel:
        constants, several = Links(proto.graph).constants, find_stacks(proto.graph)
        nodes = [node for node in proto.graph.node if node.name in several]
        stacks = [node.name for node in nodes if node.input[1] in constants]
    if stacks:
        log.info("per_channel: left in float: %s", ", ".join(stacks)[:200])
    transpose_weights(proto.graph)
    onnx.save(proto, onnx_path)
    quantize_dynamic(
        onnx_path,
        path,
        per_channel=config.per_channel,
        reduce_range=bool(config.reduce_range),
        weight_type=INTEGERS[DTYPES[config.dtype.name][1]],
        nodes_to_exclude=[*skipped, *stacks],
        extra_options={"WeightSymmetric": config.symmetric.weights},
    )


def transpose_weights(graph: onnx.GraphProto) -> None:
    """Write the weights of each Gemm with `transB` transposed, in place.

    ONNX Runtime's quantizer does it once for each Gemm, also if several nodes read the weights.
    """
    links, transposed = Links(graph), dict[str, onnx.TensorProto]()
    for node in graph.node:
        if node.op_type != "Gemm" or not attribute(node, "transB", 0):
            continue
        name = node.input[1]
        if name not in links.constants:
            continue
        if name not in transposed:
            weights = np.ascontiguousarray(numpy_helper.to_array(links.constants[name]).T)
            transposed[name] = numpy_helper.from_array(weights, f"{name}__transposed")
            graph.initializer.append(transposed[name])
        links.replace_input(node, 1, transposed[name])
        for item in [item for item in node.attribute if item.name == "transB"]:
            node.attribute.remove(item)
    prune(graph)
