"""Dynamic quantization in ONNX Runtime: activation ranges are computed at inference."""

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from onnx import helper, numpy_helper, parser
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel
from onnxruntime.quantization import QuantType, quantize_dynamic

from resnet8ptq.backends.contract import refuse_others
from resnet8ptq.config.schema import DTYPES, QuantizationConfig
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.graph.session import open_runner
from resnet8ptq.precision.grid import WeightScheme

INTEGERS = {"int8": QuantType.QInt8, "uint8": QuantType.QUInt8, "uint16": QuantType.QUInt16}
LAYERS = ("ConvInteger", "MatMulInteger", "DynamicQuantizeLSTM")


def check(config: QuantizationConfig, weights: WeightScheme) -> None:
    """Check that this build of ONNX Runtime can run the file that `quantize` would write.

    Raises:
        UnsupportedError: the build has no integer convolution for these weights, or a setting
            applies to static quantization only.
    """
    static = "has no meaning with method=dynamic"
    unset = ([None], static)
    refuse_others(config, {"format": unset, "float_output": ([False], static)})
    refuse_others(config, {"symmetric.activations": unset, "calib.table": unset})
    if not _runs_convolution(weights.dtype, weights.per_channel):
        granularity = "per channel" if weights.per_channel else "per tensor"
        raise UnsupportedError(
            f"method=dynamic: ONNX Runtime's CPU kernels have no ConvInteger for {weights.dtype} "
            f"weights {granularity}"
        )


@cache
def _runs_convolution(dtype: str, per_channel: bool) -> bool:
    """Return whether a quantized network of one convolution loads and runs."""
    weights = np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 2, 2, 2)
    proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]>'
        "probe (float[1, 2, 4, 4] x) => (float[1, 2, 3, 3] y) { y = Conv(x, w) }"
    )
    proto.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    # The mark of preprocessing; without it, quantize_dynamic warns.
    helper.set_model_props(proto, {"onnx.quant.pre_process": "onnxruntime.quant"})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "probe.onnx")
        quantize_dynamic(proto, path, weight_type=INTEGERS[dtype], per_channel=per_channel)
        try:
            open_runner(str(path))(np.ones((1, 2, 4, 4), np.float32))
        except NoKernel:
            return False
    return True


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
