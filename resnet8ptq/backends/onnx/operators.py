"""The operators that ONNX Runtime quantizes."""


def find_quantized() -> frozenset[str]:
    """Return the operators that it quantizes in QDQ or in QOperator format."""
    from onnxruntime.quantization.registry import QLinearOpsRegistry

    return find_in_qdq() | frozenset(QLinearOpsRegistry)


def find_in_qdq() -> frozenset[str]:
    """Return the operators that it quantizes in QDQ format."""
    from onnxruntime.quantization.registry import QDQRegistry

    return frozenset(QDQRegistry)
