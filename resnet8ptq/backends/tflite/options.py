"""The settings of `backend=tflite`."""

from dataclasses import dataclass, replace
from pathlib import Path

from resnet8ptq.config.limits import limited, one_of
from resnet8ptq.config.schema import BackendConfig, RunConfig


@dataclass
class TfliteConfig(BackendConfig):
    """TensorFlow Lite: TensorFlow's converter, or onnx2tf's."""

    name: str = "tflite"
    flow: str | None = limited(None, one_of("convert", "onnx2tf"))
    integer_io: bool | None = None

    @property
    def takes_every_operator(self) -> bool:
        """Whether TensorFlow's converter makes the file."""
        return self.flow != "onnx2tf"


def choose_flow(options: TfliteConfig, config: RunConfig, source: Path) -> TfliteConfig:
    """Return the options with the converter for this network."""
    from resnet8ptq.models.sources.formats import format_name, is_tflites

    if options.flow is not None:
        return options
    name = format_name(source, config.model.module is not None)
    # TensorFlow converts the whole file.
    by_tensorflow = is_tflites(name, config.dtype.is_float) and not config.model.outputs
    return replace(options, flow="convert" if by_tensorflow else "onnx2tf")
