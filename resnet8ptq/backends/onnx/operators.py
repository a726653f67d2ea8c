"""The operators that ONNX Runtime quantizes, and those of the layers in an optimized graph."""

import re
from collections.abc import Mapping

# ONNX Runtime's names of convolutions and matrix products: FusedConv, QGemm, ConvInteger, ...
LAYER = re.compile("Conv|Gemm|MatMul")
INTEGER = re.compile("^Q|Integer|^DynamicQuantize")


def count_kernels(operators: Mapping[str, int]) -> tuple[int, int]:
    """Return the numbers of layers of an optimized graph that run on integers and in float.

    These layers are convolutions and matrix products; an LSTM does not count.

    >>> count_kernels({"QLinearConv": 9, "FusedGemm": 1, "QuantizeLinear": 2})
    (9, 1)

    Args:
        operators: the number of the graph's nodes, by operator.
    """
    on_integers = 0
    in_float = 0
    for name, count in operators.items():
        if not LAYER.search(name):
            continue
        if INTEGER.search(name):
            on_integers += count
        else:
            in_float += count
    return on_integers, in_float


def find_quantized() -> frozenset[str]:
    """Return the operators that ONNX Runtime quantizes in QDQ or in QOperator format.

    In QDQ format it quantizes all of them: those without a class of their own, such as Add, by a
    general one.
    """
    from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

    return frozenset(QDQRegistry) | frozenset(QLinearOpsRegistry)
