"""The settings of `backend=openvino_nncf`."""

from dataclasses import dataclass

from resnet8ptq.backends.openvino.options import OpenvinoConfig
from resnet8ptq.config.limits import limited, one_of


@dataclass
class NncfConfig(OpenvinoConfig):
    """The settings of NNCF, which `conf/backend/openvino_nncf.yaml` explains."""

    name: str = "openvino_nncf"
    preset: str | None = limited(None, one_of("performance", "mixed"))
    model_type: str | None = limited(None, one_of("transformer"))
    smooth_quant: bool = limited(True, only={"backend.model_type": one_of("transformer")})
    bias_correction: str = limited("fast", one_of("fast", "accurate", "none"))
