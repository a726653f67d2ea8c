"""Checks an untrusted TFLite file before LiteRT and tf2onnx read it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from resnet8ptq.core.errors import ModelError, errors_as
from resnet8ptq.models.gates import EXPECTS_FP32

KEEPS_STATE = (
    "keeps a state between calls (VAR_HANDLE), so that each output depends on earlier samples; "
    "expected a file whose state is an input and an output"
)
MAX_BYTES = 2**31 - 1  # FlatBuffers' limit
_NARROW = ("int2", "int4", "uint4", "int8", "uint8", "int16")


def check(path: Path) -> None:
    """Refuse a file that is too large or damaged, or for a reason of `_reasons_against`.

    Raises:
        ModelError: the file is refused.
    """
    if path.stat().st_size > MAX_BYTES:
        raise ModelError(f"{path}: larger than 2 GiB; expected one file, within FlatBuffers' limit")
    from ai_edge_litert.schema_py_generated import Model

    with errors_as(ModelError, f"{path}: not a TFLite model"):
        reason = next(_reasons_against(Model.GetRootAsModel(path.read_bytes(), 0)), None)
    if reason is not None:
        raise ModelError(f"{path}: {reason}")


def _reasons_against(model: Any) -> Iterator[str]:
    """Yield the reasons to refuse a file: custom operators, a state, several graphs, odd tensors.

    A VAR_HANDLE counts as a state. Tensors must be dense, and neither rounded to integers nor
    computed in float16.
    """
    from ai_edge_litert.schema_py_generated import BuiltinOperator, TensorType

    kinds = {}
    for name, value in vars(TensorType).items():
        if not name.startswith("_"):
            kinds[value] = name
    for index in range(model.OperatorCodesLength()):
        code = model.OperatorCodes(index)
        if code.CustomCode() is not None:
            yield f"operator {code.CustomCode().decode()!r} is custom; expected TFLite's operators"
        if code.BuiltinCode() == BuiltinOperator.VAR_HANDLE:
            yield KEEPS_STATE
    if model.SubgraphsLength() != 1:
        yield f"has {model.SubgraphsLength()} graphs; expected one"

    # Refuse tensors that are sparse, or narrower than float32
    graph = model.Subgraphs(0)
    for index in range(graph.TensorsLength()):
        tensor = graph.Tensors(index)
        kind = kinds.get(tensor.Type(), "unknown").lower()
        constant = model.Buffers(tensor.Buffer()).DataLength() > 0
        name = (tensor.Name() or b"").decode()
        if tensor.Sparsity() is not None:
            yield f"weights {name!r} are sparse; expected a file with dense weights"
        parameters = tensor.Quantization()
        scaled = parameters is not None and parameters.ScaleLength() > 0
        # Plain integers without a scale are indices or sizes
        if kind in _NARROW and (constant or scaled):
            role = "weights" if constant else "values"
            yield f"already quantized ({kind} {role} {name!r}); {EXPECTS_FP32}"
        if kind == "float16" and not constant:  # float16 weights convert to float32 exactly
            yield f"{name!r} is computed in float16; expected the FP32 model, or float16 weights"
