"""The settings of `backend=onnx`."""

from dataclasses import dataclass, replace
from typing import Any, Self

from resnet8ptq.config.limits import Limit, limited
from resnet8ptq.config.schema import CPU, BackendConfig
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.core.text import no_such_name

# `onnxruntime.get_all_providers()`: each build has a few of them.
PROVIDERS = (
    CPU,
    *("CUDAExecutionProvider", "TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider"),
    *("OpenVINOExecutionProvider", "QNNExecutionProvider", "CoreMLExecutionProvider"),
    *("DmlExecutionProvider", "XnnpackExecutionProvider", "NnapiExecutionProvider"),
    *("MIGraphXExecutionProvider", "ROCMExecutionProvider", "VitisAIExecutionProvider"),
    *("DnnlExecutionProvider", "ACLExecutionProvider", "CANNExecutionProvider"),
    *("RknpuExecutionProvider", "VSINPUExecutionProvider", "WebGpuExecutionProvider"),
    *("WebNNExecutionProvider", "JsExecutionProvider", "AzureExecutionProvider"),
)


class _Provider(Limit):
    """A provider's name; this build may lack it, since a target may run the files."""

    def check(self, key: str, got: Any) -> None:
        """Raise `ConfigError` for an unknown name, with the providers of this build."""
        if not self.holds(got):
            import onnxruntime  # imported only for this message

            raise ConfigError(no_such_name(key, got, onnxruntime.get_available_providers()))


_PROVIDER = _Provider("an execution provider", lambda got: got in PROVIDERS)


@dataclass
class OnnxConfig(BackendConfig):
    """The options of ONNX Runtime.

    Attributes:
        provider: ONNX Runtime's execution provider, which runs the files.
    """

    name: str = "onnx"
    provider: str = limited(CPU, _PROVIDER)

    def on_cpu(self) -> Self:
        """Return the settings with the CPU's provider; see `BackendConfig.on_cpu`."""
        return replace(self, provider=CPU)
