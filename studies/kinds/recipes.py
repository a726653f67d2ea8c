"""Recipes of this tool, each tried alone on every network."""

STATIC = (
    *("backend=onnx", "dtype=u8s8", "per_channel=true", "format=auto", "float_output=true"),
    "slim=true",
)
# A batch sets the ranges of a dynamic file, so it is scored as it is timed: one by one.
DYNAMIC = (
    *("backend=onnx", "method=dynamic", "dtype=u8s8", "per_channel=true", "slim=true"),
    "evaluate.batch_size=1",
)
_WEIGHTS = ("method=weight_only", "backend=onnx", "slim=true")
RECIPES: dict[str, tuple[str, ...]] = {
    "static per tensor": (*STATIC, "per_channel=false"),
    "static": STATIC,
    "static percentile": (*STATIC, "calib=percentile"),
    "static smooth": (*STATIC, "corrections.smooth_quant=true"),
    "static bias": (*STATIC, "corrections.bias_correction=true"),
    "dynamic": DYNAMIC,
    "dynamic matrices": (*DYNAMIC, "op_types=[LSTM,MatMul,Gemm]"),
    "mixed": (*STATIC, "method=mixed", "evaluate.batch_size=1"),
    "w8": (*_WEIGHTS, "dtype=w8"),
    "w8 by channel": (*_WEIGHTS, "dtype=w8", "weight_only.block_size=null"),
    "w4": (*_WEIGHTS, "dtype=w4"),
}
