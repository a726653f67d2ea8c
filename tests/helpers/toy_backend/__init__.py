"""A backend of one folder, as a contributor would add it: 8-bit weights, run by ONNX Runtime."""

from resnet8ptq.core.descriptor import Backend

BACKEND = Backend(
    name="toy",
    quantizer="tests.helpers.toy_backend.quantizer:ToyQuantizer",
    options="tests.helpers.toy_backend.options:ToyConfig",
    runtime="onnxruntime",
    packages=("onnxruntime", "filelock"),
    suffixes=(".toy",),
    operators="tests.helpers.toy_backend.files:OPERATORS",
    has_ranges=False,  # activations are float
    single_input=True,
    reads=(".toy",),
    reader="tests.helpers.toy_backend.files",
    serving="tests.helpers.toy_backend.serving",
)
