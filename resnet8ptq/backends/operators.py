"""Sets of ONNX operators that frameworks compute on integers, or cannot convert."""

# Operators that most frameworks compute on integers
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

# Operators that neither onnx2tf nor onnx2torch converts, and that no optimization removes
SEQUENCES = frozenset(
    {
        "ConcatFromSequence",
        "SequenceAt",
        "SequenceConstruct",
        "SequenceEmpty",
        "SequenceErase",
        "SequenceInsert",
        "SequenceLength",
        "SequenceMap",
        "SplitToSequence",
    }
)
# Of Loop, three forms were tried: onnx2tf 2.6.9 refuses two, ai-edge-quantizer the third
WITHOUT_TFLITE = SEQUENCES | {"Loop", "RMSNormalization", "Scan"}
WITHOUT_TORCH = SEQUENCES | {"Attention", "Loop", "STFT", "Scan"}
