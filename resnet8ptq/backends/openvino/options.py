"""The settings of `backend=openvino`, which `backend=openvino_nncf` extends."""

from dataclasses import dataclass

from resnet8ptq.config.limits import limited, one_of
from resnet8ptq.config.schema import DTYPES, F32, FP32, BackendConfig

_STORED = one_of(*(name for name in DTYPES if name != FP32))


@dataclass
class OpenvinoConfig(BackendConfig):
    """The settings of OpenVINO, which runs on the CPU.

    Attributes:
        inference_precision: the float type of the layers that stay in float, by OpenVINO's name.
            The FP32 baseline always computes in f32, so that the loss includes the rounding to
            another type.
    """

    name: str = "openvino"
    inference_precision: str = limited(
        F32, one_of(F32, "bf16", "f16"), only={"dtype.name": _STORED}
    )
