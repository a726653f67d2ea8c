"""Dynamic quantization in ONNX Runtime: activation ranges are computed at inference."""

from collections.abc import Sequence
from pathlib import Path

from onnxruntime.quantization import QuantType, quantize_dynamic

from resnet8ptq.backends.contract import refuse_others
from resnet8ptq.config.schema import DTYPES, QuantizationConfig

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
    """Write the dynamically quantized model to `path`."""
    quantize_dynamic(
        onnx_path,
        path,
        per_channel=config.per_channel,
        reduce_range=bool(config.reduce_range),
        weight_type=INTEGERS[DTYPES[config.dtype.name][1]],
        nodes_to_exclude=list(skipped),
        extra_options={"WeightSymmetric": config.symmetric.weights},
    )
