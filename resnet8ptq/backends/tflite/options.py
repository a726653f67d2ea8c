"""The settings of `backend=tflite`."""

from dataclasses import dataclass, replace

from resnet8ptq.config.limits import limited, one_of
from resnet8ptq.config.schema import BackendConfig


@dataclass
class TfliteConfig(BackendConfig):
    """The settings of `backend=tflite`, which `conf/backend/tflite.yaml` explains."""

    name: str = "tflite"
    flow: str | None = limited(None, one_of("convert", "onnx2tf"))
    integer_io: bool | None = None

    @property
    def takes_every_operator(self) -> bool:
        """Whether the flow is `convert` or undecided."""
        return self.flow != "onnx2tf"


def choose_flow(
    options: TfliteConfig, network_format: str, outputs: list[str] | None, is_float: bool
) -> TfliteConfig:
    """Return the options, with the default flow for this network if the user has chosen none.

    Args:
        network_format: see `Fp32Model.format`.
        outputs: `model.outputs`; TensorFlow's converter takes whole networks only.
        is_float: whether the quantized network computes in float; a .tflite file then needs no
            conversion.
    """
    from resnet8ptq.models.sources.formats import is_tflites

    if options.flow is not None:
        return options
    if is_tflites(network_format, is_float) and not outputs:
        return replace(options, flow="convert")
    return replace(options, flow="onnx2tf")
