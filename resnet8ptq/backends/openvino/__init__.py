"""Describes `backend=openvino`: files of `backends.onnx`, run with OpenVINO's kernels."""

from resnet8ptq.core.descriptor import Backend, Search

BACKEND = Backend(
    name="openvino",
    rank=5,
    quantizer="resnet8ptq.backends.openvino.quantizer:OpenvinoQuantizer",
    options="resnet8ptq.backends.openvino.options:OpenvinoConfig",
    runtime="openvino",
    packages=("openvino", "onnx", "onnxruntime"),
    extra="openvino",
    suffixes=(".onnx",),
    operators="resnet8ptq.backends.onnx.operators:find_quantized",
    search=Search(
        sums_in_16_bits=True, chooses_operators=True, weights_alone=True, float16_weights=True
    ),
    advice="resnet8ptq.backends.openvino.advice",
    reads=(".xml", ".zip"),  # .zip holds both files
    reader="resnet8ptq.backends.file.openvino_file",
    serving="resnet8ptq.backends.openvino.serving",
)
