"""Describes `backend=torch`: FX graph mode and PT2E, with their files."""

from resnet8ptq.backends.operators import SHARED, WITHOUT_TORCH
from resnet8ptq.core.descriptor import Backend, Search

OPERATORS = SHARED | {"MatMul", "HardSwish", "Elu"}  # operators that FX graph mode quantizes

BACKEND = Backend(
    name="torch",
    rank=2,
    other_names=("pytorch",),
    quantizer="resnet8ptq.backends.torch.quantizer:TorchQuantizer",
    options="resnet8ptq.backends.torch.options:TorchConfig",
    runtime="torch",
    packages=("torch", "torchao"),
    suffixes=(".pt", ".pt2"),
    runs_code=True,
    operators="resnet8ptq.backends.torch:OPERATORS",
    lacks=WITHOUT_TORCH,
    search=Search(
        start=(
            "dtype=int8",
            "calib=minmax",
            "per_channel=true",
            "op_types=[Conv,Gemm,MatMul,Add,Relu,Clip,Softmax,MaxPool]",  # leaves pools in float
        ),
        weights_alone=True,
        float16_weights=True,
    ),
    advice="resnet8ptq.backends.torch.advice",
    reads=(".pt2",),
    reader="resnet8ptq.backends.file.program_file",
    serving="resnet8ptq.backends.torch.serving",
)
