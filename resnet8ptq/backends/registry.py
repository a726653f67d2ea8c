"""The quantizers by backend name. A framework is imported only when a run needs it."""

from pkgutil import resolve_name

from resnet8ptq.backends.contract import Quantizer
from resnet8ptq.config.schema import QuantizationConfig
from resnet8ptq.core.machine import Runtime
from resnet8ptq.core.registry import look_up

BACKENDS = {
    "onnx": "resnet8ptq.backends.onnx.quantizer:OnnxQuantizer",
    "torch": "resnet8ptq.backends.torch.quantizer:TorchQuantizer",
    "openvino": "resnet8ptq.backends.openvino.quantizer:OpenvinoQuantizer",
    "openvino_nncf": "resnet8ptq.backends.openvino.nncf_quantizer:NncfQuantizer",
    "tflite": "resnet8ptq.backends.tflite.quantizer:TfliteQuantizer",
    "file": "resnet8ptq.backends.file.quantizer:FileQuantizer",
    "executorch": "resnet8ptq.backends.executorch.quantizer:ExecutorchQuantizer",
}


def make_quantizer(config: QuantizationConfig, runtime: Runtime) -> Quantizer:
    """Return the quantizer that `backend` names; raise `ConfigError` for an unknown name."""
    make = resolve_name(look_up("backend.name", config.backend.name, BACKENDS))
    quantizer: Quantizer = make(config, runtime)
    return quantizer
