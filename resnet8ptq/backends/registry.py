"""The frameworks, by name. A framework is imported when a run asks for it, not before."""

from collections.abc import Callable

from resnet8ptq.backends.contract import Quantizer
from resnet8ptq.config.schema import RunConfig


def _onnx(config: RunConfig) -> Quantizer:
    from resnet8ptq.backends.onnx.quantizer import OnnxQuantizer

    return OnnxQuantizer(config)


def _torch(config: RunConfig) -> Quantizer:
    from resnet8ptq.backends.torch.quantizer import TorchQuantizer

    return TorchQuantizer(config)


def _tflite(config: RunConfig) -> Quantizer:
    from resnet8ptq.backends.tflite.quantizer import TfliteQuantizer

    return TfliteQuantizer(config)


BACKENDS: dict[str, Callable[[RunConfig], Quantizer]] = {
    "onnx": _onnx,
    "torch": _torch,
    "tflite": _tflite,
}
