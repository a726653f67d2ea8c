"""ONNX operators that several frameworks compute on integers."""

SHARED = frozenset(
    {
        "Conv",
        "Gemm",
        "Add",
        "Mul",
        "Relu",
        "Clip",
        "Sigmoid",
        "LeakyRelu",
        "Concat",
        "Flatten",
        "MaxPool",
        "AveragePool",
        "GlobalAveragePool",
        "ReduceMean",
        "Reshape",
        "Transpose",
        "Squeeze",
        "Unsqueeze",
    }
)
