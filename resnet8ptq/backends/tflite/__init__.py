"""Describes `backend=tflite`: .tflite files of two converters, run by LiteRT's interpreter."""

from resnet8ptq.backends.operators import SHARED, WITHOUT_TFLITE
from resnet8ptq.core.descriptor import Backend, Search

OPERATORS = SHARED | {  # operators that TensorFlow's converter quantizes
    "MatMul",
    "ConvTranspose",
    "Sub",
    "Softmax",
    "LogSoftmax",
    "Tanh",
    "HardSwish",
    "PRelu",
    "Slice",
    "Split",
    "Gather",
    "Pad",
    "Resize",
    "ReduceMax",
    "ReduceSum",
    "ArgMax",
    "DepthToSpace",
    "SpaceToDepth",
    "Minimum",
    "Maximum",
}

BACKEND = Backend(
    name="tflite",
    rank=3,
    other_names=("tensorflow", "tf", "keras", "litert"),
    quantizer="resnet8ptq.backends.tflite.quantizer:TfliteQuantizer",
    options="resnet8ptq.backends.tflite.options:TfliteConfig",
    complete="resnet8ptq.backends.tflite.options:choose_flow",
    runtime="ai-edge-litert",
    packages=("ai-edge-litert", "ai-edge-quantizer", "tensorflow-cpu", "tensorflow"),
    suffixes=(".tflite",),
    operators="resnet8ptq.backends.tflite:OPERATORS",
    lacks=WITHOUT_TFLITE,
    has_ranges=False,  # the converter calibrates
    single_input=True,
    converts=("keras", "saved_model"),
    search=Search(fewer_bits=(), weights_alone=True, wide_activations=True, float16_weights=True),
    advice="resnet8ptq.backends.tflite.advice",
    reads=(".tflite",),
    reader="resnet8ptq.backends.file.tflite_file",
    serving="resnet8ptq.backends.tflite.serving",
)
