"""What the frameworks' integer kernels can do on a CPU, from its flags alone.

x86 without VNNI multiplies 8-bit integers by vpmaddubsw: an unsigned one by a signed one, two
products summed in 16 bits, which saturate at 32,767; 255 * 127 * 2 is 64,770. With 7 bits on one
of the sides no sum does. https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html
(U8S8), https://uxlfoundation.github.io/oneDNN/dev_guide_int8_computations.html. Which kernels do so
was tried with the largest integers in ONNX Runtime 1.31 and torch 2.13 on a CPU with AVX2: of ONNX
Runtime QLinearConv, QLinearMatMul, QGemm, MatMulInteger and DynamicQuantizeMatMul with unsigned
activations and signed weights, but not ConvInteger, and none with unsigned weights; of torch the
engines fbgemm, x86 and onednn. ONNX Runtime makes unsigned activations of signed ones in QDQ format
on x86 (QDQS8ToU8Transformer), and has a plain, exact loop for them in the other.
"""

from collections.abc import Collection

from resnet8ptq.backends.contract import Resolved
from resnet8ptq.core.machine import VNNI

_LINEAR = {"MatMul", "Gemm"}  # dynamic: MatMulInteger


def is_x86(flags: Collection[str]) -> bool:
    """Tell whether these are flags of an x86 CPU of 64 bits."""
    return "sse2" in flags


def is_arm(flags: Collection[str]) -> bool:
    """Tell whether these are flags of an ARM CPU of 64 bits."""
    return "asimd" in flags


def saturates(resolved: Resolved, operators: Collection[str], flags: Collection[str]) -> bool:
    """Tell whether 16-bit sums of 8-bit products may saturate, so that outputs are wrong.

    Args:
        resolved: what a quantized run's settings came to.
        operators: of the FP32 network, as ONNX calls them.
        flags: of the CPU, see `machine.cpu`.
    """
    if (
        not is_x86(flags)
        or not VNNI.isdisjoint(flags)
        or "int8" not in resolved.weight_dtype.split(", ")
    ):
        return False
    if resolved.engine is not None:  # torch
        return resolved.engine != "qnnpack" and resolved.activation_bits == 8
    if resolved.weight_bits != 8:
        return False
    return {
        "QDQ": True,
        "QOperator": resolved.activation_dtype == "uint8",
        "IntegerOps": not _LINEAR.isdisjoint(operators),
    }.get(resolved.file_format or "", False)


def avoid_saturation(resolved: Resolved) -> str:
    """Return the settings that `saturates` does not hold for."""
    return (
        "reduce_range=true" if resolved.engine is not None else "reduce_range=true or dtype=uint8"
    )
