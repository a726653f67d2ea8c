"""Predicts from CPU flags whether the frameworks' integer kernels saturate.

x86 without VNNI multiplies 8-bit integers by vpmaddubsw, unsigned by signed, and sums two products
in 16 bits. Such a sum saturates at 32,767, but 255 * 127 * 2 is 64,770. With 7 bits on one side, no
sum saturates. https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html (U8S8),
https://uxlfoundation.github.io/oneDNN/dev_guide_int8_computations.html.

These kernels saturated with the largest integers, in ONNX Runtime 1.31 and torch 2.13 on a CPU with
AVX2: torch's engines fbgemm, x86 and onednn; with unsigned activations and signed weights, ONNX
Runtime's QLinearConv, QLinearMatMul, QGemm, MatMulInteger and DynamicQuantizeMatMul. ConvInteger is
exact, and so are unsigned weights. In QDQ format on x86, ONNX Runtime turns signed activations into
unsigned ones (QDQS8ToU8Transformer). In QOperator format, ONNX Runtime runs an exact loop for
signed activations.
"""

from collections.abc import Collection

from resnet8ptq.backends.contract import Resolved
from resnet8ptq.core import machine

_LINEAR = {"MatMul", "Gemm"}  # operators that become MatMulInteger with method=dynamic


def is_arm(flags: Collection[str]) -> bool:
    """Return whether the flags are those of a 64-bit ARM CPU."""
    return "asimd" in flags


def saturates(resolved: Resolved, operators: Collection[str], flags: Collection[str]) -> bool:
    """Return whether 16-bit sums of 8-bit products may saturate, so that outputs are wrong.

    Args:
        resolved: the resolved settings of a quantized run.
        operators: the operators of the FP32 network, by ONNX name; read for method=dynamic only.
        flags: the CPU's flags, see `machine.cpu`.
    """
    if machine.sums_exactly(flags) or "int8" not in resolved.weight_dtype.split(", "):
        return False
    if resolved.activation_bits is not None:  # torch, NNCF, ExecuTorch, and 16-bit activations
        whole = resolved.activation_bits == 8 and resolved.weight_bits != 7
        # Without an engine, PT2E computes in float, and XNNPACK's sums are exact
        return resolved.engine not in (None, "qnnpack") and whole

    # ONNX Runtime, also for OpenVINO: its formats have kernels for different pairs of dtypes
    if resolved.weight_bits != 8:
        return False
    if resolved.file_format == "QDQ":
        return True
    if resolved.file_format == "QOperator":
        return "uint8" in resolved.activation_dtype
    if resolved.file_format == "IntegerOps":
        return not _LINEAR.isdisjoint(operators)
    return False


def avoid_saturation(resolved: Resolved) -> str:
    """Return settings with which no 16-bit sum saturates, as text for a message."""
    settings = "reduce_range=true"
    if resolved.engine is None:  # ONNX Runtime also takes unsigned weights
        settings += " or dtype=uint8"
    return settings
