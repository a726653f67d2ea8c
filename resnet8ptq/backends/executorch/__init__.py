"""Describes `backend=executorch`: PT2E's programs, run by ExecuTorch with XNNPACK's kernels."""

from resnet8ptq.backends.operators import WITHOUT_TORCH
from resnet8ptq.core.descriptor import Backend

# PT2E quantizes these operators, and XNNPACK has 8-bit kernels for them.
OPERATORS = {
    "Conv",
    "Gemm",
    "MatMul",
    "Add",
    "Mul",
    "Relu",
    "Clip",
    "MaxPool",
    "GlobalAveragePool",
    "Transpose",
    "Reshape",
    "Flatten",
}

BACKEND = Backend(
    name="executorch",
    rank=4,
    quantizer="resnet8ptq.backends.executorch.quantizer:ExecutorchQuantizer",
    runtime="executorch",
    packages=("executorch", "torch", "torchao"),
    extra="executorch",
    suffixes=(".pte",),
    operators="resnet8ptq.backends.executorch:OPERATORS",
    lacks=WITHOUT_TORCH,
    advice="resnet8ptq.backends.executorch.advice",
    reads=(".pte",),
    reader="resnet8ptq.backends.file.executorch_file",
    serving="resnet8ptq.backends.executorch.serving",
)
