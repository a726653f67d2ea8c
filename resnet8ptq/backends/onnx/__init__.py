"""Quantizes for ONNX Runtime, and runs the files in it."""

from resnet8ptq.core.descriptor import Backend, Search

BACKEND = Backend(
    name="onnx",
    rank=1,
    other_names=("onnxruntime", "ort"),
    quantizer="resnet8ptq.backends.onnx.quantizer:OnnxQuantizer",
    options="resnet8ptq.backends.onnx.options:OnnxConfig",
    runtime="onnxruntime",
    packages=("onnx", "onnxruntime"),
    suffixes=(".onnx",),
    operators="resnet8ptq.backends.onnx.operators:find_quantized",
    dynamic_operators=frozenset({"LSTM"}),
    search=Search(
        start=(
            "dtype=u8s8",
            "calib=minmax",
            "per_channel=true",
            "format=auto",
            "float_output=true",
            "slim=true",
        ),
        sums_in_16_bits=True,
        fewer_bits=("reduce_range=true",),
        chooses_operators=True,
        dynamic=True,
        mixed=True,
        diagnoses=True,
        weights_alone=True,
        weights_in_blocks=True,
        float16_weights=True,
    ),
    advice="resnet8ptq.backends.onnx.advice",
    reads=(".onnx",),
    reader="resnet8ptq.backends.file.onnx_file",
    serving="mlflow.onnx",
)
